# Copyright (c) the d2_memfit developers.
"""Units of memory, in bytes."""

__all__ = ["GB", "MB"]

MB = 2**20
GB = 2**30
