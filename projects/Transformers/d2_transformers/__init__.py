# Copyright (c) the d2_memfit developers.
"""Detectors of the transformers library, trained and evaluated by Detectron2."""

from .config import add_transformers_config
from .model import TransformersDetector
from .trainer import Trainer

__all__ = ["Trainer", "TransformersDetector", "add_transformers_config"]
