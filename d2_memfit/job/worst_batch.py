# Copyright (c) the d2_memfit developers.
"""The largest batches of a job, which its own mapper makes of empty images.

``ResizeShortestEdge`` takes its largest length. If other augmentations draw the sizes of images,
the largest of 200 draws counts.
"""

import copy
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import count
from typing import Any, Optional

from detectron2.structures import Instances

from ..errors import ConfigError
from .datasets import ANY_SIZE, Statistics, assumed_statistics, statistics_of
from .dicts import Size, num_instances_of
from .given import copy_of, objects_in, padded_area, resize_to, size_of
from .mapper import CapturedLoader, EmptyFiles, capture_loader, empty_files, resized
from .parts import Parts

__all__ = ["EXTREME_SIZES", "TYPICAL_SIZE", "MappedBatches", "WorstCase"]

# Of photographs. Cameras and COCO have 3 to 4 mostly. Tiles are square, and Cityscapes has 1 to 2.
# One of these has the fewest pixels after a resize: which, depends on its limit of the longer side.
TYPICAL_SIZE = (960, 1280)
EXTREME_SIZES = ((1280, 1280), (1280, 2560))
_ASPECTS = (1, 1.1, 1.2, 4 / 3, 3 / 2, 5 / 3, 2)  # crops and limits of the longer side favour one
_DRAWS = 200  # of a mapper that draws the sizes of images
_CROWDED_DRAWS = 4  # of an image that lost objects
_TRIES = 20  # for a mapper that may drop an image


@dataclass(frozen=True)
class WorstCase:
    """The largest images as the model gets them.

    Attributes:
        image_size: height and width in pixels.
        num_instances: annotated objects in each image.
    """

    image_size: Size
    num_instances: int


