"""The batch that needs the most memory of all that a config can produce."""

import math
from dataclasses import dataclass
from typing import Optional

from detectron2.config import CfgNode

from ..data import shorter_sides
from ..errors import ConfigError
from ..geometry import BatchGeometry
from .batches import padded_area
from .datasets import DEFAULT_INSTANCES, Size, facts_of, resized

__all__ = ["WorstCase", "worst_case"]


_NO_TEST = (
    "DATASETS.TEST {} cannot be read: images of any shape, whose results stay at the size of the "
    "network's input"
)


@dataclass(frozen=True)
class WorstCase:
    """What the largest batch is made of.

    Attributes:
        image_sizes: heights and widths in pixels of a batch's images, in turn; Detectron2 pads all
            to the largest height and width.
        num_instances: annotated objects in each image.
        test_size: that of the largest image in evaluation.
        original_size: to which its results are brought, masks included.
        assumptions: what is not known, and what is taken instead; a line each.
        evaluation_assumptions: the same for evaluation.
        size_alone: of the image of a batch of one; None is the first of ``image_sizes``.
    """

    image_sizes: tuple[Size, ...]
    num_instances: int
    test_size: Size
    original_size: Size
    assumptions: tuple[str, ...] = ()
    size_alone: Optional[Size] = None
    evaluation_assumptions: tuple[str, ...] = ()


def worst_case(cfg: CfgNode, num_gpus: int = 1) -> WorstCase:
    """Find it from INPUT and DATALOADER, for a training dataset that is not there.

    Of augmentations it knows those that Detectron2's ``DatasetMapper`` makes of a config.

    Raises:
        ConfigError: images keep their size, and no dataset says how large they are.
    """
    assumption = (
        f"DATASETS.TRAIN {tuple(cfg.DATASETS.TRAIN)} cannot be read: images of any shape, with "
        f"{DEFAULT_INSTANCES} instances each"
    )
    test = facts_of(cfg.DATASETS.TEST) if cfg.DATASETS.TEST else None
    short, long = max(shorter_sides(cfg.INPUT.MIN_SIZE_TRAIN)), cfg.INPUT.MAX_SIZE_TRAIN
    if cfg.INPUT.CROP.ENABLED and cfg.INPUT.CROP.TYPE.startswith("absolute"):
        groups = [{resized(crop, short, long) for crop in _absolute_crops(cfg)}]
    else:
        shapes = _any_shape("INPUT.MIN_SIZE_TRAIN", short, long)
        groups = [{size} for size in shapes]
    if not cfg.DATALOADER.ASPECT_RATIO_GROUPING or (
        BatchGeometry.from_cfg(cfg, num_gpus).crosses_batches
    ):
        groups = [set().union(*groups)]
    meeting = max(map(_highest_and_widest, groups), key=_padded_area_of_all)
    short, long = max(shorter_sides(cfg.INPUT.MIN_SIZE_TEST)), cfg.INPUT.MAX_SIZE_TEST
    if test:
        test_sizes = {resized(size, short, long) for size in test.sizes}
    else:
        test_sizes = _any_shape("INPUT.MIN_SIZE_TEST", short, long)
    test_size = max(test_sizes, key=padded_area)
    return WorstCase(
        meeting,
        DEFAULT_INSTANCES,
        test_size,
        max(test.sizes, key=math.prod) if test else test_size,
        (assumption,),
        size_alone=max(set().union(*groups), key=padded_area),
        evaluation_assumptions=() if test else (_NO_TEST.format(tuple(cfg.DATASETS.TEST)),),
    )


def _highest_and_widest(sizes: set[Size]) -> tuple[Size, ...]:
    """Two images that are padded most if they meet; or one, if it is both."""
    highest, widest = max(sizes), max(sizes, key=lambda size: size[::-1])
    return (highest,) if highest == widest else (highest, widest)


def _absolute_crops(cfg: CfgNode) -> set[Size]:
    """The most different shapes that INPUT.CROP makes of large images; resizing comes after it."""
    first, second = cfg.INPUT.CROP.SIZE
    sides = {first, second}
    is_range = cfg.INPUT.CROP.TYPE == "absolute_range"
    return {(h, w) for h in sides for w in sides} if is_range else {(first, second)}


def _any_shape(key: str, short: int, long: int) -> set[Size]:
    if short == 0:
        raise ConfigError(
            f"{key} 0 leaves images in their own sizes, and the dataset that would say what they "
            "are cannot be read"
        )
    short = min(short, long)
    return {(short, long), (long, short)}


def _padded_area_of_all(sizes: tuple[Size, ...]) -> int:
    return padded_area((max(s[0] for s in sizes), max(s[1] for s in sizes)))
