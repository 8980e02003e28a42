# Copyright (c) the d2_memfit developers.
"""Random numbers that are chosen, so that a mapper's own code makes its extreme images."""

import math
import numbers
import random
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import Random
from types import FrameType
from typing import Any, Optional, Union

import numpy as np
from detectron2.data import transforms
from numpy.typing import NDArray

from ..common.patching import modules_with

__all__ = ["TOP", "ChosenDraws", "Place"]

TOP = 1 - 2**-40  # numbers are below 1
_MOST = 16  # numbers of one call, or calls of one line, that are chosen; noise draws millions


@dataclass(frozen=True)
class Place:
    """A line of code that draws a number.

    Attributes:
        line: identifies the line, and the object whose method it is of.
        count: how many numbers the line has drawn before.
        num_values: how many values the number can have; 0 for a real number.
        owner: name of the class or function.
        is_known: whether the code is Detectron2's, or a class of the same name.
    """

    line: tuple[int, ...]
    count: int
    num_values: int
    owner: str
    is_known: bool


class ChosenDraws:
    """Replaces NumPy's and Python's functions that draw uniform numbers.

    A number is chosen by where it is in its range: 0 for the smallest value, ``TOP`` for the
    largest. Other functions and generators stay random.

    Attributes:
        values: the chosen numbers that were drawn since ``start``, by place.
        rng: chooses those that are not given.
    """

    def __init__(self) -> None:
        self.rng = Random(0)
        self.start({}, explores=True)

    def start(self, values: Mapping[Place, float], explores: bool) -> None:
        """Choose numbers for the next call of a mapper.

        Args:
            explores: whether numbers without a value are any, with preference to both ends. Else a
                line that draws again gets the same number, and others get the middle.
        """
        self.values: dict[Place, float] = {}
        self._given = values
        self._explores = explores
        self._counts: Counter[tuple[int, ...]] = Counter()
        self._objects: dict[int, list[int]] = {}
        self._more = Random(0)

    def _draw(self, size: Any, num_values: int = 0) -> Union[float, NDArray[Any]]:
        """Numbers in [0, 1) for the caller's caller."""
        shape = () if size is None else tuple(np.atleast_1d(np.asarray(size, int)))
        frame = sys._getframe(2)
        drawn = [self._next(frame, num_values) for _ in range(min(math.prod(shape), _MOST))]
        drawn += [self._more.random() for _ in range(math.prod(shape) - len(drawn))]
        return drawn[0] if size is None else np.reshape(drawn, shape)[()]

    def _next(self, frame: FrameType, num_values: int) -> float:
        code, owner = frame.f_code, frame.f_locals.get("self")
        objects = self._objects.setdefault(id(code), [])
        if id(owner) not in objects:
            objects.append(id(owner))
        line = id(code), frame.f_lasti, objects.index(id(owner))
        count = self._counts[line]
        self._counts[line] += 1
        if count >= _MOST:  # the code draws until it likes the number
            return self._more.random()
        name = code.co_name if owner is None else type(owner).__name__
        module = type(owner).__module__ if owner is not None else frame.f_globals["__name__"]
        is_known = module.startswith("detectron2.") or hasattr(transforms, name)
        place = Place(line, count, num_values, name, is_known)
        value = self._given.get(place)
        if value is None and self._explores:
            value = self.rng.choice([0.0, TOP, self.rng.random(), self.rng.random()])
        elif value is None:
            first = (v for p, v in self._given.items() if p.line == line)
            value = next(first, 0.5)
        self.values[place] = value
        return value

    def replacements(self) -> list[tuple[list[Any], dict[str, Callable[..., Any]]]]:
        """The functions to replace, for :func:`~..common.patching.replaced_together`."""
        draw = self._draw

        def uniform(low: Any = 0.0, high: Any = 1.0, size: Any = None) -> Any:
            return low + (high - low) * draw(size)

        def randint(low: Any, high: Any = None, size: Any = None, dtype: Any = int) -> Any:
            low, high = (0, low) if high is None else (low, high)
            if high <= low:
                raise ValueError("low >= high")
            found = low + np.asarray(draw(size, int(high - low)) * (high - low)).astype(dtype)
            return int(found) if size is None else found

        def choice_by(original: Callable[..., Any]) -> Callable[..., Any]:
            def choice(a: Any, size: Any = None, replace: bool = True, p: Any = None) -> Any:
                if size is not None and not replace:
                    return original(a, size, replace, p)
                items = np.arange(int(a)) if isinstance(a, numbers.Integral) else np.asarray(a)
                items = items if p is None else items[np.asarray(p) > 0]
                return items[np.asarray(draw(size, len(items)) * len(items)).astype(int)]

            return choice

        def randrange(start: int, stop: Optional[int] = None, step: int = 1) -> int:
            values = range(start) if stop is None else range(start, stop, step)
            return values[int(draw(None, len(values)) * len(values))]

        of_numpy: dict[str, Callable[..., Any]] = {
            "rand": lambda _: lambda *shape: draw(shape or None),
            "uniform": lambda _: uniform,
            "randint": lambda _: randint,
            "choice": choice_by,
            **{
                name: lambda _: lambda size=None: draw(size)
                for name in ("random", "random_sample", "ranf", "sample")
            },
        }
        of_python: dict[str, Callable[..., Any]] = {
            "random": lambda _: lambda: draw(None),
            "uniform": lambda _: lambda a, b: a + (b - a) * draw(None),
            "randint": lambda _: lambda a, b: a + int(draw(None, b - a + 1) * (b - a + 1)),
            "randrange": lambda _: randrange,
            "choice": lambda _: lambda seq: seq[int(draw(None, len(seq)) * len(seq))],
        }
        return [
            ([m for m, value in modules_with(name) if value is getattr(source, name)], {name: make})
            for source, functions in ((np.random, of_numpy), (random, of_python))
            for name, make in functions.items()
        ]
