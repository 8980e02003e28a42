# Copyright (c) the d2_memfit developers.
"""The images of one optimizer step, and how they are cut into micro-batches."""

from .byte_cut import ByteCut, SizeLimit
from .columns import Row, dataset_dicts
from .forward_counters import ForwardCounters, numbers_of
from .micro_batch_size import MicroBatchSize
from .quickest_cuts import Cuts, quickest_cuts
from .storage import WindowStorage
from .window import (
    MicroBatch,
    Window,
    count_images,
    count_objects,
    host_memory_error,
    image_names,
    images_of,
    is_list_of_images,
    may_have_objects,
)

__all__ = [
    "ByteCut",
    "Cuts",
    "ForwardCounters",
    "MicroBatch",
    "MicroBatchSize",
    "Row",
    "SizeLimit",
    "Window",
    "WindowStorage",
    "count_images",
    "count_objects",
    "dataset_dicts",
    "host_memory_error",
    "image_names",
    "images_of",
    "is_list_of_images",
    "may_have_objects",
    "numbers_of",
    "quickest_cuts",
]
