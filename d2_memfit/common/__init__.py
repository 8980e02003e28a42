# Copyright (c) the d2_memfit developers.
"""Small tools of all rooms, and units of memory in bytes."""

MB = 2**20
GB = 2**30