class MappedBatches:
    """Batches that the job's own mapper and augmentations make of empty images.

    Sizes and the most crowded image come from the datasets, if they exist.

    Args:
        parts: the job's parts.
        groups_by_aspect: whether the loader never mixes portraits and landscapes in a batch.
        with_labels: whether the model needs label images, if a missing dataset has no metadata.
        image_size, num_instances: values in place of the datasets'.
        mean_instances: mean number of objects in an image, for datasets that cannot be read.
        is_resized: whether ``image_size`` is that of the model's images, not of the files.

    Attributes:
        num_instances: annotated objects in the most crowded training image.
        assumptions: one line for each thing that is not known, with the value assumed for it.
        evaluation_assumptions: the same for evaluation, without lines of ``assumptions``.
        at_least: one line for each reason why a training image may be larger.
        is_guess: whether ``num_instances`` is a guess.
        has_any_shape: whether nothing tells the shape of images. Then the largest one counts that
            the augmentations can make of any photograph.
        typical: batches with the mean number of objects in each image; None if it is unknown, or
            nearly the largest.

    Raises:
        ConfigError: the loader has no mapper, the mapper cannot run, or nothing limits the size of
            images.
    """

    def __init__(
        self,
        parts: Parts,
        groups_by_aspect: bool,
        with_labels: bool = False,
        image_size: Optional[Size] = None,
        num_instances: Optional[int] = None,
        mean_instances: Optional[float] = None,
        is_resized: bool = False,
    ) -> None:
        self._parts = parts
        self._groups_by_aspect = groups_by_aspect
        self._with_labels = with_labels
        self._image_size = image_size
        self._num_instances = num_instances
        self._mean_instances = mean_instances
        self._is_resized = is_resized

    @property
    def num_instances(self) -> int:
        return self._training.statistics.num_instances

    @property
    def assumptions(self) -> tuple[str, ...]:
        return self._training.assumptions

    @property
    def evaluation_assumptions(self) -> tuple[str, ...]:
        return self._evaluation.assumptions if self._evaluation is not None else ()

    @property
    def at_least(self) -> tuple[str, ...]:
        line = f"augmentations draw the sizes of images: the largest of {_DRAWS} is taken"
        return (line,) if self._training.is_random else ()

    @property
    def is_guess(self) -> bool:
        return self._training.statistics.is_guess

    @property
    def has_any_shape(self) -> bool:
        statistics = self._training.statistics
        return self._image_size is None and not (statistics.sizes or statistics.largest)

    def in_shape(self, size: Size) -> "MappedBatches":
        """Batches of images whose files have another height and width, in pixels."""
        other = copy.copy(self)
        other._image_size = size
        for name in ("_training", "_evaluation", "typical"):
            vars(other).pop(name, None)
        return other

    @cached_property
    def typical(self) -> Optional["MappedBatches"]:
        mean = max(round(self._training.statistics.mean_instances), 1)
        if self._num_instances is not None or mean >= self.num_instances:
            return None
        other = copy.copy(self)
        other._training = copy.copy(self._training)
        other._training.statistics = replace(self._training.statistics, instances_per_image=(mean,))
        return other

    def training(self, num_images: int, crosses_batches: bool = False) -> list[Any]:
        """Make a micro-batch.

        Args:
            crosses_batches: whether it mixes images of several of the loader's batches.
        """
        mapped = self._training
        groups = [mapped.draws]
        if self._groups_by_aspect and not crosses_batches:
            wide = [draw for draw in mapped.draws if _is_wide(draw.original)]
            groups = [g for g in (wide, [d for d in mapped.draws if d not in wide]) if g]
        pairs = [[_most(_height, group), _most(_width, group)] for group in groups]
        chosen = max(pairs, key=lambda p: padded_area((p[0].size[0], p[1].size[1])))
        if num_images == 1:
            chosen = [_most(_area, mapped.draws)]
        numbers = [mapped.statistics.num_in_batch(i) for i in range(num_images)]
        return [mapped.image(chosen[i % len(chosen)], num) for i, num in enumerate(numbers)]

    def evaluation(self) -> list[Any]:
        """Make the largest image for evaluation, in a list."""
        mapped = self._evaluation
        if mapped is None:
            raise ConfigError("this job has no test loader, so there is nothing to evaluate")
        draw = _most(_area, mapped.draws)
        image = mapped.image(draw)
        if isinstance(image, dict):
            # Results are brought to the size of the file, masks included, where that is known.
            height, width = mapped.statistics.largest or draw.size
            image.update(height=height, width=width)
        return [image]

    @cached_property
    def _loaders(self) -> list[CapturedLoader]:
        makers = (self._parts.build_train_loader, *self._parts.test_loaders())
        return [capture_loader(make, self._with_labels) for make in makers]

    @cached_property
    def _training(self) -> "_Mapped":
        return self._mapped(self._loaders[0], "training")

    @cached_property
    def _evaluation(self) -> Optional["_Mapped"]:
        found = [self._mapped(loader, "evaluation") for loader in self._loaders[1:]]
        return max(found, key=lambda mapped: _area(_most(_area, mapped.draws).size), default=None)

    def _mapped(self, loader: CapturedLoader, what: str) -> "_Mapped":
        if not loader.mappers:
            raise ConfigError(
                f"the {what} loader has no MapDataset of Detectron2 with a mapper, so its largest "
                "batch cannot be made: name a function that makes one, --batch MODULE:FUNCTION"
            )
        statistics = statistics_of(loader.names) or assumed_statistics(
            loader.names, self._with_labels, self._mean_instances
        )
        size = self._image_size
        if size is not None:
            statistics = replace(statistics, sizes=frozenset([size]), largest=size)
        if self._num_instances is not None:
            statistics = statistics.with_instances(self._num_instances)
        lines = self._assumed(loader.names, statistics, what)
        return _Mapped(loader, statistics, lines, size if self._is_resized else None)

    def _assumed(self, names: Sequence[str], statistics: Statistics, what: str) -> tuple[str, ...]:
        lines = statistics.lines if what == "training" else ()
        if not statistics.missing or (statistics.sizes and self._num_instances is not None):
            return lines
        line = "images of any shape"
        if statistics.sizes:
            line = "images of {} x {} pixels".format(*max(statistics.sizes))
        if what == "training" and self._num_instances is None:
            line += f", with {statistics.missing}"
        elif what == "evaluation" and statistics.largest:
            line += ", whose results have {} x {} pixels at most".format(*statistics.largest)
        elif what == "evaluation":
            line += ", whose results stay at the size of the network's input"
        known = ", ".join(names) or "without a name"
        return (*lines, f"the {what} dataset {known} cannot be read: {line}")


@dataclass(frozen=True)
class _Draw:
    """The size that a mapper makes of a file's size, with the random numbers of a seed."""

    map_func: Callable[..., Any]
    original: Size
    seed: int
    size: Size


# Images that can make a batch the largest: the one padded to most, the highest, and the widest.
def _area(size: Size) -> tuple[int, int]:
    return padded_area(size), math.prod(size)


def _height(size: Size) -> tuple[int, int]:
    return size


def _width(size: Size) -> tuple[int, int]:
    return size[::-1]


def _most(measure: Callable[[Size], tuple[int, int]], draws: Sequence[_Draw]) -> _Draw:
    return max(draws, key=lambda draw: measure(draw.size))


def _is_wide(size: Size) -> bool:
    """The group of DATALOADER.ASPECT_RATIO_GROUPING."""
    return size[1] > size[0]


