# Copyright (c) the d2_memfit developers.
"""What trials say, and what is thus known of a model's counts and of the weights of its losses."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatchcase
from typing import Any, NamedTuple, Optional

import numpy as np
from torch import nn

from ...counts import Place
from . import sites
from .sites import Counts, Site
from .trial import BY_IMAGES, DECLARED, OVER_RANKS, RIGHT, ROUNDING, Findings

__all__ = ["Known", "Published", "Verdict", "judged", "published_distance"]

_NOISES = 2  # standard deviations that a random loss may be away
_SMALL = 1e-6  # of all losses; a smaller one is compared with this
_EXACT = 1e-5  # relative; weights of classes are float32

# A count that follows from the annotations, such as DETR's num_boxes or its class weights: a number
# per object, and a number per image.
Rule = tuple[float, float]

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
    whose losses are nearer. If two ways are equally good, counts are used: all elements of a head
    that starts at zero have the same loss, so that its weights do not matter yet.
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


class Known:
    """The facts known of a model's counts: equal on all ranks, and in a resumed run.

    They follow from the findings of trials and from rules that were broken, and from nothing else.

    Args:
        most_trials: windows that may have a trial.

    Attributes:
        verdict: how micro-batches are weighted.
        needs_trial: whether the next window has a trial.
        trials_left: windows that may still have one.
        rules: of used sites whose counts follow from the annotations. They only save a forward:
            each window's real counts are compared with them before the step.
    """

    def __init__(self, most_trials: int) -> None:
        self.verdict = Verdict()
        self.needs_trial = most_trials > 0
        self.trials_left = most_trials
        self.rules: dict[Site, Rule] = {}
        self._findings: list[Findings] = []
        self._broken: set[Site] = set()
        self._places: set[tuple[str, Place]] = set()  # with the kind of count

    @property
    def used_sites(self) -> set[Site]:
        """Sites whose totals are needed."""
        if self.verdict.is_by_images:
            return set()
        used = {site for found in self._findings for site in found.used}
        return {s for s in used if self.verdict.way == OVER_RANKS or s[0] != sites.SUM}

    def count_by_rule(self, site: Site, counts: Counts) -> float:
        """The answer of a site's rule for some images."""
        per_object, per_image = self.rules[site]
        return per_object * counts[sites.OBJECTS] + per_image * counts[sites.IMAGES]

    def is_new(self, counts: Counts) -> bool:
        """Whether a forward counts where none did in a trial, if there was one."""
        return len(self._places) > 0 and not {site[:2] for site in counts} <= self._places

    def broken_rules(self, counts: Counts) -> set[Site]:
        """Rules that a forward's counts do not follow."""
        return {
            site
            for site in self.rules.keys() & self.used_sites
            if not _is_same(self.count_by_rule(site, counts), counts.get(site, 0.0))
        }

    def learn(self, found: list[Findings], is_over: bool, has_memory: bool) -> None:
        """Learn from a window's trial.

        Args:
            found: by all ranks that could make it.
            is_over: whether there were objects, if there are any in the dataset.
            has_memory: whether there was enough on all ranks. If not, another window may have it.
        """
        if found:
            # An open question gets more findings. Otherwise the old ones were contradicted.
            self._conclude([*self._findings, *found] if self.verdict.is_open else found)
        if is_over:
            self.trials_left -= 1
            self.needs_trial = self.verdict.is_open or not has_memory
            self.needs_trial &= self.trials_left > 0

    def correct(self, broken: Iterable[Site]) -> None:
        """Count at these sites from now on: their rules were broken."""
        self._broken.update(broken)
        self._conclude(self._findings)

    def test_again(self) -> None:
        """Let the next window, or this one's next run, be tested anew."""
        self.needs_trial = self.trials_left > 0

    def forget(self) -> None:
        """Weight micro-batches by images, and test again."""
        self._conclude([])
        self.trials_left = max(self.trials_left - 1, 0)
        self.test_again()

    def state_dict(self) -> dict[str, Any]:
        """All of it in plain types; empty if nothing is known."""
        if not self._findings:
            return {}
        return {
            "needs_trial": self.needs_trial,
            "trials_left": self.trials_left,
            "findings": [asdict(f) for f in self._findings],
            "broken": sorted(self._broken),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.needs_trial = state["needs_trial"]
        self.trials_left = state["trials_left"]
        self._broken = set(state["broken"])
        self._conclude([Findings(**f) for f in state["findings"]])

    def _conclude(self, findings: list[Findings]) -> None:
        self._findings = findings
        self.verdict = judged(findings)
        self._places = {site[:2] for f in findings for counts in f.counts for site in counts}
        rules = {site: _rule(site, findings) for site in self.used_sites - self._broken}
        self.rules = {site: rule for site, rule in rules.items() if rule is not None}


def _rule(site: Site, findings: list[Findings]) -> Optional[Rule]:
    """The rule that a site's counts follow in all trials that know it; None if there is none."""
    counts = [n for found in findings if site in found.used for n in found.counts]
    known = np.array([(n[sites.OBJECTS], n[sites.IMAGES]) for n in counts], dtype=float)
    own = np.array([n.get(site, 0.0) for n in counts])
    if np.linalg.matrix_rank(known) < 2:
        return None
    per_object, per_image = np.linalg.lstsq(known, own, rcond=None)[0].tolist()
    follows = map(_is_same, known @ (per_object, per_image), own)
    return (per_object, per_image) if all(follows) else None


def _is_same(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=_EXACT, abs_tol=_EXACT)
