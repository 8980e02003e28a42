# Copyright (c) the d2_memfit developers.
"""The choice of the source of a job's largest batches."""

from typing import Any, Optional

from detectron2.config import CfgNode

from .batches import Batches, GivenBatches
from .invented import InventedBatches
from .largest_images import Size, facts_of
from .mapped import MappedBatches
from .parts import Parts
from .worst_case import WorstCase, worst_case

__all__ = ["largest_batches"]


def largest_batches(
    parts: Parts,
    cfg: CfgNode,
    ranks: int,
    batch: Any = None,
    image_size: Optional[Size] = None,
    num_instances: Optional[int] = None,
) -> Batches:
    """Make the largest batches, from the caller's data or with the job's own mapper.

    Args:
        batch: images or sizes given by the caller.
        image_size, num_instances: values in place of the datasets'.
    """
    if isinstance(batch, WorstCase):
        return InventedBatches(cfg, batch)
    if batch is not None:
        return GivenBatches(batch)
    nothing_is_said = image_size is None and num_instances is None
    if nothing_is_said and parts.has_default_loader and facts_of(cfg.DATASETS.TRAIN) is None:
        # What Detectron2's mapper would make of the missing dataset.
        return InventedBatches(cfg, worst_case(cfg, ranks))
    return MappedBatches(parts, cfg.DATALOADER.ASPECT_RATIO_GROUPING, image_size, num_instances)
