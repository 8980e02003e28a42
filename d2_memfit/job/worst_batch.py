# Copyright (c) the d2_memfit developers.
"""The largest batches of a job, which its own mapper makes of empty images.

``ResizeShortestEdge`` takes its largest length. If other augmentations draw the sizes of images,
the largest of 200 draws counts.
"""

import copy
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import count
from typing import Any, Optional

from detectron2.structures import Instances

from ..common.errors import ConfigError
from .datasets import ANY_SIZE, Size, Statistics, assumed_statistics, num_objects_of, statistics_of
from .given import copy_of, objects_in, padded_area, resize_to, size_of
from .mapper import CapturedLoader, EmptyFiles, capture_loader, empty_files, resized

__all__ = ["EXTREME_SIZES", "TYPICAL_SIZE", "MappedBatches"]

# Of photographs. Cameras and COCO have 3 to 4 mostly. Tiles are square, and Cityscapes has 1 to 2.
# One of these has the fewest pixels after a resize: which, depends on its limit of the longer side.
TYPICAL_SIZE = (960, 1280)
EXTREME_SIZES = ((1280, 1280), (1280, 2560))
_ASPECTS = (1, 1.1, 1.2, 4 / 3, 3 / 2, 5 / 3, 2)  # crops and limits of the longer side favour one
_DRAWS = 200  # of a mapper that draws the sizes of images
_CROWDED_DRAWS = 4  # of an image that lost objects
_TRIES = 20  # for a mapper that may drop an image


@dataclass(frozen=True)
class _Draw:
    """The size that a mapper makes of a file's size, with the random numbers of a seed."""

    map_func: Callable[..., Any]
    original: Size
    seed: int
    size: Size


def _area(size: Size) -> tuple[int, int]:
    """What makes an image the largest single one. In a batch, the highest and the widest count."""
    return padded_area(size), math.prod(size)


def _is_wide(size: Size) -> bool:
    return size[1] > size[0]


