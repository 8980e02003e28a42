# Copyright (c) the d2_memfit developers.
"""The batch that needs the most memory among all that a config can produce."""

import math
from dataclasses import dataclass
from typing import Optional

from detectron2.config import CfgNode

from ..data import shorter_sides
from ..errors import ConfigError
from ..geometry import BatchGeometry
from .batches import padded_area
from .known_datasets import KnownDataset, known_dataset
from .largest_images import DEFAULT_INSTANCES, Size, facts_of, resized

__all__ = ["WorstCase", "assumed", "worst_case"]


_NO_TEST = (
    "DATASETS.TEST {} cannot be read: images of any shape, whose results stay at the size of the "
    "network's input"
)
_KNOWN_TEST = (
    "DATASETS.TEST {} cannot be read: images of any shape, whose results are brought to {} x {} "
    "pixels at most, those of {}"
)


@dataclass(frozen=True)
class WorstCase:
    """Sizes and numbers of objects of the largest batch.

    Attributes:
        image_sizes: heights and widths, in pixels, of a batch's images, in turn; Detectron2 pads
            all to the largest height and width.
        num_instances: annotated objects in each image.
        test_size: size of the largest image in evaluation.
        original_size: size to which its results are resized, masks included.
        assumptions: one line per unknown fact, with the value assumed for it.
        evaluation_assumptions: the same for evaluation.
        size_alone: size of the image in a batch of one; None is the first of ``image_sizes``.
        is_guess: whether ``num_instances`` is a guess.
    """

    image_sizes: tuple[Size, ...]
    num_instances: int
    test_size: Size
    original_size: Size
    assumptions: tuple[str, ...] = ()
    size_alone: Optional[Size] = None
    evaluation_assumptions: tuple[str, ...] = ()
    is_guess: bool = False


def worst_case(cfg: CfgNode, num_gpus: int = 1) -> WorstCase:
    """Find the worst case from INPUT and DATALOADER, for a training dataset that is missing.

    Known facts of Detectron2's datasets are used. Augmentations are those that Detectron2's
    ``DatasetMapper`` makes from a config.

    Raises:
        ConfigError: images keep their size, and no dataset gives their sizes.
    """
    known = known_dataset(cfg.DATASETS.TRAIN)
    assumption = f"DATASETS.TRAIN {tuple(cfg.DATASETS.TRAIN)} cannot be read: {assumed(known)}"
    test = facts_of(cfg.DATASETS.TEST) if cfg.DATASETS.TEST else None
    known_test = known_dataset(cfg.DATASETS.TEST) if test is None else None
    short, long = max(shorter_sides(cfg.INPUT.MIN_SIZE_TRAIN)), cfg.INPUT.MAX_SIZE_TRAIN
    if cfg.INPUT.CROP.ENABLED and cfg.INPUT.CROP.TYPE.startswith("absolute"):
        groups = [{resized(crop, short, long) for crop in _absolute_crops(cfg)}]
    else:
        shapes = _any_shape("INPUT.MIN_SIZE_TRAIN", short, long, known)
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
        test_sizes = _any_shape("INPUT.MIN_SIZE_TEST", short, long, known_test)
    test_size = max(test_sizes, key=padded_area)
    original_size, no_test = test_size, _NO_TEST.format(tuple(cfg.DATASETS.TEST))
    if test:
        original_size = max(test.sizes, key=math.prod)
    elif known_test and known_test.largest:
        original_size = known_test.largest
        no_test = _KNOWN_TEST.format(tuple(cfg.DATASETS.TEST), *original_size, known_test.title)
    return WorstCase(
        meeting,
        known.num_instances if known else DEFAULT_INSTANCES,
        test_size,
        original_size,
        (assumption,),
        size_alone=max(set().union(*groups), key=padded_area),
        evaluation_assumptions=() if test else (no_test,),
        is_guess=known is None or known.is_guess,
    )


def assumed(known: Optional[KnownDataset]) -> str:
    """Text that names the assumptions in place of a missing dataset."""
    wider = ", for which a plan leaves more of the budget free"
    if known is None:
        return f"images of any shape, with {DEFAULT_INSTANCES} instances each, a guess{wider}"
    shape = "any shape"
    if known.has_one_size and known.largest:
        shape = f"{known.largest[0]} x {known.largest[1]} pixels"
    return (
        f"images of {shape}, with {known.num_instances} instances each, as {known.title} may have "
        f"({known.mean_instances:g} in the mean; {known.source}{wider if known.is_guess else ''})"
    )


def _highest_and_widest(sizes: set[Size]) -> tuple[Size, ...]:
    """The two images whose batch is padded most; one image if it is both."""
    highest, widest = max(sizes), max(sizes, key=lambda size: size[::-1])
    return (highest,) if highest == widest else (highest, widest)


def _absolute_crops(cfg: CfgNode) -> set[Size]:
    """The most different shapes that INPUT.CROP makes of large images, before the resize."""
    first, second = cfg.INPUT.CROP.SIZE
    sides = {first, second}
    is_range = cfg.INPUT.CROP.TYPE == "absolute_range"
    return {(h, w) for h in sides for w in sides} if is_range else {(first, second)}


def _any_shape(key: str, short: int, long: int, known: Optional[KnownDataset]) -> set[Size]:
    if known is not None and known.largest and (known.has_one_size or short == 0):
        return {resized(known.largest, short, long)}
    if short == 0:
        raise ConfigError(
            f"{key} 0 leaves images in their own sizes, and the dataset that would say what they "
            "are cannot be read"
        )
    short = min(short, long)
    return {(short, long), (long, short)}


def _padded_area_of_all(sizes: tuple[Size, ...]) -> int:
    return padded_area((max(s[0] for s in sizes), max(s[1] for s in sizes)))
