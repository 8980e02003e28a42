# Copyright (c) the d2_memfit developers.
"""The ladder: changes that make a job fit a budget, tried in one order, the least harmful first."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple, Optional

import numpy as np

from ..common import GB
from ..common.compat import BatchNorm, has_kernels_for_bfloat16
from ..common.errors import MemfitError
from ..techniques.checkpointing import blocks_of
from ..techniques.registry import TECHNIQUES, TIERS, get_technique
from .errors import one_line_errors
from .estimate import DryJob
from .peaks import FEW
from .steps import that_work
from .timeline import Allocate, Free, Timeline, Workspace

__all__ = ["Ladder", "PlanStep", "Rung"]

_CHECKPOINT, _HEADS, _OFFLOAD = "ActivationCheckpointing", "ChunkedHeads", "ActivationOffload"
_AMP = "MixedPrecision"
_BLOCKS = "MEMFIT.CHECKPOINT.MODULES"
_FAR = 4  # times the budget: if a job needs more, all levels together are tried first
_LEAST_SAVED = 0.01  # of the peak, by which the next blocks to try make it smaller


@dataclass(frozen=True)
class PlanStep:
    """One change of a plan.

    Attributes:
        name: a technique, or "smaller micro-batches".
        tier: "exact", "precision" or "recipe".
        settings: config keys and their new values.
        what: what it changes in training, for tiers other than exact.
    """

    name: str
    tier: str
    settings: dict[str, Any]
    what: str


class Rung(NamedTuple):
    """Techniques by name, and the patterns of the blocks that are recomputed."""

    names: tuple[str, ...] = ()
    blocks: tuple[str, ...] = ()


class Ladder:
    """Finds the first rung on which a job fits a budget, in an order that no budget changes.

    So more memory is never worse. A rung has techniques of the tiers "precision" and "recipe", as
    few as possible, and then a level of exact ones: none, those that cost little, blocks of the
    backbone recomputed, all blocks recomputed, heads in chunks, all activations on the host. It has
    the most images in a micro-batch that fit.

    Args:
        start: the job as it is.
        tiers: the tiers that may be used.
        prefer: as for :func:`~.plan.plan_memory`.

    Attributes:
        left_out: techniques with which the job does not run, and why; a line each.
    """

    def __init__(
        self, start: DryJob, budget_gb: float, tiers: Sequence[str], prefer: str = "exact"
    ) -> None:
        self.left_out: list[str] = []
        self._start, self._budget_gb, self._tiers = start, budget_gb, tiers
        self._progress = start.progress
        self._made: dict[Rung, tuple[tuple[PlanStep, ...], DryJob]] = {Rung(): ((), start)}
        self._known = {Rung(): (Rung(), start)}
        self._runs = {Rung(): start.runs}
        self._checkpointed = tuple(start.job.cfg.MEMFIT.CHECKPOINT.MODULES)  # as it is
        is_faster = start.device.is_gpu and "precision" in tiers and self._is_usable(_AMP)
        self._first = (_AMP,) if prefer == "speed" and is_faster else ()

    def search(self) -> Optional[tuple[Rung, int]]:
        """The first rung on which the job fits, and its images in a micro-batch."""
        first = Rung(self._first)
        if images := self._most_images(first):
            return first, images
        leads, start = self._leads(), self._start
        is_far = start.runs and start.budget_bytes(start.use()) > _FAR * self._budget_gb * GB
        may_fit = not is_far or self._fits_with_all(leads[0])
        exact_fits = may_fit and any(map(self._fits, self._levels(leads[0])))
        if not exact_fits and not self._fits_with_all(leads[-1]):
            return None
        lead = leads[0] if exact_fits else next(filter(self._fits_with_all, leads))
        for name in reversed(lead[len(self._first) : -1]):
            without = tuple(n for n in lead if n != name)
            lead = without if self._fits_with_all(without) else lead
        levels = self._levels(lead)
        i = next(i for i, level in enumerate(levels) if self._fits(level))
        rung, _ = self.dry_job(levels[i])
        kept = (*lead, *([] if i == 1 else levels[i].names[-1:]))
        saved = self._need(levels[0]) - self._need(levels[1]) if i > 1 else 0.0
        rung = self._without_what_can_go(rung, kept, saved)
        if rung.names[-1:] == (_CHECKPOINT,):
            rung = self._with_fewer_blocks(rung, levels[i - 1].blocks)
            if rung.blocks not in (("backbone",), ("all",)):
                return rung, self._least
        return rung, self._most_images(rung) or self._least

    def smallest(self) -> tuple[Rung, int]:
        """The rung with all that may change, and the smallest micro-batch."""
        return self.dry_job(self._levels(self._leads()[-1])[-1])[0], self._least

    def must_allow(self) -> tuple[str, ...]:
        """The least harmful tiers with which the job would fit; none if no other tier helps."""
        for number in range(1, len(TIERS) + 1):
            other = copy(self)
            other._tiers = TIERS[:number]
            is_new = not {*other._tiers} <= {*self._tiers}
            if is_new and other._fits_with_all(other._leads()[-1]):
                return TIERS[:number]
        return ()

    def _leads(self) -> list[tuple[str, ...]]:
        """More and more of what is not exact, the least harmful first."""
        harms = [*self._first]
        for tier in ("precision", "recipe"):
            if tier in self._tiers:
                harms += [name for name in self._usable[tier] if name not in harms]
        return [tuple(harms[:i]) for i in range(len(self._first), len(harms) + 1)]

    def _levels(self, lead: tuple[str, ...]) -> list[Rung]:
        """Rungs with more and more of what is exact."""
        exact = self._usable["exact"] if "exact" in self._tiers else []
        late = (_CHECKPOINT, _HEADS, _OFFLOAD)
        names = lead + tuple(name for name in exact if name not in late)
        blocks: tuple[str, ...] = ()
        levels = [Rung(lead), Rung(names)]
        if _CHECKPOINT in exact:
            names += (_CHECKPOINT,)
            for choice in ("all",) if self._checkpointed else ("backbone", "all"):
                if blocks_of(self._start.session.model, choice):
                    blocks = (choice,)
                    levels.append(Rung(names, blocks))
        for name in (_HEADS, _OFFLOAD):
            if name in exact:
                names += (name,)
                levels.append(Rung(names, blocks))
        return levels

    @cached_property
    def _usable(self) -> dict[str, list[str]]:
        """Names of the techniques that work here, by tier, in their order."""
        names = [t.name for t in TECHNIQUES if self._is_usable(t.name)]
        with one_line_errors():
            works = {*that_work(self._start.job, names)}
        found = [t for t in TECHNIQUES if t.name in works]
        return {tier: [t.name for t in found if t.tier == tier] for tier in TIERS}

    def _fits_with_all(self, lead: tuple[str, ...]) -> bool:
        return self._fits(self._levels(lead)[-1])

    def _fits(self, rung: Rung, num_images: Optional[int] = None) -> bool:
        """Whether the job fits on a rung, by dry runs.

        Args:
            num_images: images in a micro-batch, the smallest by default.
        """
        with suppress(MemfitError):  # if it cannot be built, what goes is found below
            dry_job = self.steps(rung)[1]
            if not dry_job.runs and dry_job.least_bytes > self._budget_gb * GB:
                return False
        rung, dry_job = self.dry_job(rung)
        return dry_job.fits(self._budget_gb, num_images or self._least)

    def dry_job(self, rung: Rung) -> tuple[Rung, DryJob]:
        """The job on a rung, without its last techniques if it does not run with them."""
        if rung not in self._known:
            _, dry_job = self.steps(rung)
            try:
                dry_job.whole(self._least) if self._least <= FEW else dry_job.run(2)
                self._known[rung] = rung, dry_job
            except MemfitError as e:  # some do not run together
                self._leave_out(f"{', '.join(rung.names)}: left out, {e}")
                self._known[rung] = self.dry_job(_named(rung.names[:-1], rung.blocks))
        return self._known[rung]

    def _leave_out(self, line: str) -> None:
        if line not in self.left_out:
            self.left_out.append(line)
            self._progress(line)

    def _most_images(self, rung: Rung) -> Optional[int]:
        """The largest micro-batch that fits; None if none does."""
        window, most = self._start.job.window, self._start.num_images
        # The smallest for each number of micro-batches in an iteration.
        smallest = (-(-window // number) for number in range(1, window + 1))
        sizes = {min(max(size, self._least), most) for size in smallest}
        return next((n for n in sorted(sizes, reverse=True) if self._fits(rung, n)), None)

    @property
    def _least(self) -> int:
        """Images in the smallest micro-batch. Trained BatchNorm has statistics of all of them."""
        is_exact = "exact" in self._tiers and not self.trains_batch_norm
        return 1 if is_exact else self._start.num_images

    def has(self, *kinds: type) -> bool:
        """Whether the model has a module of these classes that trains."""
        modules = self._start.session.model.modules()
        return any(isinstance(m, kinds) and m.training for m in modules)

    @cached_property
    def trains_batch_norm(self) -> bool:
        return self.has(BatchNorm)

    def _need(self, rung: Rung) -> float:
        _, dry_job = self.dry_job(rung)
        return dry_job.budget_bytes(dry_job.use(self._least))

    def _without_what_can_go(self, rung: Rung, kept: tuple[str, ...], saved: float) -> Rung:
        """Drop techniques that are not needed, the most costly first.

        Args:
            saved: bytes that the techniques which are not in ``kept`` save by themselves. They stay
                without a dry run if half of it is more than what is left of the budget.
        """
        others = [name for name in rung.names if name not in kept]
        trained = {name for name in others if get_technique(name).part != "evaluation"}
        left = self._budget_gb * GB - self._need(rung)
        for dropped in [others, *([name] for name in reversed(others))]:
            names = tuple(name for name in rung.names if name not in dropped)
            may_go = names != rung.names and (saved / 2 <= left or not trained <= {*dropped})
            if may_go and self._fits(_named(names, rung.blocks)):
                rung = _named(names, rung.blocks)
        return rung

    def _with_fewer_blocks(self, rung: Rung, before: tuple[str, ...]) -> Rung:
        """The fewest blocks with which the job fits, those first that save most for their work.

        Args:
            before: the blocks of the level before, which are not enough.
        """
        _, dry_job = self.dry_job(Rung(rung.names, before) if before else Rung(rung.names[:-1]))
        before = before or self._checkpointed
        blocks = {*blocks_of(self._start.session.model, rung.blocks[0])}
        least, few = self._least, min(self._least, 3)
        timeline = dry_job.whole(few) if least == few else dry_job.run(few)
        live, saved, work = _saved_by_blocks(timeline)
        need, peak = dry_job.budget_bytes(dry_job.use(least)), live.argmax()
        most = last = live.max()
        order = [name for name in saved if name in blocks and saved[name][peak]]
        order.sort(key=lambda name: -saved[name][peak] / max(work[name], 1))
        for i in range(1, len(order)):
            live = live - saved[order[i - 1]]
            if last - live.max() < _LEAST_SAVED * most:
                continue  # the same for all budgets
            last = live.max()
            saved_bytes = (1 + dry_job.device.margin[0]) * (most - last) * least / few
            if need - saved_bytes <= self._budget_gb * GB:
                chosen = rung._replace(blocks=(*before, *sorted(order[:i], key=[*saved].index)))
                if self._fits(chosen):
                    return chosen
        return rung

    def steps(self, rung: Rung) -> tuple[tuple[PlanStep, ...], DryJob]:
        """The steps of a rung, and the job with them."""
        if rung not in self._made:
            *names, name = rung.names
            start, (steps, before) = self._start, self.steps(_named(names, rung.blocks))
            technique = get_technique(name)
            new = technique.settings(before.job, start.session.model)
            if name == _CHECKPOINT and rung.blocks:
                new = {_BLOCKS: [*rung.blocks]}
            steps = (*steps, PlanStep(name, technique.tier, new, technique.changes))
            job = before.job.with_settings(new)
            is_other = technique.tier == "recipe" or "evaluation" in technique.needs
            say, like = partial(self._say, rung), None if is_other else before
            dry_job = DryJob(job, start.device, start.evaluates, say, like=like)
            # What is done in evaluations changes no step.
            trained = tuple(n for n in rung.names if get_technique(n).part != "evaluation")
            dry_job.runs = self._runs.setdefault(Rung(trained, rung.blocks), dry_job.runs)
            self._made[rung] = steps, dry_job
        return self._made[rung]

    def _say(self, rung: Rung, line: str) -> None:
        self._progress(", ".join([line, *rung.names]))

    def _is_usable(self, name: str) -> bool:
        """Whether a technique can be turned on here, according to its settings."""
        technique, device, job = get_technique(name), self._start.device, self._start.job
        needs, why_not = technique.needs, ""
        if ("gpu" in needs and not device.is_gpu) or ("ranks" in needs and job.ranks < 2):
            return False
        if device.float16_fails:
            why_not = f"float16 is known to fail on {device.description}"
        elif not (device.is_gpu or has_kernels_for_bfloat16()):
            why_not = "PyTorch has no fast 16 bits on this CPU"
        if "float16" in needs and why_not:
            if technique.tier in self._tiers:
                self._leave_out(f"{name}: left out, {why_not}")
            return False
        try:
            settings = technique.settings(job, self._start.session.model)
            return job.with_settings(settings).cfg != job.cfg
        except MemfitError as e:
            self._progress(f"{name} is left out: {e}")
            return False


def _named(names: Iterable[str], blocks: tuple[str, ...]) -> Rung:
    """A rung with these techniques; its blocks, if it has checkpointing."""
    names = tuple(names)
    return Rung(names, blocks if _CHECKPOINT in names else ())


def _saved_by_blocks(timeline: Timeline) -> tuple[Any, dict[str, Any], Counter[str]]:
    """Arrays of live bytes after each event, and of what recomputing a block saves of them.

    The last are operations of each block.
    """
    events, work = timeline.events, Counter[str]()
    live = np.cumsum([0 if isinstance(e, Workspace) else e.num_bytes for e in events])
    freed = {e.allocation: i for i, e in enumerate(events) if type(e) is Free}
    saved: dict[str, Any] = defaultdict(lambda: np.zeros_like(live))
    names = {call.name for call in timeline.calls}
    for call in timeline.calls:
        if any(name.startswith(f"{call.name}.") for name in names):
            continue  # a stage, whose blocks are there, too
        made = {e.allocation for e in events[call.begin : call.end] if type(e) is Allocate}
        for kept in made - call.outputs:
            saved[call.name][call.end : freed.get(kept)] += kept.num_bytes
        work[call.name] += call.flops
    return live, saved, work
