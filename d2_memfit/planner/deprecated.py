# Copyright (c) the d2_memfit developers.
"""Deprecated names of 0.1.0."""

import warnings

from detectron2.config import CfgNode

from ..job import Job, WorstCase
from ..job.batches import size_of

__all__ = ["worst_case"]


def worst_case(cfg: CfgNode, num_gpus: int = 1) -> WorstCase:
    """The sizes of a job's largest batches. Use ``Job.from_cfg(cfg).training_batch()``."""
    warnings.warn(
        "worst_case is deprecated: Job.from_cfg(cfg).training_batch() is the largest batch",
        DeprecationWarning,
        stacklevel=2,
    )
    job = Job.from_cfg(cfg, num_gpus)
    sizes = dict.fromkeys(size_of(image) for image in job.training_batch(2))
    image = job.evaluation_batch()[0] if job.evaluates else {}
    test_size = size_of(image) if image else next(iter(sizes))
    return WorstCase(
        tuple(sizes),
        job.batches.num_instances,
        test_size,
        (image.get("height", test_size[0]), image.get("width", test_size[1])),
        (*job.batches.assumptions, *(job.batches.evaluation_assumptions if image else ())),
        size_alone=size_of(job.training_batch(1)),
    )
