# Copyright (c) the d2_memfit developers.
"""An iteration in numbers: sizes of batches, workers, bytes by image, number formats."""

from .averaged_weights import AveragedWeights, average_of, with_averaged_weights
from .cost_model import FEATURES, CostModel, ImageFacts, Padding, check_cost_model
from .geometry import BatchGeometry
from .precision import Precision
from .scaling import auto_scale_workers

__all__ = [
    "FEATURES",
    "AveragedWeights",
    "BatchGeometry",
    "CostModel",
    "ImageFacts",
    "Padding",
    "Precision",
    "auto_scale_workers",
    "average_of",
    "check_cost_model",
    "with_averaged_weights",
]
