# Copyright (c) the d2_memfit developers.
"""The pictures of the documentation, one or two in a file."""
