# Copyright (c) the d2_memfit developers.
"""A test of what losses are divided by: images together against the same images in parts.

A window's gradient must be that of one forward over all its images. So must its losses be. The
test takes three images of the job: the most crowded one, one with fewer objects, one without any.
They go through the model together, then in two parts. Weights of the parts are right if the parts'
losses add up to those of the images together, loss by loss.

No gradient is computed, and nothing is left behind. Batch normalisation uses its running
statistics, nothing is dropped, and random numbers do not depend on the batch (:class:`SameDraws`).
"""

import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from math import isclose, nan
from typing import Any, Optional

import torch
from detectron2.structures import Instances
from torch import nn

from ...counts import Handler, PretendedRanks
from ...job import size_of
from ..window import MicroBatch, Row, count_objects
from .answers import DECLARED, IN_FULL, OBJECTS, SUM, WEIGHTS, Answers, Site, Totals
from .totals import Rule
from .trial_forwards import SameDraws, without_dropout, without_traces

__all__ = ["RIGHT", "ROUNDING", "Findings", "Trial", "trial_images"]

RIGHT = 1e-3  # relative distance of a loss from that of the images together
ROUNDING = 1e-5  # relative; of losses in float32

# By loss and weights (None is the images): the parts' sum, less the loss of the images together.
Differences = dict[str, dict[Optional[Site], float]]


@dataclass
class Findings:
    """What a trial shows. It is pickled, and small.

    Attributes:
        whole: losses of the images together.
        plain: differences if no count is answered.
        answered: differences if counts are answered with those of all images; empty if there are
            none, or if all losses are right without.
        rules: counts that follow from the annotations.
        noise: what the losses of the images together differ by with other random numbers.
        sites: where the forward counts.
        unused: sites of ``window_count`` whose answer changes no loss.
    """

    whole: dict[str, float] = field(default_factory=dict)
    plain: Differences = field(default_factory=dict)
    answered: Differences = field(default_factory=dict)
    rules: dict[Site, Rule] = field(default_factory=dict)
    noise: dict[str, float] = field(default_factory=dict)
    sites: tuple[Site, ...] = ()
    unused: tuple[Site, ...] = ()

    def state_dict(self) -> dict[str, Any]:
        """What a verdict needs, in plain types."""
        differences = [
            {name: [(s and tuple(s), v) for s, v in d.items()] for name, d in found.items()}
            for found in (self.plain, self.answered)
        ]
        return {"whole": self.whole, "noise": self.noise, "differences": differences}

    @classmethod
    def from_state_dict(cls, state: dict[str, Any]) -> "Findings":
        plain, answered = (
            {name: {s and Site(*s): v for s, v in d} for name, d in found.items()}
            for found in state["differences"]
        )
        return cls(state["whole"], plain, answered, noise=state["noise"])


