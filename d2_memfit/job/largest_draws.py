# Copyright (c) the d2_memfit developers.
"""The largest images that random augmentations can make."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from .batches import padded_area
from .chosen_draws import TOP, ChosenDraws, Place
from .largest_images import Size

__all__ = ["Draw", "LargestDraws"]

# Images that can make a batch the largest: the highest, the widest, and the one padded to most.
_MEASURES: tuple[Callable[[Size], tuple[int, int]], ...] = (
    lambda size: size,
    lambda size: size[::-1],
    lambda size: (padded_area(size), math.prod(size)),
)
_FEW_VALUES = 64  # a number with so many values gets all of them
_GRID = 12
_FINEST = 2**-12  # of a range of pixels
_BRANCHES = 6  # ways through an augmentation's code from which the largest image is searched
_DRAWS = 2000  # of numbers that cannot be chosen, for a file
_FIRST_DRAWS = 8  # the same, to find out which file
_IN_A_RUN = 10**6  # images that are not to be larger than the margin says


@dataclass(frozen=True)
class Draw:
    """An image as augmentations with these random numbers make it.

    Attributes:
        original: size of the file.
        values: the numbers, each between 0 and 1 of its range.
        size: size of the image.
        largest: the size that it may have in a long run; more than ``size`` if some of the random
            numbers are not known.
    """

    original: Size
    values: Mapping[Place, float]
    size: Size
    largest: Size


class LargestDraws:
    """Searches for the random numbers that make the largest images.

    Each number is tried at its ends and between, from several starts, and near the best one. All
    values count where they are few, such as the lengths of ``ResizeShortestEdge``. So no formula of
    an augmentation is needed, and the mix of several is no special case.

    Args:
        run: gives the size that a mapper makes of an image of a size.
        draws: the random numbers of the mapper.

    Attributes:
        num_starts: images with any numbers, the first of a search.
        most_tried: images that are tried after them, for each orientation of files.
        is_cut: whether there would have been more.
        matters: places whose number changes the size of an image.
        unknown: names of code that is not Detectron2's and draws sizes from a range, so that a
            larger one may have been missed.
        is_random: whether the size also depends on numbers that cannot be chosen.
    """

    def __init__(self, run: Callable[[Size], Size], draws: ChosenDraws) -> None:
        self._run = run
        self._draws = draws
        self.num_starts = 96
        self.most_tried = 10_000
        self.is_cut = False
        self.matters: set[Place] = set()
        self.unknown: set[str] = set()
        self._places: list[Place] = []  # that matter
        self._known: dict[tuple[Any, ...], Draw] = {}
        self.is_random = False

    def explore(self, original: Size) -> Draw:
        """Draw any numbers, with preference to the ends of their ranges."""
        return self._draw(original, {}, explores=True)

    def again(self, draw: Draw) -> Draw:
        """The same image, unless something else is random."""
        return self._draw(draw.original, draw.values)

    def lines(self) -> tuple[str, ...]:
        """Reasons why images may be larger than those that were found."""
        lines = [
            f"{name} is not Detectron2's and draws sizes from a range: the largest that was found"
            for name in sorted(self.unknown)
        ]
        if self.is_random:
            lines.append(
                "sizes of images depend on random numbers that are not those of NumPy's or "
                f"Python's functions: the largest of {_DRAWS} images, and a margin"
            )
        if self.is_cut:
            lines.append(
                "the mapper changes the sizes of images itself, so that few could be tried: the "
                f"largest of {self.num_starts + self.most_tried}"
            )
        return tuple(lines)

    def _draw(self, original: Size, values: Mapping[Place, float], explores: bool = False) -> Draw:
        self._draws.start(values, explores)
        size = self._run(original)
        return Draw(original, self._draws.values, size, size)

    def largest(self, likely: Sequence[Size], sizes: Iterable[Size]) -> list[Draw]:
        """The highest, the widest and the largest image.

        Args:
            likely: a few sizes of files that may give them.
            sizes: all sizes of files.
        """
        times = max(-(-self.num_starts // len(likely)), 2)
        drawn = [self.explore(size) for size in likely for _ in range(times)]
        if any(self.again(draw).size != draw.size for draw in drawn):
            self.is_random = True
            return self._foreseen(likely)
        ways = {frozenset(d.values): d for d in drawn}
        samples = [max(drawn, key=lambda d: m(d.size)) for m in _MEASURES]
        samples += list(ways.values())[:_BRANCHES]
        for draw in samples:
            self.matters |= {p for p in draw.values.keys() - self.matters if self._matters(p, draw)}
        self._places, self._known = sorted(self.matters, key=lambda p: (p.line, p.count)), {}
        by_aspect = sorted(set(sizes), key=lambda size: (size[1] / size[0], size))
        return [self._most(m, drawn, likely, by_aspect) for m in _MEASURES]

    def _matters(self, place: Place, draw: Draw) -> bool:
        values = ({**draw.values, place: value} for value in (0.0, 0.5, TOP))
        return any(self._draw(draw.original, v).size != draw.size for v in values)

    def _with(self, draw: Draw, place: Place, value: float) -> Draw:
        return self._near(draw.original, {**draw.values, place: value})

    def _near(self, original: Size, values: Mapping[Place, float]) -> Draw:
        key = original, *(values.get(place) for place in self._places)
        if key not in self._known and len(self._known) == self.most_tried:
            self.is_cut = True
            return Draw(original, values, (0, 0), (0, 0))
        if key not in self._known:
            self._known[key] = self._draw(original, values)
        return self._known[key]

    def _most(
        self,
        measure: Callable[[Size], Any],
        drawn: Sequence[Draw],
        likely: Sequence[Size],
        by_aspect: Sequence[Size],
    ) -> Draw:
        """The image with the largest value of a measure."""
        best_of: dict[frozenset[Place], Draw] = {}
        for draw in sorted(drawn, key=lambda d: measure(d.size)):
            best_of[frozenset(self.matters & draw.values.keys())] = draw
        starts = sorted(best_of.values(), key=lambda d: measure(d.size))[-_BRANCHES:]
        best = starts[-1]
        for start in starts:
            draw, last = start, None
            while last is None or measure(draw.size) > measure(last.size):
                last = draw
                for place in filter(draw.values.__contains__, self._places):
                    draw = self._best_value(measure, draw, place)
                draw = self._best_file(measure, draw, likely, by_aspect)
            best = max(best, draw, key=lambda d: measure(d.size))
        return best

    def _best_value(self, measure: Callable[[Size], Any], draw: Draw, place: Place) -> Draw:
        num = place.num_values
        is_few = 0 < num <= _FEW_VALUES
        values = [(i + 0.5) / num for i in range(num)] if is_few else [0.0, TOP]
        values += [] if is_few else [(i + 0.5) / _GRID for i in range(_GRID)]
        tried = [self._with(draw, place, value) for value in values]
        if not (place.is_known or is_few) and len({d.size for d in tried}) > 4:
            self.unknown.add(place.owner)
        draw = max(draw, *tried, key=lambda d: measure(d.size))
        step = 0.0 if is_few else 0.5 / _GRID
        while step > _FINEST:
            at = draw.values.get(place, 0.5)
            near = [min(max(at + s, 0.0), TOP) for s in (-step, step)]
            tried = [self._with(draw, place, value) for value in near]
            draw, step = max(draw, *tried, key=lambda d: measure(d.size)), step / 2
        return draw

    def _best_file(
        self,
        measure: Callable[[Size], Any],
        draw: Draw,
        likely: Sequence[Size],
        by_aspect: Sequence[Size],
    ) -> Draw:
        tried = [self._near(size, draw.values) for size in likely]
        draw = max(draw, *tried, key=lambda d: measure(d.size))
        step = len(by_aspect) // 4
        while step:
            at = by_aspect.index(draw.original)
            near = {min(max(at + s, 0), len(by_aspect) - 1) for s in (-step, step)}
            tried = [self._near(by_aspect[i], draw.values) for i in near]
            draw, step = max(draw, *tried, key=lambda d: measure(d.size)), step // 2
        return draw

    def _foreseen(self, likely: Sequence[Size]) -> list[Draw]:
        """The largest of many images of the largest file, with what a long run may add to it."""
        lengths: tuple[Callable[[Size], float], ...] = (
            lambda size: size[0],
            lambda size: size[1],
            lambda size: math.sqrt(math.prod(size)),
        )
        first = {size: [self.explore(size).size for _ in range(_FIRST_DRAWS)] for size in likely}
        found = []
        for length in lengths:
            file = max(likely, key=lambda size: sum(map(length, first[size])))
            drawn = [self.explore(file) for _ in range(min(_DRAWS, self.most_tried))]
            draw = max(drawn, key=lambda d: length(d.size))
            factor = extreme([length(d.size) for d in drawn], _IN_A_RUN) / length(draw.size)
            height, width = (math.ceil(side * factor) for side in draw.size)
            found.append(replace(draw, largest=(height, width)))
        return found


def extreme(values: Sequence[float], num: int) -> float:
    """The largest of ``num`` values, by the tail of some of them.

    The tail is a generalized Pareto distribution, fitted by its moments (Hosking and Wallis,
    Technometrics 29, 1987). Its shape is two standard errors heavier, but not heavier than an
    exponential distribution, as sizes have a limit or come from a normal distribution.
    """
    ordered = np.sort(np.asarray(values, float))
    tail = ordered[-max(len(ordered) // 10, 2) :]
    over = tail - tail[0]
    if not over[-1]:
        return float(ordered[-1])
    ratio = over.mean() ** 2 / over.var()
    error = 1 / math.sqrt(len(tail))  # standard error of the shape, near enough
    shape, scale = min((1 - ratio) / 2 + 2 * error, 0.0), over.mean() * (1 + ratio) / 2
    more = num * len(tail) / len(ordered)  # expected number of values in the tail
    grown = math.log(more) if abs(shape) < 1e-6 else (more**shape - 1) / shape
    return max(float(ordered[-1]), float(tail[0]) + scale * grown)