class _Mapped:
    """What a loader's mappers make of empty images.

    Args:
        loader: with mappers.
        statistics: of its datasets.
        assumptions: lines about them.
        size: height and width to which the results are resized, if that is known.

    Attributes:
        draws: images of which the largest batches are made.
        is_random: whether a mapper draws the sizes of images.
    """

    def __init__(
        self,
        loader: CapturedLoader,
        statistics: Statistics,
        assumptions: tuple[str, ...],
        size: Optional[Size],
    ) -> None:
        self.loader = loader
        self.statistics = statistics
        self.assumptions = assumptions
        self.draws: list[_Draw] = []
        self.is_random = False
        self._images: dict[_Draw, Any] = {}
        with empty_files(statistics.labels) as files:
            for map_func in loader.mappers:
                self._draw_sizes(map_func, files)
        if size is not None:
            self.draws = [replace(draw, size=size) for draw in self.draws]

    def _draw_sizes(self, map_func: Callable[..., Any], files: EmptyFiles) -> None:
        few = min(num_instances_of(self.statistics.most_crowded), 2)  # to crop around one of them
        seeds = count()

        def draw(original: Size) -> _Draw:
            d, seed = self.loader.dict_of(self.statistics.most_crowded, original, few), next(seeds)
            return _Draw(map_func, original, seed, size_of(files.run(map_func, d, seed)))

        draw(ANY_SIZE)  # tells the lengths of resizes
        sizes = _extreme(self.statistics.sizes or _any_shape(files.resizes, draw), files.resizes)
        drawn = [draw(size) for size in [*sizes, *sizes]]
        if len({(d.original, d.size) for d in drawn}) > len(sizes):
            self.is_random = True
            drawn += [draw(sizes[i % len(sizes)]) for i in range(_DRAWS - len(drawn))]
        self.draws += drawn

    def image(self, draw: _Draw, num: Optional[int] = None) -> Any:
        """An image of a drawn size with the objects of the most crowded one, at most ``num``."""
        if draw not in self._images:
            with empty_files(self.statistics.labels) as files:
                self._images[draw] = self._crowded(draw, files)
        data = self._images[draw]
        instances = data.get("instances") if isinstance(data, dict) else None
        if num is not None and isinstance(instances, Instances) and len(instances) > num:
            data = {**data, "instances": instances[:num]}
        return copy_of(data)

    def _crowded(self, draw: _Draw, files: EmptyFiles) -> Any:
        """The image with the most objects of a few, if the mapper loses objects."""
        crowded = self.statistics.most_crowded
        found: list[Any] = []
        for seed in range(draw.seed, draw.seed + _TRIES):
            data = files.run(draw.map_func, self.loader.dict_of(crowded, draw.original), seed)
            found += [] if data is None else [data]
            if found and objects_in(data) in (None, num_instances_of(crowded)):
                break
            if len(found) == _CROWDED_DRAWS:
                break
        if not found:
            raise ConfigError(
                "the training mapper gives nothing for the dataset's largest images. See what it "
                "leaves out, or name a function that makes a batch: --batch MODULE:FUNCTION"
            )
        data = max(found, key=lambda image: objects_in(image) or 0)
        is_other = isinstance(data, dict) and size_of(data) != draw.size
        return resize_to(data, draw.size) if is_other else data


def _extreme(sizes: Iterable[Size], resizes: set[Size]) -> list[Size]:
    """File sizes of portraits and of landscapes that can give the largest images.

    Args:
        resizes: lengths of the shorter side and limits of the longer side for the resize.
    """
    found: list[Size] = []
    for is_wide in (False, True):
        group = [size for size in sizes if _is_wide(size) == is_wide]
        if not group:
            continue
        outputs = {size: resized(size, *max(resizes, default=(0, 0))) for size in group}
        found += [
            max(group, key=lambda s: measure(outputs[s])) for measure in (_area, _height, _width)
        ]
        found += [min(group, key=lambda s: abs(max(s) / min(s) - aspect)) for aspect in _ASPECTS]
        found.append(max(group, key=lambda s: max(s) / min(s)))
    return list(dict.fromkeys(found))


def _any_shape(resizes: set[Size], draw: Callable[[Size], _Draw]) -> set[Size]:
    """Sizes that the images of an unknown dataset may have, for images that are resized."""
    height, width = ANY_SIZE
    once, twice = (
        max(padded_area(draw((height * k, width * k)).size) for _ in range(8)) for k in (1, 2)
    )
    if twice > 2 * once > 0:  # and not by chance of a crop
        raise ConfigError(
            "the mapper leaves images in their own sizes, and the dataset that would say what "
            "they are cannot be read: name the largest with --image-size HEIGHT,WIDTH"
        )
    shapes = {(short, min(long, 3 * short)) for short, long in resizes if short > 0}
    shapes |= {(height, round(height * aspect)) for aspect in _ASPECTS}
    return shapes | {size[::-1] for size in shapes}
