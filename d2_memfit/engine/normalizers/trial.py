# Copyright (c) the d2_memfit developers.
"""A test of what losses are divided by: images together against the same images in parts.

A window must have the gradient and the losses of one forward over all its images. The test takes
three images of the job: the most crowded one, one with fewer objects, one without any. They go
through the model together, then one by one, in each way of weighting them that there is. A way is
right if the parts' losses add up to those of the images together, loss by loss.

No gradient is computed, and nothing is left behind. Batch normalisation uses its running
statistics, nothing is dropped, and random numbers do not depend on the batch (:class:`SameDraws`).
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any, Optional

import torch
from detectron2.structures import Instances
from torch import nn

from ...compat.pytorch import BatchNorm
from ...counts import Handler, PretendedRanks
from ...job import size_of
from ..window import MicroBatch, Row, count_objects
from . import sites
from .answers import Answers, Totals
from .communication import Spared
from .sites import Counts, Site
from .trial_forwards import SameDraws, without_traces

__all__ = [
    "BY_IMAGES",
    "DECLARED",
    "OVER_RANKS",
    "RIGHT",
    "ROUNDING",
    "Findings",
    "Trial",
    "trial_images",
]

# Ways to weight parts.
BY_IMAGES = "images"  # all losses by images
DECLARED = "declared"  # counts that an adapter, a weighted cross entropy or the user declares
OVER_RANKS = "over ranks"  # these, and counts that the model adds up over ranks

RIGHT = 1e-3  # relative distance of a loss from that of the images together
ROUNDING = 1e-5  # relative; of losses in float32
_DIVIDED = 0.75  # a loss that is divided by a count has about half, if the count is doubled


@dataclass
class Findings:
    """The result of a trial, in plain types: other ranks and checkpoints get it.

    Attributes:
        whole: losses of the images together.
        off: for each way and loss, the sum of the weighted parts, less the loss of the images
            together. Ways are not tried after all losses are right.
        counts: those of each part.
        weights: for some losses, the count that weighs parts if counts are answered.
        used: sites whose counts are those of a batch, and change a loss.
        unused: sites of ``window_count`` that change no loss.
        noise: what the losses of the images together differ by with other random numbers.
    """

    whole: dict[str, float]
    off: dict[str, dict[str, float]] = field(default_factory=dict)
    counts: list[Counts] = field(default_factory=list)
    weights: dict[str, Site] = field(default_factory=dict)
    used: list[Site] = field(default_factory=list)
    unused: list[Site] = field(default_factory=list)
    noise: dict[str, float] = field(default_factory=dict)

    def weights_of(self, way: str) -> dict[str, Site]:
        """The weights of losses in a way, where they are not the images."""
        allowed = {OVER_RANKS: (sites.OBJECTS, sites.IN_FULL), DECLARED: (sites.OBJECTS,)}
        return {name: w for name, w in self.weights.items() if w in allowed.get(way, ())}

    def is_right(self, limit: float) -> bool:
        """Whether each loss is right in the last way tried, up to a relative distance."""
        *_, off = self.off.values()
        return all(abs(off[name]) <= limit * abs(loss) for name, loss in self.whole.items())


@dataclass
class Trial:
    """The test on some images of one rank.

    Args:
        model: without DDP around it.
        losses: called as ``losses(model, batch)``.
        communicate: handles the model's collectives that are not counts.
        pretended: tells the model that there are two ranks, so that it adds up its counts; None on
            several ranks.
        by_objects: patterns of losses that the user says are divided by objects.
        freezes: whether batch normalisation uses its running statistics.
        same_rows: as for :class:`SameDraws`.
    """

    model: nn.Module
    losses: Callable[[nn.Module, Any], Mapping[str, torch.Tensor]]
    communicate: Handler
    pretended: Optional[PretendedRanks]
    by_objects: Sequence[str] = ()
    freezes: bool = True
    same_rows: bool = True

    def run(self, images: Sequence[Any]) -> Findings:
        """Test images together against one at a time."""
        singles = [[image] for image in images]
        [whole], together = self._run([images])
        parts, apart = self._run(singles)
        found = Findings(whole, {BY_IMAGES: _off(whole, parts)}, apart.counts)
        # Where more is counted for several images, each of them is counted for itself.
        of_parts = set().union(*apart.counts)
        by_image = {site[:2] for site in together.counts[0].keys() - of_parts}
        if self.pretended and not found.is_right(ROUNDING):
            _, of_ranks = self._run([images], pretends=True)
            if any(site[0] == sites.SUM for site in of_ranks.counts[0]):
                self._try(found, OVER_RANKS, singles, of_ranks.counts[0], by_image)
        is_declared = together.is_asked or len(self.by_objects) > 0
        if is_declared and (len(found.off) == 1 or not found.is_right(ROUNDING)):
            way = DECLARED if self.pretended else OVER_RANKS
            self._try(found, way, singles, together.counts[0], by_image)
        if not found.is_right(RIGHT):
            [other], _ = self._run([images], seed=1)
            found.noise = {name: other.get(name, 0.0) - loss for name, loss in whole.items()}
        return found

    def _try(
        self,
        found: Findings,
        way: str,
        singles: Sequence[Any],
        together: Counts,
        by_image: AbstractSet[Any],
    ) -> None:
        """Test the parts with answers, which are what the images together have counted."""
        counts = {site: n for site, n in together.items() if site[:2] not in by_image}
        totals = Totals(counts, len(singles), len(singles))
        pretends = way == OVER_RANKS
        self._find_uses(found, singles[0], totals, pretends)
        parts, apart = self._run(singles, totals, pretends, found.weights_of(way))
        found.off[way] = _off(found.whole, parts)
        found.counts = [{**own, **known} for own, known in zip(apart.counts, found.counts)]

    def _find_uses(self, found: Findings, images: Any, totals: Totals, pretends: bool) -> None:
        """Find which losses depend on which counts: each count is doubled in turn."""
        for name, off in found.off[BY_IMAGES].items():
            is_off = abs(off) > RIGHT * abs(found.whole[name])
            if is_off and any(fnmatchcase(name, pattern) for pattern in self.by_objects):
                found.weights[name] = sites.OBJECTS
        found.used += [site for site in totals.counts if site[0] == sites.MEAN]
        declared = [site for site in totals.counts if site[0] in (sites.SUM, sites.COUNT)]
        if declared:
            [losses], _ = self._run([images], totals, pretends)
        for site in declared:
            more = 2 * totals.counts[site] + (2 if site[0] == sites.COUNT else 0)
            doubled = replace(totals, counts={**totals.counts, site: more})
            [other], _ = self._run([images], doubled, pretends)
            (found.unused if other == losses else found.used).append(site)
            if site[0] == sites.SUM:
                halved = [k for k, v in losses.items() if v and other.get(k, v) / v < _DIVIDED]
                found.weights.update(dict.fromkeys(halved, sites.IN_FULL))

    def _run(
        self,
        groups: Sequence[Sequence[Any]],
        totals: Optional[Totals] = None,
        pretends: bool = False,
        weights: Optional[Mapping[str, Site]] = None,
        seed: int = 0,
    ) -> tuple[list[dict[str, float]], Answers]:
        """Losses of groups of images, one forward each.

        Args:
            totals, weights: as for :class:`Answers`.
            pretends: whether the model is told of a second rank, if there is none.
        """
        pretended = self.pretended if pretends else None
        while True:
            answers = Answers(self.communicate, totals, weights, pretended)
            with suppress(Spared):
                return [self._forward(group, answers, seed) for group in groups], answers

    def _forward(self, images: Sequence[Any], answers: Answers, seed: int) -> dict[str, float]:
        micro_batch = MicroBatch(copy.deepcopy(list(images)))  # models may change images
        with without_traces(self.model), SameDraws(seed, self.same_rows):
            for module in self.model.modules():
                if isinstance(module, BatchNorm) and self.freezes:
                    module.training = False
                if isinstance(module, nn.MultiheadAttention):
                    module.dropout = 0.0
            with answers.of(micro_batch):
                losses = self.losses(self.model, micro_batch.batch)
                return {name: float(v) for name, v in answers.weighted(losses).items()}


def _off(whole: Mapping[str, float], parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """By how much the mean of the parts, of an image each, is not the loss of all."""
    return {k: sum(part.get(k, 0.0) for part in parts) / len(parts) - v for k, v in whole.items()}


def trial_images(images: Sequence[Any], number: int = 3) -> list[Any]:
    """Images of one size: the most crowded one, one with fewer objects, a third one without any.

    Images of other sizes would be padded in a batch, and not in a part. If there are too few of one
    size, the most crowded one is taken again, with its pixels shifted.
    """
    crowded = max(images, key=count_objects)
    others = [i for i in images if i is not crowded and _size_of(i) == _size_of(crowded)]
    others += [_shifted(crowded, 1), _shifted(crowded, 2)]
    second = min(filter(count_objects, others), key=count_objects, default=others[0])
    third = next(image for image in others if image is not second)
    chosen = [crowded, second, third][:number]
    if not all(isinstance(i, dict) and isinstance(i.get("instances"), Instances) for i in chosen):
        return chosen
    objects = count_objects(crowded)
    limits = (objects, max(objects // 3, 1), 0)
    return [{**i, "instances": i["instances"][:most]} for i, most in zip(chosen, limits)]


def _size_of(image: Any) -> tuple[int, int]:
    return size_of(list(image.parts) if isinstance(image, Row) else image)


def _shifted(image: Any, number: int) -> Any:
    pixels = image.get("image") if isinstance(image, dict) else None
    if not isinstance(pixels, torch.Tensor):
        return image
    return {**image, "image": pixels.roll(16 * number, -1)}
