# Copyright (c) the d2_memfit developers.
"""Differences between releases: Detectron2's here, PyTorch's private names in ``pytorch``."""

from .detectron2 import *
