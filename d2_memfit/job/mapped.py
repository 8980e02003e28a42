# Copyright (c) the d2_memfit developers.
"""Batches that the job's own mapper makes of the largest images of its datasets."""

import copy
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Optional

from detectron2.structures import Instances

from ..errors import ConfigError
from .batches import copy_of, need_of, padded_area, size_of
from .capture import CapturedLoader, capture_loader, empty_images, with_proposals
from .dataset_statistics import DatasetStatistics, statistics_of
from .known_datasets import assumed_statistics
from .largest_images import (
    ANY_SIZE,
    Size,
    any_shape,
    dict_of_size,
    largest_sizes,
    num_instances_of,
    with_few_annotations,
)
from .parts import Parts

__all__ = ["MappedBatches"]

_FIRST_DRAWS = 2  # draws of augmentations for each candidate size
_MORE_DRAWS = 8  # draws for the sizes with the largest results
_ALIKE = 3  # draws after which there are no more, if none is larger than those before
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

    Sizes and the most crowded image come from the datasets, if they exist. For random augmentations
    the largest of several draws counts, with ``ResizeShortestEdge`` at its largest.

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
        return self._images(captured, "training", _MORE_DRAWS)

    @cached_property
    def _evaluation(self) -> Optional["_Images"]:
        makers = self._parts.test_loaders()
        loaders = [capture_loader(make, self._with_labels) for make in makers]
        found = [self._images(loader, "evaluation", 1) for loader in loaders]
        return max(found, key=lambda images: images.drawn[0].need) if found else None

    def _images(self, loader: CapturedLoader, what: str, num_draws: int) -> "_Images":
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
        drawn = _Mapper(loader, statistics).largest(sizes, num_draws)
        if what == "evaluation" and isinstance(drawn[0].data, dict):
            # Results are brought to the size of the file, masks included, where that is known.
            height, width = largest or drawn[0].size
            drawn[0].data.update(height=height, width=width)
        return _Images(tuple(drawn), statistics, lines)


@dataclass(frozen=True)
class _Images:
    drawn: tuple[_Drawn, ...]  # for evaluation, the largest comes first
    statistics: DatasetStatistics
    assumptions: tuple[str, ...]


class _Mapper:
    """Draws a loader mapper's results for images of any size."""

    def __init__(self, loader: CapturedLoader, statistics: DatasetStatistics) -> None:
        self._maps = loader.mappers
        self._has_proposals = loader.has_proposals
        self._added = loader.added
        self._crowded = statistics.most_crowded
        self._labels = statistics.labels

    def largest(self, sizes: Iterable[Size], num_draws: int) -> list[_Drawn]:
        """Images that can make up the largest batches, the largest first.

        Args:
            sizes: sizes of the dataset's images; none for any shape.
            num_draws: draws of augmentations for each of the sizes with the largest results.
        """
        with empty_images(self._labels) as (files, resizes):

            def draw(size: Size, times: int, is_crowded: bool) -> list[_Drawn]:
                maps = self._maps * times
                return [self._draw(map_func, files, size, is_crowded) for map_func in maps]

            draw(ANY_SIZE, 1, is_crowded=False)  # finds out how images are resized
            sizes = set(sizes) or self._any_shape(resizes, draw)
            largest: list[_Drawn] = []
            for size in largest_sizes(sizes, resizes):
                largest = _largest([*largest, *draw(size, min(num_draws, _FIRST_DRAWS), False)])
            crowded: list[_Drawn] = []
            for size in sorted({d.original for d in largest}):
                last = 0
                for i in range(num_draws):
                    drawn = draw(size, 1, is_crowded=True)
                    if i == 0 and num_draws > 1 and self._have_all_objects(drawn):
                        # Objects cost time. Draws with few of them tell whether sizes differ.
                        others = draw(size, _ALIKE, is_crowded=False)
                        if {d.size for d in others} == {d.size for d in drawn}:
                            crowded = _largest([*crowded, *drawn])
                            break
                    kept = _largest([*crowded, *drawn])  # few: masks take much memory
                    last = i if any(d is new for d in kept for new in drawn) else last
                    crowded = kept
                    if i - last >= _ALIKE:
                        break
        return sorted(crowded, key=lambda d: d.need, reverse=True)

    def _have_all_objects(self, drawn: Sequence[_Drawn]) -> bool:
        """Whether the mapper has kept all objects of the most crowded image."""
        of_each = [d.data.get("instances") if isinstance(d.data, dict) else None for d in drawn]
        num = num_instances_of(self._crowded)
        return all(isinstance(i, Instances) and len(i) == num for i in of_each)

    def _any_shape(self, resizes: set[tuple[int, int]], draw: Callable[..., Any]) -> set[Size]:
        sizes = any_shape(resizes)
        largest = max(sizes)
        once, twice = (
            max(d.need[0] for d in draw((largest[0] * k, largest[1] * k), 4, False)) for k in (1, 2)
        )
        if twice > 2 * once > 0:  # and not by chance of a crop
            raise ConfigError(
                "the mapper leaves images in their own sizes, and the dataset that would say what "
                "they are cannot be read: name the largest with --image-size HEIGHT,WIDTH"
            )
        return sizes

    def _draw(
        self, map_func: Callable[..., Any], files: Any, size: Size, is_crowded: bool
    ) -> _Drawn:
        crowded = self._crowded if is_crowded else with_few_annotations(self._crowded)
        for _ in range(_TRIES):
            d = {**self._added, **dict_of_size(crowded, size)}
            files.name(d)
            try:
                data = map_func(with_proposals(d) if self._has_proposals else d)
            except Exception:
                if files.exist:
                    raise
                data = None
            if data is not None:
                return _Drawn(data, size)
            files.exist = True  # the mapper may read them by a function of its own
        raise ConfigError("the training mapper gives nothing for the dataset's largest images")


def _with_at_most(data: Any, num: int) -> Any:
    """An image with its first ``num`` objects."""
    instances = data.get("instances") if isinstance(data, dict) else None
    if not isinstance(instances, Instances) or len(instances) <= num:
        return data
    return {**data, "instances": instances[:num]}


def _largest(drawn: Sequence[_Drawn]) -> list[_Drawn]:
    """Images that can make a batch the largest, of each orientation and of both together."""
    kept: list[_Drawn] = []
    for is_wide in (False, True):
        group = [d for d in drawn if d.is_wide == is_wide]
        if group:
            kept += [*_highest_and_widest(group), max(group, key=lambda d: d.need)]
    return list({id(d): d for d in kept}.values())


def _highest_and_widest(drawn: Sequence[_Drawn]) -> list[_Drawn]:
    """The two images whose batch is padded most; one image if it is both."""
    highest = max(drawn, key=lambda d: (d.size, d.need))
    widest = max(drawn, key=lambda d: (d.size[::-1], d.need))
    return [highest] if highest.size == widest.size else [highest, widest]
