"""The pictures of the documentation, one or two in a file."""
