# Copyright (c) the d2_memfit developers.
"""Certificates: the predicted memory of each window of a run, before it starts."""

from .certificate import Certificate
from .certify import certify
from .follow import follow

__all__ = ["Certificate", "certify", "follow"]
