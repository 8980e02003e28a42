# Copyright (c) the d2_memfit developers.
"""What trials say: by what micro-batches are weighted, for each loss."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import NamedTuple

from torch import nn

from . import sites
from .sites import Site
from .trial import BY_IMAGES, DECLARED, OVER_RANKS, RIGHT, ROUNDING, Findings

__all__ = ["Published", "Verdict", "judged", "published_distance"]

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
    "SOLOv2": {"loss_cate": 0.3, "loss_ins": 0.05},
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
        way: which counts are answered with the window's.
        weights: for some losses, the count that weighs micro-batches in place of images.
        distances: relative distance of each loss from that of the images together.
        by_images: the same if nothing is answered, and images are the weights.
        wrong: losses whose distance is more than :data:`RIGHT`, and more than their noise.
        seen: losses that were not zero.
        is_open: whether noise hides what is right. More windows can tell.
    """

    way: str = BY_IMAGES
    weights: Mapping[str, Site] = field(default_factory=dict)
    distances: Mapping[str, float] = field(default_factory=dict)
    by_images: Mapping[str, float] = field(default_factory=dict)
    wrong: tuple[str, ...] = ()
    seen: frozenset[str] = frozenset()
    is_open: bool = False

    @property
    def is_by_images(self) -> bool:
        return self.way == BY_IMAGES


def judged(findings: Sequence[Findings]) -> Verdict:
    """Judge the trials of all ranks and windows.

    What is right by images stays so. Otherwise the way is taken that has fewer losses wrong, or
    whose losses are nearer. If two ways are as good, counts are used: elements of a head that
    starts at zero have the same loss, however they are weighted.
    """
    losses = [_Loss(n, findings) for n in dict.fromkeys(n for f in findings for n in f.whole)]
    kinds = {site[0] for f in findings for site in f.used}
    best = BY_IMAGES
    for way, counted in ((DECLARED, kinds - {sites.SUM}), (OVER_RANKS, kinds)):
        spoils = any(loss.off[BY_IMAGES] <= RIGHT < loss.off[way] for loss in losses)
        new, old = _badness(losses, way), _badness(losses, best)
        if not spoils and (new < old or (counted and new == old)):
            best = way
    return Verdict(
        best,
        {name: w for f in findings for name, w in f.weights_of(best).items()},
        {loss.name: loss.off[best] for loss in losses},
        {loss.name: loss.off[BY_IMAGES] for loss in losses},
        tuple(loss.name for loss in losses if loss.off[best] > loss.limit),
        frozenset(name for f in findings for name, loss in f.whole.items() if loss),
        any(loss.is_open for loss in losses),
    )


def _badness(losses: Sequence["_Loss"], way: str) -> tuple[int, float]:
    offs = [loss.off[way] for loss in losses]
    num_wrong = sum(loss.off[way] > loss.limit for loss in losses)
    return num_wrong, sum(min(off, 1.0) for off in offs if off > ROUNDING)


class _Loss:
    """The findings of all trials about one loss.

    Attributes:
        off: for each way, its relative distance; infinite if the way was not tried.
        limit: the largest distance that is right.
        is_open: whether its distances differ, and noise may hide which of them is right.
    """

    def __init__(self, name: str, findings: Sequence[Findings]) -> None:
        self.name = name
        of_loss = [f for f in findings if name in f.whole]
        all_losses = [abs(v) for f in findings for v in f.whole.values()]
        small = _SMALL * sum(filter(math.isfinite, all_losses))
        noise = math.sqrt(sum(f.noise.get(name, 0.0) ** 2 for f in of_loss))
        noise = _ratio(noise, sum(abs(f.whole[name]) for f in of_loss) + small)
        self.limit = max(RIGHT, _NOISES * noise)
        self.off: dict[str, float] = {}
        for way in (BY_IMAGES, DECLARED, OVER_RANKS):
            tried = [f for f in of_loss if way in f.off]
            offs = [f.off[way][name] for f in tried]
            # Differences of a random loss cancel each other, if its weights are right.
            total = abs(sum(offs)) if noise > RIGHT else sum(map(abs, offs))
            size = sum(abs(f.whole[name]) for f in tried) + small
            self.off[way] = _ratio(total, size) if tried else math.inf
        plain, *others = self.off.values()
        self.is_open = noise > RIGHT and any(RIGHT < abs(plain - o) < math.inf for o in others)


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