@dataclass(eq=False)
class MappedBatches:
    """Batches that a loader's own mapper and augmentations make of empty images.

    Sizes and the most crowded image come from the datasets, if they exist.

    Args:
        make_loader: makes the loader.
        test_loaders: functions that make the loaders for evaluation.
        groups_by_aspect: whether the loader never mixes portraits and landscapes in a batch.
        with_labels: whether the model needs label images, if a missing dataset has no metadata.
        image_size, instances: values in place of the datasets'.
        mean_instances: mean number of objects in an image, for datasets that cannot be read.
        what: "training" or "evaluation".

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

    make_loader: Callable[[], Any]
    test_loaders: Sequence[Callable[[], Any]] = ()
    groups_by_aspect: bool = True
    with_labels: bool = False
    image_size: Optional[Size] = None
    instances: Optional[int] = None
    mean_instances: Optional[float] = None
    what: str = "training"
    _images: dict[_Draw, Any] = field(default_factory=dict, init=False)

    @property
    def num_instances(self) -> int:
        return self._statistics.num_instances

    @property
    def is_guess(self) -> bool:
        return self._statistics.is_guess

    @property
    def has_any_shape(self) -> bool:
        return not (self._statistics.sizes or self._statistics.largest)

    @property
    def at_least(self) -> tuple[str, ...]:
        line = f"augmentations draw the sizes of images: the largest of {_DRAWS} is taken"
        files = {(draw.map_func, draw.original) for draw in self._draws}
        images = {(draw.map_func, draw.original, draw.size) for draw in self._draws}
        return (line,) if len(images) > len(files) else ()

    @property
    def evaluation_assumptions(self) -> tuple[str, ...]:
        return self._evaluation.assumptions if self._evaluation is not None else ()

    @property
    def assumptions(self) -> tuple[str, ...]:
        statistics = self._statistics
        lines = statistics.lines if self.what == "training" else ()
        if not statistics.missing or (statistics.sizes and self.instances is not None):
            return lines
        line = "images of any shape"
        if statistics.sizes:
            line = "images of {} x {} pixels".format(*max(statistics.sizes))
        if self.what == "training" and self.instances is None:
            line += f", with {statistics.missing}"
        elif self.what == "evaluation" and statistics.largest:
            line += ", whose results have {} x {} pixels at most".format(*statistics.largest)
        elif self.what == "evaluation":
            line += ", whose results stay at the size of the network's input"
        names = ", ".join(self._loader.names) or "without a name"
        return (*lines, f"the {self.what} dataset {names} cannot be read: {line}")

    def in_shape(self, size: Size) -> "MappedBatches":
        """Batches of images whose files have another height and width, in pixels."""
        other = replace(self, image_size=size)
        other._loader = self._loader
        return other

    @cached_property
    def typical(self) -> Optional["MappedBatches"]:
        mean = max(round(self._statistics.mean_instances), 1)
        if self.instances is not None or mean >= self.num_instances or not self._draws:
            return None
        other = copy.copy(self)
        other._statistics = replace(self._statistics, instances_per_image=(mean,))
        return other

    def training(self, num_images: int, crosses_batches: bool = False) -> list[Any]:
        """Make a micro-batch.

        Args:
            crosses_batches: whether it mixes images of several of the loader's batches.
        """
        groups = [self._draws]
        if self.groups_by_aspect and not crosses_batches:
            groups = [[d for d in self._draws if _is_wide(d.original) == w] for w in (True, False)]
        pairs = [
            [max(group, key=lambda d: d.size), max(group, key=lambda d: d.size[::-1])]
            for group in filter(None, groups)
        ]
        chosen = max(pairs, key=lambda p: padded_area((p[0].size[0], p[1].size[1])))
        if num_images == 1:
            chosen = [max(self._draws, key=lambda d: _area(d.size))]
        numbers = self._statistics.instances_per_image  # few images start over
        return [
            self._image(chosen[i % len(chosen)], numbers[i % len(numbers)])
            for i in range(num_images)
        ]

    def evaluation(self) -> list[Any]:
        """Make the largest image for evaluation, in a list."""
        if self._evaluation is None:
            raise ConfigError("this job has no test loader, so there is nothing to evaluate")
        return self._evaluation.training(1)

    @cached_property
    def _evaluation(self) -> Optional["MappedBatches"]:
        found = [replace(self, make_loader=make, what="evaluation") for make in self.test_loaders]
        return max(found, key=lambda b: max(_area(d.size) for d in b._draws), default=None)

    @cached_property
    def _loader(self) -> CapturedLoader:
        loader = capture_loader(self.make_loader, self.with_labels)
        if not loader.mappers:
            raise ConfigError(
                f"the {self.what} loader has no MapDataset of Detectron2 with a mapper, so its "
                "largest batch cannot be made: name a function that makes one, --batch "
                "MODULE:FUNCTION"
            )
        return loader

    @cached_property
    def _statistics(self) -> Statistics:
        names, size = self._loader.names, self.image_size
        statistics = statistics_of(names) or assumed_statistics(
            names, self.with_labels, self.mean_instances
        )
        if size is not None:
            statistics = replace(statistics, sizes=frozenset([size]), largest=size)
        return statistics if self.instances is None else statistics.with_instances(self.instances)

    @cached_property
    def _draws(self) -> list[_Draw]:
        """Images of which the largest batches are made."""
        with empty_files(self._statistics.labels) as files:
            return [d for mapper in self._loader.mappers for d in self._draw_sizes(mapper, files)]

    def _draw_sizes(self, map_func: Callable[..., Any], files: EmptyFiles) -> list[_Draw]:
        crowded, seeds = self._statistics.most_crowded, count()
        few = min(num_objects_of(crowded), 2)  # for a mapper that crops around one of them

        def draw(original: Size) -> _Draw:
            seed, d = next(seeds), self._loader.dict_of(crowded, original, few)
            return _Draw(map_func, original, seed, size_of(files.run(map_func, d, seed)))

        draw(ANY_SIZE)  # tells the lengths of resizes
        sizes = _extreme(self._statistics.sizes or _any_shape(files.resizes, draw), files.resizes)
        drawn = [draw(size) for size in [*sizes, *sizes]]
        if len({(d.original, d.size) for d in drawn}) > len(sizes):
            drawn += [draw(sizes[i % len(sizes)]) for i in range(_DRAWS - len(drawn))]
        return drawn

    def _image(self, draw: _Draw, num: int) -> Any:
        """An image of a drawn size with the objects of the most crowded one, at most ``num``."""
        if draw not in self._images:
            with empty_files(self._statistics.labels) as files:
                self._images[draw] = self._crowded(draw, files)
        data = self._images[draw]
        instances = data.get("instances") if isinstance(data, dict) else None
        if isinstance(instances, Instances) and len(instances) > num:
            data = {**data, "instances": instances[:num]}
        data = copy_of(data)
        if isinstance(data, dict) and self.what == "evaluation":
            # Results are brought to the size of the file, masks included, where that is known.
            data["height"], data["width"] = self._statistics.largest or draw.size
        return data

    def _crowded(self, draw: _Draw, files: EmptyFiles) -> Any:
        """The image with the most objects of a few, if the mapper loses objects."""
        crowded = self._statistics.most_crowded
        found: list[Any] = []
        for seed in range(draw.seed, draw.seed + _TRIES):
            data = files.run(draw.map_func, self._loader.dict_of(crowded, draw.original), seed)
            found += [] if data is None else [data]
            has_all = objects_in(data) in (None, num_objects_of(crowded))
            if found and (has_all or len(found) == _CROWDED_DRAWS):
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
    groups = [[size for size in sizes if _is_wide(size) == wide] for wide in (True, False)]
    for group in filter(None, groups):
        outputs = {size: resized(size, *max(resizes, default=(0, 0))) for size in group}
        for measure in (_area, tuple, lambda size: size[::-1]):
            found.append(max(group, key=lambda s: measure(outputs[s])))
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
