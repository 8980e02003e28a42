# Copyright (c) the d2_memfit developers.
"""Rules that predict the counts that losses are divided by, before the forward."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Optional

import numpy as np

from ..collectives import Place

__all__ = ["CountRules", "PerObjectAndImage", "Seen", "SeenAt", "Site"]

_ENOUGH = 3  # micro-batches that must agree before a rule is used
_CHANCES = 2  # wrong rules at a site before it gets no more
_EXACT = 1e-5  # relative; weights of classes are float32


class Site(NamedTuple):
    """A place where a forward counts something.

    Attributes:
        kind: "ranks" for a sum over ranks or a call of ``window_count``; "weights" for the sum of
            the weights of a weighted mean; "mean" for the number of elements of a mean.
        place: place in the code.
        number: number of the count at this place in one forward, from 0.
    """

    kind: str
    place: Place
    number: int


class Seen(NamedTuple):
    """One micro-batch's count at a site."""

    images: int
    objects: int
    value: float


SeenAt = dict[Site, list[Seen]]
PerObjectAndImage = tuple[float, float]


@dataclass
class _Knowledge:
    seen: list[Seen] = field(default_factory=list)
    rule: Optional[PerObjectAndImage] = None
    rules_that_failed: int = 0
    is_open: bool = True


class CountRules:
    """Rules that compute counts from the annotated objects and the images of a batch.

    DETR divides by the number of objects. In its cross-entropy, each query without an object has
    weight 0.1, so the sum of weights follows from objects and images. All ranks learn the same
    rules.
    """

    def __init__(self) -> None:
        self._known: dict[Site, _Knowledge] = {}

    @property
    def sites(self) -> Sequence[Site]:
        return list(self._known)

    def news(self, seen: SeenAt) -> SeenAt:
        """The part of the observations that rules can learn from."""
        return {
            site: more
            for site, more in seen.items()
            if site not in self._known
            or (self._known[site].is_open and not self._explains(site, more))
        }

    def learn(self, news: Mapping[Site, Iterable[Seen]]) -> None:
        """Fit a rule for each site to all its observations."""
        for site, more in news.items():
            known = self._known.setdefault(site, _Knowledge())
            known.rules_that_failed += known.rule is not None
            known.seen.extend(more)
            known.rule = None
            if len(known.seen) >= _ENOUGH:
                known.rule = _fitted(known.seen, prefers_images=site.kind != "ranks")
                known.is_open = known.rule is not None and known.rules_that_failed < _CHANCES
            if not known.is_open:
                known.rule = None
                known.seen.clear()

    def rule(self, site: Site) -> Optional[PerObjectAndImage]:
        """Count per object and per image at a site; None if only a forward can tell."""
        return self._known[site].rule if site in self._known else None

    def described(self) -> list[str]:
        """Places in the code whose counts are always the window's, and how they are known."""
        lines: dict[str, None] = {}
        for site in self._known:
            if site.kind != "mean" and site.place:
                file, line = site.place[0]
                how = "by a forward more" if self.rule(site) is None else "from the annotations"
                lines[f"{file}:{line} ({how})"] = None
        return list(lines)

    def _explains(self, site: Site, seen: Iterable[Seen]) -> bool:
        rule = self.rule(site)
        return rule is not None and all(_is_close(_apply(rule, s), s.value) for s in seen)


def _fitted(seen: Sequence[Seen], prefers_images: bool) -> Optional[PerObjectAndImage]:
    """The simplest rule that explains all observations; None if there is none."""
    known = np.array([(s.objects, s.images) for s in seen], dtype=float)
    values = np.array([s.value for s in seen])
    for columns in ([1], [0], [0, 1]) if prefers_images else ([0], [1], [0, 1]):
        rule = np.zeros(2)
        rule[columns] = np.linalg.lstsq(known[:, columns], values, rcond=None)[0]
        fitted = (float(rule[0]), float(rule[1]))
        if all(_is_close(_apply(fitted, s), s.value) for s in seen):
            return fitted
    return None


def _apply(rule: PerObjectAndImage, seen: Seen) -> float:
    return rule[0] * seen.objects + rule[1] * seen.images


def _is_close(one: float, other: float) -> bool:
    return abs(one - other) <= _EXACT * max(abs(one), abs(other), 1.0)
