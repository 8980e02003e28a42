# Copyright (c) the d2_memfit developers.
"""Batches that the job's own mapper makes of the largest images of its datasets."""

import copy
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from typing import Any, Optional

from detectron2.structures import Instances

from ..errors import ConfigError
from .batches import copy_of, need_of, padded_area, size_of
from .capture import CapturedLoader, EmptyImages, capture_loader, empty_images, with_proposals
from .dataset_statistics import DatasetStatistics, statistics_of
from .known_datasets import assumed_statistics
from .largest_draws import Draw, LargestDraws
from .largest_images import (
    ANY_SIZE,
    Size,
    any_shape,
    dict_of_size,
    largest_sizes,
    num_instances_of,
    with_boxes_alone,
    with_few_annotations,
)
from .parts import Parts
from .resize import resize_to

__all__ = ["MappedBatches"]

_COMPARED = 6  # images that tell whether a mapper changes sizes after its augmentations
_CROWDED_DRAWS = 4  # of an image that lost objects
_TRIES = 20  # for a mapper that may drop an image


@dataclass(frozen=True)
class _Drawn:
    """One result of a mapper for an image."""

    data: Any
    original: Size

    @property
    def size(self) -> Size:
        return size_of(self.data)

    @property
    def is_wide(self) -> bool:
        """The group of DATALOADER.ASPECT_RATIO_GROUPING."""
        return self.original[1] > self.original[0]

    @property
    def need(self) -> tuple[int, int]:
        return need_of(self.data)


