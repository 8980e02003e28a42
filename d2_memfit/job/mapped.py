# Copyright (c) the d2_memfit developers.
"""Batches that the job's own mapper makes of the largest images of its datasets."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Optional

from ..errors import ConfigError
from .batches import copy_of, padded_area, size_of, tensors_of
from .capture import CapturedLoader, capture_loader, empty_images, largest_resizes, with_proposals
from .known_datasets import known_dataset
from .largest_images import (
    DEFAULT_INSTANCES,
    Size,
    any_shape,
    dict_of_size,
    facts_of,
    invented_dict,
    largest_sizes,
    with_few_annotations,
    with_instances,
)
from .parts import Parts
from .worst_case import assumed

__all__ = ["MappedBatches"]

_ANY_SIZE = (800, 1333)
_FIRST_DRAWS = 2  # draws of augmentations for each candidate size
_MORE_DRAWS = 8  # draws for the sizes with the largest results
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
        return padded_area(self.size), sum(t.nbytes for t in tensors_of(self.data))


class MappedBatches:
    """Batches that the job's own mapper and augmentations make of empty images.

    Sizes and the most crowded image come from the datasets, if they exist. For random augmentations
    the largest of several draws counts, with ``ResizeShortestEdge`` at its largest.

    Args:
        parts: the job's parts.
        groups_by_aspect: whether the loader never mixes portraits and landscapes in a batch.
        image_size, num_instances: values in place of the datasets'.

    Raises:
        ConfigError: the loader has no mapper, the mapper cannot run, or nothing limits the size of
            images.
    """

    def __init__(
        self,
        parts: Parts,
        groups_by_aspect: bool,
        image_size: Optional[Size] = None,
        num_instances: Optional[int] = None,
    ) -> None:
        self._parts = parts
        self._groups_by_aspect = groups_by_aspect
        self._image_size = image_size
        self._num_instances = num_instances

    @property
    def num_instances(self) -> int:
        return self._training.num_instances

    @property
    def assumptions(self) -> tuple[str, ...]:
        return self._training.assumptions

    @property
    def evaluation_assumptions(self) -> tuple[str, ...]:
        return self._evaluation.assumptions if self._evaluation is not None else ()

    @property
    def is_guess(self) -> bool:
        return self._training.is_guess

    def training(self, num_images: int, crosses_batches: bool = False) -> list[Any]:
        drawn = self._training.drawn
        if num_images == 1:
            return [copy_of(max(drawn, key=lambda d: d.need).data)]
        groups: list[Sequence[_Drawn]] = [drawn]
        if self._groups_by_aspect and not crosses_batches:
            wide = [d for d in drawn if d.is_wide]
            groups = [group for group in (wide, [d for d in drawn if not d.is_wide]) if group]
        pairs = [_highest_and_widest(group) for group in groups]
        images = max(pairs, key=lambda pair: padded_area(size_of([d.data for d in pair])))
        return [copy_of(images[i % len(images)].data) for i in range(num_images)]

    def evaluation(self) -> list[Any]:
        if self._evaluation is None:
            raise ConfigError("this job has no test loader, so there is nothing to evaluate")
        return [copy_of(self._evaluation.drawn[0].data)]

    @cached_property
    def _training(self) -> "_Images":
        captured = capture_loader(self._parts.build_train_loader)
        return self._images(captured, "training", _MORE_DRAWS)

    @cached_property
    def _evaluation(self) -> Optional["_Images"]:
        loaders = [capture_loader(make) for make in self._parts.test_loaders()]
        found = [self._images(loader, "evaluation", 1) for loader in loaders]
        return max(found, key=lambda images: images.drawn[0].need) if found else None

    def _images(self, loader: CapturedLoader, what: str, num_draws: int) -> "_Images":
        if not loader.mappers:
            raise ConfigError(
                f"the {what} loader has no MapDataset of Detectron2 with a mapper, so its largest "
                "batch cannot be made: name a function that makes one, --batch MODULE:FUNCTION"
            )
        facts = facts_of(loader.names) if loader.names else None
        sizes = facts.sizes if facts is not None else frozenset()
        crowded = facts.most_crowded if facts is not None else None
        known = known_dataset(loader.names) if facts is None else None
        num_instances = facts.num_instances if facts is not None else DEFAULT_INSTANCES
        if known is not None:
            num_instances = known.num_instances
            if known.has_one_size and known.largest:
                sizes = frozenset([known.largest])
        assumptions: tuple[str, ...] = ()
        if self._image_size is not None:
            sizes = frozenset([self._image_size])
        if self._num_instances is not None:
            num_instances = self._num_instances
            crowded = crowded and with_instances(crowded, num_instances)
        is_guess = crowded is None and self._num_instances is None
        if not sizes or is_guess:
            names = ", ".join(loader.names) or "without a name"
            size = self._image_size
            shape = "any shape" if size is None else f"{size[0]} x {size[1]} pixels"
            taken = f"images of {shape}"
            if what == "training":
                taken += f", with {num_instances} instances each"
                if size is None and is_guess:
                    taken = assumed(known)
            assumptions = (f"the {what} dataset {names} cannot be read: {taken}",)
        if crowded is None:
            crowded = invented_dict(_ANY_SIZE, num_instances, (*loader.names, "")[0])
        drawn = _Mapper(loader, crowded).largest(sizes, num_draws)
        if what == "evaluation" and isinstance(drawn[0].data, dict):
            # Results are brought to the size of the file, masks included, where that is known.
            height, width = max(sizes, key=math.prod) if sizes else drawn[0].size
            drawn[0].data.update(height=height, width=width)
        is_guess &= known is None or known.is_guess
        return _Images(tuple(drawn), num_instances, assumptions, is_guess)


@dataclass(frozen=True)
class _Images:
    drawn: tuple[_Drawn, ...]  # for evaluation, the largest comes first
    num_instances: int
    assumptions: tuple[str, ...]
    is_guess: bool


class _Mapper:
    """Draws a loader mapper's results for images of any size."""

    def __init__(self, loader: CapturedLoader, crowded: dict[str, Any]) -> None:
        self._maps = loader.mappers
        self._has_proposals = loader.has_proposals
        self._crowded = crowded

    def largest(self, sizes: Iterable[Size], num_draws: int) -> list[_Drawn]:
        """Images that can make up the largest batches, the largest first.

        Args:
            sizes: sizes of the dataset's images; none for any shape.
            num_draws: draws of augmentations for each of the sizes with the largest results.
        """
        with empty_images() as files, largest_resizes() as resizes:

            def draw(size: Size, times: int, is_crowded: bool) -> list[_Drawn]:
                maps = self._maps * times
                return [self._draw(map_func, files, size, is_crowded) for map_func in maps]

            draw(_ANY_SIZE, 1, is_crowded=False)  # finds out how images are resized
            sizes = set(sizes) or self._any_shape(resizes, draw)
            largest: list[_Drawn] = []
            for size in largest_sizes(sizes, resizes):
                largest = _largest([*largest, *draw(size, min(num_draws, _FIRST_DRAWS), False)])
            crowded: list[_Drawn] = []
            for size in sorted({d.original for d in largest}):
                for _ in range(num_draws):  # masks take much memory, so few are kept
                    crowded = _largest([*crowded, *draw(size, 1, is_crowded=True)])
        return sorted(crowded, key=lambda d: d.need, reverse=True)

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
            d = dict_of_size(crowded, size)
            files.name(d)
            data = map_func(with_proposals(d) if self._has_proposals else d)
            if data is not None:
                return _Drawn(data, size)
        raise ConfigError("the training mapper gives nothing for the dataset's largest images")


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