class Trial:
    """The test on some images of one rank.

    Args:
        model: without DDP around it.
        losses: called as ``losses(model, batch)``.
        communicate: handles the model's collectives that are not counts.
        is_alone: whether there is one rank. The model is then told of a second one, so that it adds
            up its counts.
        told: patterns of losses that the user says are divided by objects.
        freezes: whether batch normalisation uses its running statistics.
        same_rows: as for :class:`SameDraws`.

    Attributes:
        pretended: how the model is told of a second rank; None if that is not needed, or changes
            its losses.
        refuses: whether it changes its losses.
    """

    def __init__(
        self,
        model: nn.Module,
        losses: Callable[[nn.Module, Any], Mapping[str, torch.Tensor]],
        communicate: Handler,
        is_alone: bool,
        told: Sequence[str] = (),
        freezes: bool = True,
        same_rows: bool = True,
    ) -> None:
        self._model = model
        self._freezes = freezes
        self._same_rows = same_rows
        self._losses = losses
        self._communicate = communicate
        self._told = told
        self.pretended = PretendedRanks() if is_alone else None
        self.refuses = False

    def run(self, images: Sequence[Any]) -> Findings:
        """Test images together against one at a time."""
        groups = [[image] for image in images]
        [whole], together = self.ask(images)
        counts = {site: together.noted[0].count(site) for site in together.noted[0].counts}
        found = Findings(whole, sites=tuple(counts))
        losses, answers = self._run(groups, pretends=False)
        found.plain = self._compare(whole, counts, losses, answers)
        found.rules = _rules(counts, answers)
        if _are_right(whole, found.plain, ROUNDING):
            return found
        if together.is_asked:
            totals = Totals(len(images), len(images), counts=counts)
            losses, answers = self._run(groups, totals)
            sums = {site: sum(n.count(site) for n in answers.noted) for site in counts}
            if not all(isclose(sums[s], counts[s], rel_tol=ROUNDING) for s in counts):
                totals = replace(totals, counts=sums)  # those of a window are always sums
                losses, answers = self._run(groups, totals)
            halved = self._halved(groups[0], totals)
            found.answered = self._compare(whole, sums, losses, answers, halved)
            found.rules = _rules(counts, answers)
            declared = [s for s in counts if s.kind == DECLARED and not s.of_rank]
            found.unused = tuple(s for s in declared if not self._uses(groups[0], totals, s))
        if not _are_right(whole, found.answered or found.plain, RIGHT):
            [other], _ = self._run([images], seed=1)
            found.noise = {name: other.get(name, 0.0) - loss for name, loss in whole.items()}
        return found

    def ask(self, images: Sequence[Any]) -> tuple[list[dict[str, float]], Answers]:
        """Losses and counts of images, if possible by telling the model of a second rank."""
        result = None
        while result is None:
            try:
                result = self._run([images])
            except Exception as e:  # a model without another rank may raise anything
                if self.pretended is None or not self.pretended.spare(e):
                    raise
        if self.pretended is None or not self.pretended.was_asked:
            self.pretended = None
            return result
        [told], _ = self._run([images[:1]])
        [alone], _ = self._run([images[:1]], pretends=False)
        self.refuses = not all(isclose(told.get(k, nan), alone[k], rel_tol=ROUNDING) for k in alone)
        if self.refuses:
            self.pretended = None
        return self._run([images]) if self.refuses else result

    def _halved(self, images: Sequence[Any], totals: Totals) -> set[str]:
        """Losses that are divided by a sum over ranks: they halve if all sums are doubled."""
        doubled = {s: n * (2 if s.kind == SUM else 1) for s, n in totals.counts.items()}
        [one], _ = self._run([images], totals)
        [other], _ = self._run([images], replace(totals, counts=doubled))
        return {k for k in one if isclose(2 * other[k], one[k], rel_tol=ROUNDING)}

    def _uses(self, images: Sequence[Any], totals: Totals, site: Site) -> bool:
        """Whether a loss changes with the answer to a declared count."""
        more = {**totals.counts, site: 2 * totals.counts[site] + 2}
        [one], _ = self._run([images], totals)
        [other], _ = self._run([images], replace(totals, counts=more))
        return one != other

    def _compare(
        self,
        whole: Mapping[str, float],
        counts: Mapping[Site, float],
        parts: Sequence[Mapping[str, float]],
        answers: Answers,
        halved: Collection[str] = (),
    ) -> Differences:
        """Add up the parts' losses with each kind of weights that a loss may have."""
        noted = answers.noted
        images = sum(n.images for n in noted)
        objects = max(counts[OBJECTS], 1)
        weights: dict[Optional[Site], Sequence[float]] = {
            None: [n.images / images for n in noted],
            IN_FULL: [1.0] * len(noted),
            OBJECTS: [max(n.objects, 1) / objects for n in noted],
        }
        for site, count in counts.items():
            if site.kind == WEIGHTS and count:
                weights[site] = [n.count(site) / count for n in noted]
        differences: Differences = {}
        for name, loss in whole.items():
            is_told = any(fnmatchcase(name, pattern) for pattern in self._told)
            may_be = {IN_FULL: name in halved, OBJECTS: is_told}
            differences[name] = {
                site: sum(part.get(name, 0.0) * w for part, w in zip(parts, ws)) - loss
                for site, ws in weights.items()
                if site is None or may_be.get(site, True)
            }
        return differences

    def _run(
        self,
        groups: Sequence[Sequence[Any]],
        totals: Optional[Totals] = None,
        seed: int = 0,
        pretends: bool = True,
    ) -> tuple[list[dict[str, float]], Answers]:
        """Losses of groups of images, one forward each."""
        pretended = self.pretended if pretends else None
        answers = Answers(self._communicate, totals, pretended=pretended)
        losses = []
        with without_traces(self._model), without_dropout(self._model, self._freezes):
            for group in groups:
                micro_batch = MicroBatch(copy.deepcopy(list(group)))  # models may change images
                with SameDraws(seed, self._same_rows), answers.of(micro_batch):
                    found = self._losses(self._model, micro_batch.batch)
                losses.append({name: float(loss) for name, loss in found.items()})
        return losses, answers


def _rules(counts: Mapping[Site, float], answers: Answers) -> dict[Site, Rule]:
    rules = {site: Rule.through(site, answers.noted) for site in counts}
    return {site: rule for site, rule in rules.items() if rule is not None}


def _are_right(whole: Mapping[str, float], differences: Differences, limit: float) -> bool:
    """Whether each loss is right with some weights, up to a relative distance."""
    return all(
        min(map(abs, of_loss.values())) <= limit * abs(whole[name])
        for name, of_loss in differences.items()
    )


def trial_images(images: Sequence[Any], with_empty: bool = True) -> list[Any]:
    """Three images of one size: the most crowded one, one with fewer objects, one without any.

    Images of other sizes would be padded in a batch, and not in a part. If there are too few of one
    size, the most crowded one is taken again, with its pixels shifted.

    Args:
        with_empty: whether the objects of the last one are left out.
    """
    crowded = max(images, key=count_objects)
    same = [image for image in images if _size_of(image) == _size_of(crowded)]
    same.sort(key=count_objects, reverse=True)
    chosen = same if len(same) < 3 else [same[0], same[-1], same[len(same) // 2]]
    chosen += [_shifted(crowded, i) for i in range(1, 4 - len(chosen))]
    if not all(isinstance(i, dict) and isinstance(i.get("instances"), Instances) for i in chosen):
        return chosen
    first, second, third = chosen
    if count_objects(second) == count_objects(first) > 1:
        second = _with_objects(second, max(count_objects(second) // 3, 1))
    return [first, second, _with_objects(third, 0) if with_empty else third]


def _size_of(image: Any) -> tuple[int, int]:
    return size_of(list(image.parts) if isinstance(image, Row) else image)


def _shifted(image: Any, number: int) -> Any:
    pixels = image.get("image") if isinstance(image, dict) else None
    if not isinstance(pixels, torch.Tensor):
        return image
    return {**image, "image": pixels.roll(16 * number, -1)}


def _with_objects(image: dict[str, Any], number: int) -> dict[str, Any]:
    return {**image, "instances": image["instances"][:number]}
