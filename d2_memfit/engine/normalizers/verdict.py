# Copyright (c) the d2_memfit developers.
"""What trials say: by what micro-batches are weighted, for each loss."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import NamedTuple, Optional

from torch import nn

from . import sites
from .sites import Site
from .trial import RIGHT, ROUNDING, Findings

__all__ = ["Published", "Verdict", "judged", "published_distance"]

_CLEARLY = 10  # times as far away is clearly farther
_NOISES = 2  # a random loss may be so many standard deviations away
_SMALL = 1e-6  # of all losses; a smaller one is compared with this

# By class of a part of the model: patterns of losses, and how far from those of one forward they
# may be in five images of 10, 3, 1, 0 and 5 objects. docs/ACCUMULATION.md has the same table.
_DENOISING = {"*_dn*": 1.0}  # such queries follow the most crowded image
PUBLISHED = {
    "FastRCNNOutputLayers": {"loss_cls*": 0.3, "loss_box_reg*": 0.5},
    "BaseMaskRCNNHead": {"loss_mask*": 0.5},
    "PointRendMaskHead": {"loss_mask*": 0.5},
    "BaseKeypointRCNNHead": {"loss_keypoint*": 0.5},
    "SemSegFPNHead": {"loss_sem_seg": 0.5},
    "DenseDetector": {"loss_cls": 0.2, "loss_box_reg": 0.2},
    "DensePoseROIHeads": {"loss_densepose*": 1.0},
    # CenterMask2's.
    "MaskIoUHead": {"loss_mask": 0.5, "loss_maskiou": 0.5},
    # BoxInst's mean over pixels of similar colour.
    "DynamicMaskHead": {"loss_pairwise": 1.5},
    "SOLOv2": {"loss_cate": 0.1},
    # Its contrastive loss compares the images of a batch.
    "OneFormer": {"loss_contrastive": 2.0, "loss_ce*": 0.05},
    # DiffusionDet's matching has near ties, which the rounding of float32 decides.
    "SetCriterionDynamicK": {"*": 0.3},
    "DINO": _DENOISING,
    "MaskDINO": _DENOISING,
    "RTDetrV2ForObjectDetection": _DENOISING,
    "DFineForObjectDetection": _DENOISING,
}


class Published(NamedTuple):
    """The distance that docs/ACCUMULATION.md states for a loss.

    Attributes:
        distance: the largest relative distance; 0 if none is stated.
        kind: class of the part of the model that it is stated for.
    """

    distance: float
    kind: str


@dataclass(frozen=True)
class Verdict:
    """How micro-batches are weighted. By default each counts by its images.

    Attributes:
        answers: whether sums over ranks and declared counts are answered with the window's.
        weights: for some losses, the count that weighs micro-batches in place of images.
        distances: relative distance of each loss from that of the images together.
        by_images: the same if nothing is answered, and images are the weights.
        wrong: losses whose distance is more than :data:`RIGHT`, and more than their noise.
        seen: losses that were not zero.
        is_open: whether noise hides what is right. More windows can tell.
    """

    answers: bool = False
    weights: Mapping[str, Site] = field(default_factory=dict)
    distances: Mapping[str, float] = field(default_factory=dict)
    by_images: Mapping[str, float] = field(default_factory=dict)
    wrong: tuple[str, ...] = ()
    seen: frozenset[str] = frozenset()
    is_open: bool = False

    @property
    def is_by_images(self) -> bool:
        return not self.answers and not self.weights


def judged(findings: Sequence[Findings]) -> Verdict:
    """Judge the trials of all ranks and windows.

    What is right without an answer stays so. Otherwise what has fewer losses wrong is taken, or
    what is nearer.
    """
    names = dict.fromkeys(name for f in findings for name in f.whole)
    losses = [_Loss(name, findings) for name in names]
    plain = [loss.best(answers=False) for loss in losses]
    answered = [loss.best(answers=True) for loss in losses]
    spoils = any(one <= RIGHT < other for (_, one), (_, other) in zip(plain, answered))
    answers = not spoils and _badness(losses, answered) < _badness(losses, plain)
    best = answered if answers else plain
    return Verdict(
        answers,
        {loss.name: weights for loss, (weights, _) in zip(losses, best) if weights is not None},
        {loss.name: distance for loss, (_, distance) in zip(losses, best)},
        {loss.name: loss.distances(answers=False)[None] for loss in losses},
        tuple(loss.name for loss, (_, distance) in zip(losses, best) if distance > loss.limit),
        frozenset(loss.name for loss in losses if loss.is_seen),
        any(
            loss.is_open(one, other) for loss, (_, one), (_, other) in zip(losses, plain, answered)
        ),
    )


def _badness(
    losses: Sequence["_Loss"], best: Sequence[tuple[Optional[Site], float]]
) -> tuple[int, float]:
    distances = [distance for _, distance in best]
    num_wrong = sum(distance > loss.limit for loss, distance in zip(losses, distances))
    return num_wrong, sum(min(distance, 1.0) for distance in distances)


class _Loss:
    """The findings of all trials about one loss."""

    def __init__(self, name: str, findings: Sequence[Findings]) -> None:
        self.name = name
        self._findings = [f for f in findings if name in f.whole]
        sizes = [abs(f.whole[name]) for f in self._findings]
        self.is_seen = any(sizes)
        others = [abs(v) for f in findings for v in f.whole.values() if math.isfinite(v)]
        self._small = _SMALL * sum(others)
        noise = math.sqrt(sum(f.noise.get(name, 0.0) ** 2 for f in self._findings))
        self._noise = _ratio(noise, sum(sizes) + self._small)
        self.limit = max(RIGHT, _NOISES * self._noise)

    def distances(self, answers: bool) -> dict[Optional[Site], float]:
        """Relative distance of the loss with each kind of weights; infinite if one is untried."""
        trials = [(f.whole, f.answered if answers else f.plain) for f in self._findings]
        trials = [(whole, found) for whole, found in trials if self.name in found]
        size = sum(abs(whole[self.name]) for whole, _ in trials) + self._small
        result: dict[Optional[Site], float] = {None: math.inf}
        for site in dict.fromkeys(site for _, found in trials for site in found[self.name]):
            off = [found[self.name].get(site, math.inf) for _, found in trials]
            # Differences of a random loss cancel each other, if its weights are right.
            total = abs(sum(off)) if self._noise > RIGHT else sum(map(abs, off))
            result[site] = _ratio(total, size)
        return result

    def best(self, answers: bool) -> tuple[Optional[Site], float]:
        """The weights that are right, the images first, and the distance.

        If none are, the window's sum counts where the loss is divided by it, and images elsewhere.
        """
        distances = self.distances(answers)
        # A loss may be nearly the same for all images while weights are random.
        nearest = max(ROUNDING, _CLEARLY * min(distances.values()))
        limit = self.limit if self._noise > RIGHT else min(self.limit, nearest)
        for site, distance in distances.items():
            # What the weights of classes happen to be near, noise cannot tell from what they are.
            if distance <= (RIGHT if site is not None and site[0] == sites.WEIGHTS else limit):
                return site, distance
        is_in_full = answers and any(self.name in f.in_full for f in self._findings)
        weights = sites.IN_FULL if is_in_full else None
        return weights, distances[weights]

    def is_open(self, plain: float, answered: float) -> bool:
        """Whether two distances differ, and noise may hide which of them is right.

        One is infinite if there is nothing to answer, or if the loss is not a number with it.
        """
        return self._noise > RIGHT and RIGHT < abs(plain - answered) < math.inf


def _ratio(off: float, scale: float) -> float:
    """A relative distance; infinite if one is not a number."""
    if not math.isfinite(off) or not math.isfinite(scale):
        return math.inf
    return off / scale if scale else 0.0


def published_distance(model: nn.Module, loss: str) -> Published:
    """Find the distance that the documentation states for a loss of this model."""
    kinds = {kind.__name__ for part in model.modules() for kind in type(part).__mro__}
    found = [
        Published(distance, kind)
        for kind in kinds & PUBLISHED.keys()
        for pattern, distance in PUBLISHED[kind].items()
        if fnmatchcase(loss, pattern)
    ]
    return max(found, default=Published(0.0, ""))
