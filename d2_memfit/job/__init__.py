# Copyright (c) the d2_memfit developers.
"""The description of a training job, from a config, a trainer class, a LazyConfig or pieces."""

from .batches import GivenBatches, is_image, objects_in, padded_area, size_of, tensors_of
from .checked_loader import checked_loader, checked_test_loaders
from .job import Job
from .largest_images import Size, WorstCase, boxes_anywhere, rotated
from .lazy import cfg_of_lazy, load_lazy_config, overrides_of, with_overrides
from .losses import LossFn, losses_of
from .options import NormalizerOptions, RecoveryOptions
from .projects import PROJECT, find_function, projects_of
from .real_images import readable_loader, worst_real_images

__all__ = [
    "PROJECT",
    "GivenBatches",
    "Job",
    "LossFn",
    "NormalizerOptions",
    "RecoveryOptions",
    "Size",
    "WorstCase",
    "boxes_anywhere",
    "cfg_of_lazy",
    "checked_loader",
    "checked_test_loaders",
    "find_function",
    "is_image",
    "load_lazy_config",
    "losses_of",
    "objects_in",
    "overrides_of",
    "padded_area",
    "projects_of",
    "readable_loader",
    "rotated",
    "size_of",
    "tensors_of",
    "with_overrides",
    "worst_real_images",
]
