# Copyright (c) the d2_memfit developers.
"""The choice of the source of a job's largest batches."""

from dataclasses import dataclass
from typing import Any, Optional, Union

from detectron2.config import CfgNode

from ..errors import ConfigError
from .batches import GivenBatches
from .largest_images import Size
from .mapped import MappedBatches
from .parts import Parts

__all__ = ["Batches", "WorstCase", "largest_batches"]

Batches = Union[GivenBatches, MappedBatches]

_WITH_SEM_SEG = ("PanopticFPN", "SemanticSegmentor")
_SIZES_AS_THEY_ARE = {
    "INPUT.MIN_SIZE_TRAIN": (0,),
    "INPUT.MIN_SIZE_TEST": 0,
    "INPUT.CROP.ENABLED": False,
}


@dataclass(frozen=True)
class WorstCase:
    """The largest images as the model of a yacs config gets them.

    Attributes:
        image_size: height and width in pixels.
        num_instances: annotated objects in each image.
    """

    image_size: Size
    num_instances: int


def largest_batches(
    parts: Parts,
    cfg: CfgNode,
    batch: Any = None,
    image_size: Optional[Size] = None,
    num_instances: Optional[int] = None,
) -> Batches:
    """Make the largest batches, from the caller's data or with the job's own mapper.

    Args:
        batch: images or sizes given by the caller.
        image_size, num_instances: values in place of the datasets'.

    Raises:
        ConfigError: the job has no training dataset.
    """
    if isinstance(batch, WorstCase):
        image_size, num_instances = batch.image_size, batch.num_instances
        parts = parts.with_settings(_SIZES_AS_THEY_ARE)
    elif batch is not None:
        return GivenBatches(batch)
    if parts.has_default_loader and not cfg.DATASETS.TRAIN:
        raise ConfigError("DATASETS.TRAIN is empty: name the dataset, or give a batch")
    return MappedBatches(
        parts,
        cfg.DATALOADER.ASPECT_RATIO_GROUPING,
        cfg.MODEL.META_ARCHITECTURE in _WITH_SEM_SEG,
        image_size,
        num_instances,
    )
