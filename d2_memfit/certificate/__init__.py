# Copyright (c) the d2_memfit developers.
"""A certificate of a run: the memory of each of its windows, known before it starts."""

from .certificate import Certificate
from .certify import certify
from .follow import follow

__all__ = ["Certificate", "certify", "follow"]
