# Copyright (c) the d2_memfit developers.
"""Runs of images together and in parts, with the same random numbers, compared by gradients."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .rules import EXACT, NOT_KNOWN, OTHER
from .runs import Forwards
from .sketch import relative

__all__ = ["LIMIT", "MOST_PAIRS", "Pair", "Pairs"]

LIMIT = 1e-3  # relative distance of a gradient that is right
MOST_PAIRS = 5  # of random numbers
_SURE = 6  # standard errors


@dataclass(frozen=True)
class Pair:
    """Images together and in parts, with the same random numbers."""

    whole: Forwards
    parts: Forwards

    @property
    def difference(self) -> torch.Tensor:
        return self.parts.gradient - self.whole.gradient

    @property
    def distance(self) -> float:
        return relative(self.difference, self.whole.gradient)

    @property
    def has_drawn(self) -> bool:
        return self.whole.has_drawn or self.parts.has_drawn

    def off(self, name: str) -> float:
        """How much larger a loss is in parts than for the images together."""
        return self.parts.loss(name) - self.whole.loss(name)

    def is_off(self, name: str) -> bool:
        """Whether the value of a loss in parts differs from that of the images together."""
        return not abs(self.off(name)) <= LIMIT * abs(self.whole.loss(name))

    def values_off(self, names: Sequence[str]) -> float:
        """Relative distance of the sum of some losses in parts from that of the images together."""
        whole = sum(map(self.whole.loss, names))
        return abs(sum(map(self.off, names))) / abs(whole) if whole else 0.0

    def is_right(self, names: Sequence[str]) -> bool:
        """Whether the gradient is right, or at least the values of these losses."""
        return self.distance <= LIMIT or not any(map(self.is_off, names))


@dataclass
class Pairs:
    """Pairs with different random numbers, about the same losses.

    Attributes:
        least: the distance of a smaller gradient is relative to this norm, if the values are right.
        is_noisy: whether values of its losses differ from pair to pair.
    """

    names: Sequence[str]
    pairs: list[Pair]
    least: float
    is_noisy: bool = False

    def offset_and_noise(self, name: str) -> tuple[float, float]:
        """Mean difference of a loss's value in parts, and the range over the pairs; relative."""
        off = [pair.off(name) for pair in self.pairs]
        scale = max(abs(pair.whole.loss(name)) for pair in self.pairs) or math.inf
        return abs(sum(off)) / len(off) / scale, (max(off) - min(off)) / scale

    @property
    def is_settled(self) -> bool:
        """Whether more pairs would not change the result."""
        is_right = len(self.pairs) == 1 and self.distance <= LIMIT and not self.pairs[0].has_drawn
        return is_right or (len(self.pairs) > 1 and self.noise <= LIMIT / 3)

    @property
    def noise(self) -> float:
        """Standard error of the mean difference, relative."""
        number = len(self.pairs)
        if number == 1:
            return 0.0
        differences = torch.stack([pair.difference for pair in self.pairs])
        spread = float((differences - differences.mean(0)).norm())
        return spread / math.sqrt(number * (number - 1)) / self._scale

    @property
    def distance(self) -> float:
        """Relative norm of the mean difference, without the share of the noise."""
        mean = torch.stack([pair.difference for pair in self.pairs]).mean(0)
        if not mean.isfinite().all():
            return math.inf
        return math.sqrt(max((float(mean.norm()) / self._scale) ** 2 - self.noise**2, 0.0))

    @property
    def word(self) -> str:
        distance, noise = self.distance, self.noise
        if not math.isfinite(distance):
            return OTHER
        is_sure = len(self.pairs) == MOST_PAIRS and distance >= _SURE * noise
        is_cut_short = self.is_noisy and len(self.pairs) == 1
        if (noise > LIMIT / 3 and not is_sure) or (is_cut_short and distance > LIMIT):
            return NOT_KNOWN
        return OTHER if distance > LIMIT else EXACT

    @property
    def _scale(self) -> float:
        norms = [float(pair.whole.gradient.norm()) for pair in self.pairs]
        is_off = any(pair.is_off(name) for pair in self.pairs for name in self.names)
        return max(sum(norms) / len(norms), 0.0 if is_off else self.least) or 1.0