class MappedBatches:
    """Batches that the job's own mapper and augmentations make of empty images.

    Sizes and the most crowded image come from the datasets, if they exist. Random augmentations
    draw the numbers that make the largest images.

    Args:
        parts: the job's parts.
        groups_by_aspect: whether the loader never mixes portraits and landscapes in a batch.
        with_labels: whether the model needs label images, if a missing dataset has no metadata.
        image_size, num_instances: values in place of the datasets'.
        mean_instances: mean number of objects in an image, for datasets that cannot be read.

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
    ) -> None:
        self._parts = parts
        self._groups_by_aspect = groups_by_aspect
        self._with_labels = with_labels
        self._image_size = image_size
        self._num_instances = num_instances
        self._mean_instances = mean_instances

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
        return self._training.at_least

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
        statistics = self._training.statistics
        mean = statistics.mean_instances
        if mean is None or self._num_instances is not None or round(mean) >= self.num_instances:
            return None
        other = copy.copy(self)
        with_mean = replace(statistics, instances_per_image=(max(round(mean), 1),))
        other._training = replace(self._training, statistics=with_mean)
        return other

    def training(self, num_images: int, crosses_batches: bool = False) -> list[Any]:
        """Make a micro-batch.

        Args:
            crosses_batches: whether it mixes images of several of the loader's batches.
        """
        drawn, statistics = self._training.drawn, self._training.statistics
        if num_images == 1:
            largest = max(drawn, key=lambda d: d.need)
            return [copy_of(_with_at_most(largest.data, statistics.num_instances))]
        groups: list[Sequence[_Drawn]] = [drawn]
        if self._groups_by_aspect and not crosses_batches:
            wide = [d for d in drawn if d.is_wide]
            groups = [group for group in (wide, [d for d in drawn if not d.is_wide]) if group]
        pairs = [_highest_and_widest(group) for group in groups]
        images = max(pairs, key=lambda pair: padded_area(size_of([d.data for d in pair])))
        sized = [images[i % len(images)].data for i in range(num_images)]
        return [copy_of(_with_at_most(d, statistics.num_in_batch(i))) for i, d in enumerate(sized)]

    def evaluation(self) -> list[Any]:
        if self._evaluation is None:
            raise ConfigError("this job has no test loader, so there is nothing to evaluate")
        return [copy_of(self._evaluation.drawn[0].data)]

    @cached_property
    def _training(self) -> "_Images":
        captured = capture_loader(self._parts.build_train_loader, self._with_labels)
        return self._images(captured, "training")

    @cached_property
    def _evaluation(self) -> Optional["_Images"]:
        makers = self._parts.test_loaders()
        loaders = [capture_loader(make, self._with_labels) for make in makers]
        found = [self._images(loader, "evaluation") for loader in loaders]
        return max(found, key=lambda images: images.drawn[0].need) if found else None

    def _images(self, loader: CapturedLoader, what: str) -> "_Images":
        if not loader.mappers:
            raise ConfigError(
                f"the {what} loader has no MapDataset of Detectron2 with a mapper, so its largest "
                "batch cannot be made: name a function that makes one, --batch MODULE:FUNCTION"
            )
        statistics = statistics_of(loader.names) or assumed_statistics(
            loader.names, self._with_labels, self._mean_instances
        )
        sizes = statistics.sizes if self._image_size is None else frozenset([self._image_size])
        largest = max(sizes, key=math.prod) if sizes else statistics.largest
        lines: tuple[str, ...] = ()
        if what == "training":
            statistics = statistics.with_labels(loader.names)
            lines = statistics.lines
        if statistics.missing and (self._num_instances is None or not sizes):
            shape = f"{max(sizes)[0]} x {max(sizes)[1]} pixels" if sizes else "any shape"
            line = f"images of {shape}"
            if what == "training":
                line += f", with {statistics.missing}" if self._num_instances is None else ""
            elif largest:
                line += f", whose results have {largest[0]} x {largest[1]} pixels at most"
            else:
                line += ", whose results stay at the size of the network's input"
            names = ", ".join(loader.names) or "without a name"
            lines = (*lines, f"the {what} dataset {names} cannot be read: {line}")
        if self._num_instances is not None:
            statistics = statistics.with_instances(self._num_instances)
        mapper = _Mapper(loader, statistics)
        drawn = mapper.largest(sizes)
        if what == "evaluation" and isinstance(drawn[0].data, dict):
            # Results are brought to the size of the file, masks included, where that is known.
            height, width = largest or drawn[0].size
            drawn[0].data.update(height=height, width=width)
        return _Images(tuple(drawn), statistics, lines, mapper.at_least)


@dataclass(frozen=True)
class _Images:
    drawn: tuple[_Drawn, ...]  # for evaluation, the largest comes first
    statistics: DatasetStatistics
    assumptions: tuple[str, ...]
    at_least: tuple[str, ...]


class _Mapper:
    """A loader's mapper, for images of any size.

    Attributes:
        at_least: lines about random numbers whose largest images are not known.
    """

    def __init__(self, loader: CapturedLoader, statistics: DatasetStatistics) -> None:
        self._loader = loader
        self._crowded = statistics.most_crowded
        self._labels = statistics.labels
        self.at_least: tuple[str, ...] = ()

    def largest(self, sizes: Iterable[Size]) -> list[_Drawn]:
        """Images that can make up the largest batches, the largest first.

        Args:
            sizes: sizes of the dataset's images; none for any shape.
        """
        found: list[_Drawn] = []
        with empty_images(self._labels) as images:
            for map_func in self._loader.mappers:
                found += self._largest_of(map_func, images, set(sizes))
        return sorted(found, key=lambda d: d.need, reverse=True)

    def _largest_of(
        self, map_func: Callable[..., Any], images: EmptyImages, sizes: set[Size]
    ) -> list[_Drawn]:
        few, boxes = with_few_annotations(self._crowded), with_boxes_alone(self._crowded)
        boxes_of_size = lru_cache(maxsize=None)(partial(dict_of_size, boxes))

        def size_after(original: Size) -> Size:
            make = boxes_of_size if images.stops else partial(dict_of_size, few)
            return images.size_from(lambda: self._map(map_func, images, partial(make, original)))

        search = LargestDraws(size_after, images.draws)
        explored = [(search.explore(ANY_SIZE).size, images.augmented) for _ in range(_COMPARED)]
        images.stops = all(augmented == [size] for size, augmented in explored)
        if not images.stops:
            search.num_starts, search.most_tried = 24, 400  # each takes a hundred times as long
        sizes = sizes or self._any_shape(images.resizes, search)
        wide = {size for size in sizes if size[1] > size[0]}
        largest: list[Draw] = []
        for group in filter(None, (wide, sizes - wide)):
            largest += search.largest(largest_sizes(group, images.resizes), group)
        images.stops = False
        self.at_least += search.lines()
        different = {(draw.original, draw.largest): draw for draw in largest}
        return [self._crowded_image(map_func, images, d, search) for d in different.values()]

    def _crowded_image(
        self, map_func: Callable[..., Any], images: EmptyImages, draw: Draw, search: LargestDraws
    ) -> _Drawn:
        """An image of that size with as many objects as a few draws leave."""
        make = partial(dict_of_size, self._crowded, draw.original)
        images.draws.start(draw.values, explores=False)
        drawn = [_Drawn(self._map(map_func, images, make), draw.original)]
        decisive = {place: draw.values[place] for place in search.matters & draw.values.keys()}
        while len(drawn) < _CROWDED_DRAWS and self._lost_objects(drawn[0].data):
            images.draws.start(decisive, explores=True)
            drawn.append(_Drawn(self._map(map_func, images, make), draw.original))
        largest = max(drawn, key=lambda d: d.need)
        if draw.largest != draw.size and isinstance(largest.data, dict):
            return replace(largest, data=resize_to(largest.data, draw.largest))
        return largest

    def _lost_objects(self, data: Any) -> bool:
        """Whether the mapper has kept some objects of the most crowded image, but not all."""
        instances = data.get("instances") if isinstance(data, dict) else None
        return isinstance(instances, Instances) and len(instances) < num_instances_of(self._crowded)

    def _any_shape(self, resizes: set[tuple[int, int]], search: LargestDraws) -> set[Size]:
        sizes = any_shape(resizes)
        largest = max(sizes)
        once, twice = (
            max(
                padded_area(search.explore((largest[0] * k, largest[1] * k)).size)
                for _ in range(16)
            )
            for k in (1, 2)
        )
        if twice > 2 * once > 0:  # and not by chance of a crop
            raise ConfigError(
                "the mapper leaves images in their own sizes, and the dataset that would say what "
                "they are cannot be read: name the largest with --image-size HEIGHT,WIDTH"
            )
        return sizes

    def _map(
        self,
        map_func: Callable[..., Any],
        images: EmptyImages,
        make_dict: Callable[[], dict[str, Any]],
    ) -> Any:
        """The mapper's result for a dataset dict."""
        for i in range(_TRIES):
            if i:
                images.draws.start({}, explores=True)
            d = {**self._loader.added, **make_dict()}
            images.name(d)
            try:
                data = map_func(with_proposals(d) if self._loader.has_proposals else d)
            except Exception:
                if images.exist or images.stops:
                    raise
                data = None
            if data is not None:
                return data
            images.exist = True  # the mapper may read them by a function of its own
        raise ConfigError(
            "the training mapper gives nothing for the dataset's largest images. See what it "
            "leaves out, or name a function that makes a batch: --batch MODULE:FUNCTION"
        )


def _with_at_most(data: Any, num: int) -> Any:
    """An image with its first ``num`` objects."""
    instances = data.get("instances") if isinstance(data, dict) else None
    if not isinstance(instances, Instances) or len(instances) <= num:
        return data
    return {**data, "instances": instances[:num]}


def _highest_and_widest(drawn: Sequence[_Drawn]) -> list[_Drawn]:
    """The two images whose batch is padded most; one image if it is both."""
    highest = max(drawn, key=lambda d: (d.size, d.need))
    widest = max(drawn, key=lambda d: (d.size[::-1], d.need))
    return [highest] if highest.size == widest.size else [highest, widest]
