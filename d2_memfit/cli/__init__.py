# Copyright (c) the d2_memfit developers.
"""The commands that people type."""
