# Copyright (c) the d2_memfit developers.
"""Detectors of the transformers library, trained and evaluated by Detectron2."""

from .config import add_transformers_config, check_transformers_config
from .data import ResizeSquare, build_mapper
from .model import TransformersDetector
from .trainer import Trainer

__all__ = [
    "ResizeSquare",
    "Trainer",
    "TransformersDetector",
    "add_transformers_config",
    "build_mapper",
    "check_transformers_config",
]
