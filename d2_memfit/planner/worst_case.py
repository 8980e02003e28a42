"""The batch that needs the most memory of all that a config can produce."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Optional

from detectron2.config import CfgNode
from detectron2.data import DatasetCatalog, MetadataCatalog
from detectron2.data.transforms import ResizeShortestEdge
from detectron2.utils.file_io import PathManager

from ..data import shorter_sides
from ..errors import ConfigError

__all__ = ["Size", "WorstCase", "worst_case"]

# Where no dataset is there to count them: the most crowded image of COCO's training set has 93.
_DEFAULT_INSTANCES = 100

Size = tuple[int, int]  # height and width in pixels


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
        size_alone: of the image of a batch of one; None is the first of ``image_sizes``.
    """

    image_sizes: tuple[Size, ...]
    num_instances: int
    test_size: Size
    original_size: Size
    assumptions: tuple[str, ...] = ()
    size_alone: Optional[Size] = None


def worst_case(cfg: CfgNode, num_gpus: int = 1) -> WorstCase:
    """Find it from INPUT, DATALOADER, and the datasets where they are registered and present.

    Of augmentations it knows those that Detectron2's ``DatasetMapper`` makes of a config.

    Raises:
        ConfigError: images keep their size, and no dataset says how large they are.
    """
    assumptions = []
    train, test = _facts(cfg.DATASETS.TRAIN), _facts(cfg.DATASETS.TEST)
    if train is None:
        assumptions.append(
            f"DATASETS.TRAIN {tuple(cfg.DATASETS.TRAIN)} cannot be read: images of any shape, with "
            f"{_DEFAULT_INSTANCES} instances each"
        )
    if test is None:
        assumptions.append(
            f"DATASETS.TEST {tuple(cfg.DATASETS.TEST)} cannot be read: images of "
            "any shape, whose results stay at the size of the network's input"
        )
    short, long = max(shorter_sides(cfg.INPUT.MIN_SIZE_TRAIN)), cfg.INPUT.MAX_SIZE_TRAIN
    if train is not None:
        groups = _orientations(train.sizes)
        crops = [{crop for size in group for crop in _crops(cfg, size)} for group in groups]
        groups = [{_resized(size, short, long) for size in group} for group in crops]
    elif cfg.INPUT.CROP.ENABLED and cfg.INPUT.CROP.TYPE.startswith("absolute"):
        groups = [{_resized(crop, short, long) for crop in _crops(cfg, (10**6, 10**6))}]
    else:
        groups = _orientations(_any_shape("INPUT.MIN_SIZE_TRAIN", short, long))
    if _orientations_meet(cfg, num_gpus):
        groups = [set().union(*groups)]
    meeting = max(map(_highest_and_widest, groups), key=_padded_area_of_all)
    short, long = max(shorter_sides(cfg.INPUT.MIN_SIZE_TEST)), cfg.INPUT.MAX_SIZE_TEST
    if test:
        test_sizes = {_resized(size, short, long) for size in test.sizes}
    else:
        test_sizes = _any_shape("INPUT.MIN_SIZE_TEST", short, long)
    test_size = max(test_sizes, key=_padded_area)
    return WorstCase(
        meeting,
        train.num_instances if train else _DEFAULT_INSTANCES,
        test_size,
        max(test.sizes, key=math.prod) if test else test_size,
        tuple(assumptions),
        size_alone=max(set().union(*groups), key=_padded_area),
    )


def _orientations(sizes: Iterable[Size]) -> list[set[Size]]:
    """The groups of DATALOADER.ASPECT_RATIO_GROUPING, as far as there are any in them."""
    sizes = set(sizes)
    wide = {size for size in sizes if size[1] > size[0]}
    return [group for group in (wide, sizes - wide) if group]


def _orientations_meet(cfg: CfgNode, num_gpus: int) -> bool:
    """Whether portraits and landscapes can be in one micro-batch: without grouping, or where one is
    of images of several batches.
    """
    if not cfg.DATALOADER.ASPECT_RATIO_GROUPING:
        return True
    batch, micro_batch = cfg.SOLVER.IMS_PER_BATCH // num_gpus, cfg.MEMFIT.MICRO_BATCH
    return cfg.SOLVER.ACCUMULATION_STEPS > 1 and bool(micro_batch) and batch % micro_batch > 0


def _highest_and_widest(sizes: set[Size]) -> tuple[Size, ...]:
    """Two images that are padded most if they meet; or one, if it is both."""
    highest, widest = max(sizes), max(sizes, key=lambda size: size[::-1])
    return (highest,) if highest == widest else (highest, widest)


@dataclass(frozen=True)
class _Facts:
    sizes: frozenset[Size]
    num_instances: int  # in the most crowded image


def _facts(names: Sequence[str]) -> Optional[_Facts]:
    """None where one of the datasets is not there, or does not say how large its images are."""
    for name in names:
        if name not in DatasetCatalog:
            return None
        json_file = MetadataCatalog.get(name).get("json_file")
        if json_file and not PathManager.isfile(json_file):
            return None
    return _facts_of(tuple((name, DatasetCatalog[name]) for name in names))


@lru_cache(maxsize=8)  # of names, and of what is registered under them now
def _facts_of(datasets: tuple[tuple[str, Callable[..., Any]], ...]) -> Optional[_Facts]:
    sizes, num_instances = set(), 0
    for name, _ in datasets:
        try:
            dicts = DatasetCatalog.get(name)
        except (OSError, ImportError):  # built-in ones whose files or packages are missing
            return None
        for d in dicts:
            if "height" not in d or "width" not in d:
                return None
            sizes.add((d["height"], d["width"]))
            objects = [a for a in d.get("annotations", []) if not a.get("iscrowd", 0)]
            num_instances = max(num_instances, len(objects))
    return _Facts(frozenset(sizes), max(num_instances, 1)) if sizes else None


def _crops(cfg: CfgNode, size: Size) -> list[Size]:
    """The most different shapes that INPUT.CROP makes of an image; resizing comes after it."""
    if not cfg.INPUT.CROP.ENABLED:
        return [size]
    (height, width), (first, second) = size, cfg.INPUT.CROP.SIZE
    if cfg.INPUT.CROP.TYPE == "absolute":
        return [(min(height, first), min(width, second))]
    if cfg.INPUT.CROP.TYPE == "absolute_range":
        heights, widths = ({min(x, first), min(x, second)} for x in size)
    elif cfg.INPUT.CROP.TYPE == "relative":
        return [(int(height * first + 0.5), int(width * second + 0.5))]
    else:
        heights, widths = {int(height * first + 0.5), height}, {int(width * second + 0.5), width}
    return [(h, w) for h in heights for w in widths]


def _resized(size: Size, short: int, long: int) -> Size:
    if short == 0:
        return size
    return ResizeShortestEdge.get_output_shape(*size, short, long)


def _any_shape(key: str, short: int, long: int) -> set[Size]:
    if short == 0:
        raise ConfigError(
            f"{key} 0 leaves images in their own sizes, and the dataset that would say what they "
            "are cannot be read"
        )
    short = min(short, long)
    return {(short, long), (long, short)}


def _padded_area(size: Size) -> int:
    return math.prod(-(-length // 32) * 32 for length in size)


def _padded_area_of_all(sizes: tuple[Size, ...]) -> int:
    return _padded_area((max(s[0] for s in sizes), max(s[1] for s in sizes)))
