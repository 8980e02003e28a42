# Copyright (c) the d2_memfit developers.
"""A test of what losses are divided by: images together against the same images in parts.

A window's gradient must be that of one forward over all its images. So must its losses be. The
test takes three images of the job: the most crowded one, one with fewer objects, one without any.
They go through the model together, then one by one. Weights of the parts are right if the parts'
losses add up to those of the images together, loss by loss.

No gradient is computed, and nothing is left behind. Batch normalisation uses its running
statistics, nothing is dropped, and random numbers do not depend on the batch (:class:`SameDraws`).
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from math import isclose
from typing import Any, Optional

import torch
from detectron2.structures import Instances
from torch import nn

from ...counts import Handler, PretendedRanks
from ...job import size_of
from ..window import MicroBatch, Row, count_objects
from . import sites
from .answers import Answers, Totals
from .communication import Spared
from .sites import Counts, Site
from .trial_forwards import SameDraws, without_dropout, without_traces

__all__ = ["RIGHT", "ROUNDING", "Findings", "Trial", "trial_images"]

RIGHT = 1e-3  # relative distance of a loss from that of the images together
ROUNDING = 1e-5  # relative; of losses in float32

# By loss and weights (None is the images): the parts' sum, less the loss of the images together.
Differences = dict[str, dict[Optional[Site], float]]


@dataclass
class Findings:
    """What a trial shows, in plain types: other ranks and checkpoints get it.

    Attributes:
        whole: losses of the images together.
        counts: those of each part.
        plain: differences if no count is answered.
        answered: differences if counts are answered with those of all images; empty if there are
            none, or if all losses are right without.
        in_full: losses that are divided by sums over ranks.
        noise: what the losses of the images together differ by with other random numbers.
        unused: sites of ``window_count`` whose answer changes no loss.
    """

    whole: dict[str, float]
    counts: list[Counts] = field(default_factory=list)
    plain: Differences = field(default_factory=dict)
    answered: Differences = field(default_factory=dict)
    in_full: list[str] = field(default_factory=list)
    noise: dict[str, float] = field(default_factory=dict)
    unused: list[Site] = field(default_factory=list)


class Trial:
    """The test on some images of one rank.

    Args:
        model: without DDP around it.
        losses: called as ``losses(model, batch)``.
        communicate: handles the model's collectives that are not counts.
        pretended: tells the model that there are two ranks, so that it adds up its counts. None if
            there are several.
        told: patterns of losses that the user says are divided by objects.
        freezes: whether batch normalisation uses its running statistics.
        same_rows: as for :class:`SameDraws`.
    """

    def __init__(
        self,
        model: nn.Module,
        losses: Callable[[nn.Module, Any], Mapping[str, torch.Tensor]],
        communicate: Handler,
        pretended: Optional[PretendedRanks],
        told: Sequence[str] = (),
        freezes: bool = True,
        same_rows: bool = True,
    ) -> None:
        self._model = model
        self._losses = losses
        self._communicate = communicate
        self._pretended = pretended
        self._told = told
        self._freezes = freezes
        self._same_rows = same_rows

    def run(self, images: Sequence[Any]) -> Findings:
        """Test images together against one at a time."""
        groups = [[image] for image in images]
        [whole], _ = self._run([images])
        parts, answers = self._run(groups)
        found = Findings(whole)
        found.counts = [sites.added_up([counts]) for counts in answers.noted]
        found.plain = self._compare(found, parts)
        if _are_right(found, ROUNDING):
            return found
        if self._asks_for_ranks(groups[0]):
            _, answers = self._run(groups, tells=True)
            found.counts = [sites.added_up([counts]) for counts in answers.noted]
        if answers.is_asked:
            sums = sites.added_up(found.counts)
            totals = Totals(sums, sums[sites.IMAGES])
            parts, _ = self._run(groups, totals, tells=True)
            found.answered = self._compare(found, parts, is_answered=True)
            found.in_full = self._in_full(groups[0], totals, parts[0])
            found.unused = self._unused(groups[0], totals, parts[0])
        if not _are_right(found, RIGHT):
            [other], _ = self._run([images], seed=1)
            found.noise = {name: other.get(name, 0.0) - loss for name, loss in whole.items()}
        return found

    def _asks_for_ranks(self, images: Sequence[Any]) -> bool:
        """Whether the model asks how many ranks there are, if there is one."""
        if self._pretended is None:
            return False
        self._run([images], tells=True)
        return self._pretended.was_asked

    def _in_full(self, images: Any, totals: Totals, losses: Mapping[str, float]) -> list[str]:
        """Losses that are divided by a sum over ranks: they halve if all sums are doubled."""
        doubled = {s: 2 * n if s[0] == sites.SUM else n for s, n in totals.counts.items()}
        [other], _ = self._run([images], replace(totals, counts=doubled), tells=True)
        return [k for k, v in losses.items() if v and isclose(2 * other[k], v, rel_tol=ROUNDING)]

    def _unused(self, images: Any, totals: Totals, losses: Mapping[str, float]) -> list[Site]:
        """Declared counts that change no loss."""
        unused = []
        for site, count in totals.counts.items():
            if site[0] == sites.COUNT:
                more = {**totals.counts, site: 2 * count + 2}
                [other], _ = self._run([images], replace(totals, counts=more), tells=True)
                if other == losses:
                    unused.append(site)
        return unused

    def _compare(
        self,
        found: Findings,
        parts: Sequence[Mapping[str, float]],
        is_answered: bool = False,
    ) -> Differences:
        """Add up the parts' losses with each kind of weights that a loss may have."""
        counts = found.counts
        sums = sites.added_up(counts)
        objects = [max(n[sites.OBJECTS], 1.0) for n in counts]
        weights: dict[Optional[Site], Sequence[float]] = {
            None: [n[sites.IMAGES] / sums[sites.IMAGES] for n in counts],
            sites.OBJECTS: [n / max(sums[sites.OBJECTS], 1.0) for n in objects],
        }
        if is_answered:
            weights[sites.IN_FULL] = [1.0] * len(counts)
        for site, total in sums.items():
            if site[0] == sites.WEIGHTS and total:
                weights[site] = [n.get(site, 0.0) / total for n in counts]
        differences: Differences = {}
        for name, loss in found.whole.items():
            is_told = any(fnmatchcase(name, pattern) for pattern in self._told)
            differences[name] = {
                site: sum(part.get(name, 0.0) * w for part, w in zip(parts, ws)) - loss
                for site, ws in weights.items()
                if site != sites.OBJECTS or is_told
            }
        return differences

    def _run(
        self,
        groups: Sequence[Sequence[Any]],
        totals: Optional[Totals] = None,
        tells: bool = False,
        seed: int = 0,
    ) -> tuple[list[dict[str, float]], Answers]:
        """Losses of groups of images, one forward each.

        Args:
            totals: answers to counts.
            tells: whether the model is told of a second rank, if there is none.
        """
        pretended = self._pretended if tells else None
        while True:
            answers = Answers(self._communicate, totals, pretended=pretended)
            with suppress(Spared):
                return [self._forward(group, answers, seed) for group in groups], answers

    def _forward(self, images: Sequence[Any], answers: Answers, seed: int) -> dict[str, float]:
        micro_batch = MicroBatch(copy.deepcopy(list(images)))  # models may change images
        with (
            without_traces(self._model),
            without_dropout(self._model, self._freezes),
            SameDraws(seed, self._same_rows),
            answers.of(micro_batch),
        ):
            losses = self._losses(self._model, micro_batch.batch)
            return {name: float(loss) for name, loss in losses.items()}


def _are_right(found: Findings, limit: float) -> bool:
    """Whether each loss is right with some weights, up to a relative distance."""
    differences = found.answered or found.plain
    return all(
        min(map(abs, differences[name].values())) <= limit * abs(loss)
        for name, loss in found.whole.items()
    )


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
    if all(isinstance(i, dict) and isinstance(i.get("instances"), Instances) for i in chosen):
        objects = count_objects(crowded)
        if count_objects(second) == objects > 1:
            chosen[1] = _with_objects(second, max(objects // 3, 1))
        chosen[2:] = [_with_objects(image, 0) for image in chosen[2:]]
    return chosen


def _size_of(image: Any) -> tuple[int, int]:
    return size_of(list(image.parts) if isinstance(image, Row) else image)


def _shifted(image: Any, number: int) -> Any:
    pixels = image.get("image") if isinstance(image, dict) else None
    if not isinstance(pixels, torch.Tensor):
        return image
    return {**image, "image": pixels.roll(16 * number, -1)}


def _with_objects(image: dict[str, Any], number: int) -> dict[str, Any]:
    return {**image, "instances": image["instances"][:number]}
