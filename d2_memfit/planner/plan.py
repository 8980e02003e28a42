# Copyright (c) the d2_memfit developers.
"""The ladder: changes that make a job fit a budget, tried in one order, the least harmful first."""

import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple, Optional, Union

from detectron2.config import CfgNode
from detectron2.layers import NaiveSyncBatchNorm
from omegaconf import DictConfig
from torch import nn

from ..common import GB
from ..common.compat import BatchNorm, has_kernels_for_bfloat16
from ..common.errors import ConfigError, MemfitError
from ..config.cards import why_no_card_has
from ..job import Job
from ..memory import check_budget
from ..techniques.checkpointing import blocks_of
from ..techniques.registry import TECHNIQUES, TIERS, get_technique
from .device import DeviceModel
from .errors import one_line_errors
from .estimate import DryJob, MemoryEstimate
from .steps import that_work
from .timeline import Allocate, Timeline

__all__ = ["Plan", "PlanStep", "plan_memory"]

logger = logging.getLogger(__name__)

_CHECKPOINT, _HEADS, _OFFLOAD = "ActivationCheckpointing", "ChunkedHeads", "ActivationOffload"
_AMP = "MixedPrecision"
_BLOCKS = "MEMFIT.CHECKPOINT.MODULES"


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


@dataclass(frozen=True)
class Plan:
    """Changes that make a job fit, and the memory that it then needs.

    Attributes:
        budget_gb: device memory for the whole process.
        margin: headroom, as a share of the budget.
        fits: whether it leaves the margin. If not, the other fields describe the smallest allowed
            plan.
        steps: steps in the order of the ladder.
        settings: settings of all steps, and those that keep the job in its budget.
        before, estimate: estimates without and with the plan; None without, if it does not fit.
        time_factor: operations of an iteration with the plan over those without; None if something
            else decides about time, as number formats and copies to the host do.
        smallest_budget_gb: smallest budget that leaves the margin, if this one does not.
        must_allow: tiers that would have to be allowed for this budget; empty if none would help.
        obstacle: a line about what stands in the way, and what would change it; "" if it fits.
        left_out: techniques with which the job does not run, and why; a line each.
    """

    budget_gb: float
    margin: float
    fits: bool
    steps: tuple[PlanStep, ...]
    settings: dict[str, Any]
    before: Optional[MemoryEstimate]
    estimate: MemoryEstimate
    time_factor: Optional[float]
    smallest_budget_gb: Optional[float] = None
    must_allow: tuple[str, ...] = ()
    obstacle: str = ""
    left_out: tuple[str, ...] = ()

    @property
    def figures(self) -> dict[str, Any]:
        """What training compares with, as :func:`~d2_memfit.memory.figures_of_plan` says."""
        e = self.estimate
        outside = e.peak_allocated_gb + sum(e.outside.values()) - e.peak_reserved_gb
        predicted = [round(gb, 3) for gb in (e.peak_allocated_gb, e.peak_reserved_gb, outside)]
        return {"predicted_gb": predicted, "offloaded_gb": round(e.offloaded_gb, 3)}


class Rung(NamedTuple):
    """Techniques by name, and the patterns of the blocks that are recomputed."""

    names: tuple[str, ...] = ()
    blocks: tuple[str, ...] = ()


def plan_memory(
    cfg: Union[CfgNode, DictConfig, Job],
    budget_gb: float,
    num_gpus: Optional[int] = None,
    allow: Sequence[str] = ("exact", "precision"),
    device: Union[DeviceModel, str, None] = None,
    progress: Callable[[str], None] = lambda line: None,
    probe: bool = False,
    *,
    evaluates: bool = True,
    prefer: str = "exact",
    counts_objects: bool = False,
    run: Optional[Union[str, Path]] = None,
    **given: Any,
) -> Plan:
    """Find the least harmful changes with which a job fits a budget.

    A job that fits is not changed. Effective batch, learning rate and iterations do not change.

    Args:
        budget_gb: device memory for the whole process, in GB of 2^30 bytes.
        allow: tiers that may be used, of "exact", "precision" and "recipe".
        progress: called with a line before each dry run.
        probe: whether to measure the final plan on this machine's GPU.
        cfg, num_gpus, device, evaluates, run, given: as for :func:`~d2_memfit.estimate_memory`.
        prefer: "exact", or "speed" for mixed precision first, where the card is faster with it.
        counts_objects: whether to tell how many objects fit.

    Raises:
        ConfigError: a value cannot work, or the config's model cannot be built.
    """
    check_budget(budget_gb)
    if budget_gb is None or isinstance(budget_gb, str):
        raise ConfigError("a plan needs a budget in GB, such as 6")
    unknown = set(allow) - set(TIERS)
    if unknown or isinstance(allow, str):
        raise ConfigError(f"allow must be some of {', '.join(TIERS)}, got {allow!r}")
    job = Job.from_any(cfg, ranks=num_gpus, **given)
    job = job.with_settings({"MEMFIT.BUDGET_GB": budget_gb})
    start = DryJob(job, device, evaluates, progress, run)
    is_more = start.device.is_gpu and budget_gb > start.device.usable_gb
    if is_more and (warning := why_no_card_has(budget_gb)):
        logger.warning(warning)
    ladder = Ladder(start, budget_gb, [tier for tier in TIERS if tier in allow], prefer, progress)
    return ladder.plan(probe, counts_objects and not probe)


class Ladder:
    """Finds the first rung on which a job fits a budget, in an order that no budget changes.

    So more memory is never worse. A rung has techniques of the tiers "precision" and "recipe", as
    few as possible, and then a level of exact ones: none, those that cost little, blocks of the
    backbone recomputed, all blocks recomputed, heads in chunks, all activations on the host. It has
    the most images in a micro-batch that fit.

    Args:
        start: the job as it is.
        tiers: the tiers that may be used.
        prefer: as for :func:`plan_memory`.
        progress: called with a line for each technique left out.

    Attributes:
        left_out: techniques with which the job does not run, and why; a line each.
    """

    def __init__(
        self,
        start: DryJob,
        budget_gb: float,
        tiers: Sequence[str],
        prefer: str = "exact",
        progress: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.left_out: list[str] = []
        self._start, self._budget_gb, self._tiers = start, budget_gb, tiers
        self._progress = progress
        self._made: dict[Rung, tuple[tuple[PlanStep, ...], DryJob]] = {Rung(): ((), start)}
        self._known = {Rung(): (Rung(), start)}
        self._checkpointed = tuple(start.job.cfg.MEMFIT.CHECKPOINT.MODULES)  # as it is
        is_faster = start.device.is_gpu and "precision" in tiers and self._is_usable(_AMP)
        self._first = (_AMP,) if prefer == "speed" and is_faster else ()

    def search(self) -> Optional[tuple[Rung, int]]:
        """The first rung on which the job fits, and its images in a micro-batch."""
        first = Rung(self._first)
        if images := self._most_images(first):
            return first, images
        leads = self._leads()
        if not self._fits_with_all(leads[0]) and not self._fits_with_all(leads[-1]):
            return None
        lead = next(lead for lead in leads if self._fits_with_all(lead))
        for name in reversed(lead[len(self._first) : -1]):
            without = tuple(n for n in lead if n != name)
            lead = without if self._fits_with_all(without) else lead
        levels = self._levels(lead)
        i = next(i for i, level in enumerate(levels) if self._fits(level))
        rung, _ = self._dry_job(levels[i])
        kept = (*lead, *([] if i == 1 else levels[i].names[-1:]))
        rung = self._without_what_can_go(rung, kept)
        if rung.names[-1:] == (_CHECKPOINT,):
            rung = self._with_fewer_blocks(rung, levels[i - 1].blocks)
            if rung.blocks not in (("backbone",), ("all",)):
                return rung, self._least
        return rung, self._most_images(rung) or self._least

    def _leads(self) -> list[tuple[str, ...]]:
        """More and more of what is not exact, the least harmful first."""
        harms = [*self._first]
        for tier in ("precision", "recipe"):
            if tier in self._tiers:
                harms += [name for name in self._usable[tier] if name not in harms]
        return [tuple(harms[:i]) for i in range(len(self._first), len(harms) + 1)]

    def _levels(self, lead: tuple[str, ...]) -> list[Rung]:
        """Rungs with more and more of what is exact."""
        levels = [Rung(lead)]
        exact = self._usable["exact"] if "exact" in self._tiers else []
        late = (_CHECKPOINT, _HEADS, _OFFLOAD)
        names = lead + tuple(name for name in exact if name not in late)
        blocks: tuple[str, ...] = ()
        levels.append(Rung(names))
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
        names = [name for name in names if name in works]
        return {tier: [n for n in names if get_technique(n).tier == tier] for tier in TIERS}

    def _blocks_of(self, dry_job: DryJob) -> tuple[Counter[str], Counter[str], float]:
        """What blocks save, their work, and the bytes that a micro-batch needs too much."""
        least, few = self._least, min(self._least, 3)
        timeline = dry_job.whole(few) if least == few else dry_job.run(few)
        saved, work = _saved_by_blocks(timeline, least / few)
        needs = dry_job.budget_bytes(dry_job.use(least))
        return saved, work, needs - self._budget_gb * GB

    def _fits_with_all(self, lead: tuple[str, ...]) -> bool:
        return self._fits(self._levels(lead)[-1])

    def _fits(self, rung: Rung, num_images: Optional[int] = None) -> bool:
        """Whether the job fits on a rung, by dry runs.

        Args:
            num_images: images in a micro-batch, the smallest by default.
        """
        with suppress(MemfitError):  # if it cannot be built, what goes is found below
            if self._with(rung)[1].least_bytes > self._budget_gb * GB:
                return False
        rung, dry_job = self._dry_job(rung)
        return dry_job.fits(self._budget_gb, num_images or self._least)

    def _dry_job(self, rung: Rung) -> tuple[Rung, DryJob]:
        """The job on a rung, without its last techniques if it does not run with them."""
        if rung not in self._known:
            _, dry_job = self._with(rung)
            try:
                dry_job.whole(1) if self._least == 1 else dry_job.run(2)
                self._known[rung] = rung, dry_job
            except MemfitError as e:  # some do not run together
                self._leave_out(f"{', '.join(rung.names)}: left out, {e}")
                self._known[rung] = self._dry_job(_named(rung.names[:-1], rung.blocks))
        return self._known[rung]

    def _leave_out(self, line: str) -> None:
        if line not in self.left_out:
            self.left_out.append(line)
            self._progress(line)

    def _most_images(self, rung: Rung) -> Optional[int]:
        """The largest micro-batch that fits; None if none does."""
        window, most = self._start.job.geometry.window, self._start.num_images
        # The smallest for each number of micro-batches in an iteration.
        sizes = {-(-window // number) for number in range(1, window + 1)}
        sizes = {min(max(size, self._least), most) for size in sizes}
        return next((n for n in sorted(sizes, reverse=True) if self._fits(rung, n)), None)

    @property
    def _least(self) -> int:
        """Images in the smallest micro-batch. Trained BatchNorm has statistics of all of them."""
        is_exact = "exact" in self._tiers and not self._trains_batch_norm
        return 1 if is_exact else self._start.num_images

    def _has(self, *kinds: type) -> bool:
        """Whether the model has a module of these classes that trains."""
        modules = self._start.session.model.modules()
        return any(isinstance(m, kinds) and m.training for m in modules)

    @cached_property
    def _trains_batch_norm(self) -> bool:
        return self._has(BatchNorm)

    def _without_what_can_go(self, rung: Rung, kept: tuple[str, ...]) -> Rung:
        """Drop techniques that are not needed, the most costly first."""
        others = [name for name in rung.names if name not in kept]
        for dropped in [others[:1] and others, *([name] for name in reversed(others))]:
            names = tuple(name for name in rung.names if name not in dropped)
            if names != rung.names and self._fits(_named(names, rung.blocks)):
                rung = _named(names, rung.blocks)
        return rung

    def _with_fewer_blocks(self, rung: Rung, before: tuple[str, ...]) -> Rung:
        """The fewest blocks with which the job fits, those first that save most for their work.

        Args:
            before: the blocks of the level before, which are not enough.
        """
        names = tuple(name for name in rung.names if name != _CHECKPOINT)
        _, dry_job = self._dry_job(_named((*names, _CHECKPOINT), before) if before else Rung(names))
        before = before or self._checkpointed
        blocks = {*blocks_of(self._start.session.model, rung.blocks[0])}
        saved, work, too_much = self._blocks_of(dry_job)
        order = sorted(saved.keys() & blocks, key=lambda name: -saved[name] / max(work[name], 1))
        for i in range(1, len(order)):
            if sum(saved[name] for name in order[:i]) >= too_much:
                chosen = rung._replace(blocks=(*before, *sorted(order[:i], key=[*saved].index)))
                if self._fits(chosen):
                    return chosen
        return rung

    def _with(self, rung: Rung) -> tuple[tuple[PlanStep, ...], DryJob]:
        """The steps of a rung, and the job with them."""
        if rung not in self._made:
            *names, name = rung.names
            start, (steps, before) = self._start, self._with(_named(names, rung.blocks))
            technique = get_technique(name)
            new = technique.settings(before.job, start.session.model)
            if name == _CHECKPOINT and rung.blocks:
                new = {_BLOCKS: [*rung.blocks]}
            steps = (*steps, PlanStep(name, technique.tier, new, technique.changes))
            job = before.job.with_settings(new)
            is_other = technique.tier == "recipe" or "evaluation" in technique.needs
            say, like = partial(self._say, rung), None if is_other else before
            self._made[rung] = steps, DryJob(job, start.device, start.evaluates, say, like=like)
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

    def plan(self, probe: bool = False, counts_objects: bool = False) -> Plan:
        """Make the plan.

        Args:
            probe: whether to measure it on this machine's GPU.
            counts_objects: whether to tell how many objects fit.
        """
        found = self.search()
        rung, num_images = found or self._smallest()
        rung, dry_job = self._dry_job(rung)
        if num_images < self._start.num_images:
            dry_job = dry_job.with_images(num_images)
        dry_job.probe() if probe else dry_job.whole()
        least = max(dry_job.budget_bytes(use) for use in dry_job.uses())
        fits = found is not None and least <= self._budget_gb * GB
        must_allow = () if fits else next(filter(self._would_fit, self._more_tiers()), ())
        steps = self._steps(rung, num_images)
        settings = {key: value for step in steps for key, value in step.settings.items()}
        settings["MEMFIT.BUDGET_GB"] = self._budget_gb
        if self._start.job.ranks == 1 or not self._has(nn.SyncBatchNorm, NaiveSyncBatchNorm):
            settings["MEMFIT.OOM.POLICY"] = "split"  # recovery cannot have both
        objects = dry_job.objects_that_fit(self._budget_gb) if counts_objects and fits else None
        is_of_work = not {_OFFLOAD} & {*rung.names} and all(s.tier != "precision" for s in steps)
        return Plan(
            budget_gb=self._budget_gb,
            margin=dry_job.headroom_bytes(dry_job.use()) / (self._budget_gb * GB),
            fits=fits,
            steps=steps,
            settings=settings,
            before=self._start.estimate(with_range=False) if fits else None,
            estimate=replace(dry_job.estimate(with_range=False), objects_that_fit=objects),
            time_factor=dry_job.flops() / self._start.flops() if fits and is_of_work else None,
            smallest_budget_gb=None if fits else math.ceil(100 * least / GB) / 100,
            must_allow=must_allow,
            obstacle="" if fits else self._obstacle(dry_job, num_images),
            left_out=tuple(self.left_out),
        )

    def _smallest(self) -> tuple[Rung, int]:
        """The rung with all that may change, and the smallest micro-batch."""
        lead = self._leads()[-1]
        return self._dry_job(self._levels(lead)[-1])[0], self._least

    def _would_fit(self, tiers: Sequence[str]) -> bool:
        other = copy(self)
        other._tiers = tiers
        return other._fits_with_all(other._leads()[-1])

    def _more_tiers(self) -> list[tuple[str, ...]]:
        """Further tiers that could be allowed, in the order of harm."""
        return [TIERS[:i] for i in range(1, len(TIERS) + 1) if not {*TIERS[:i]} <= {*self._tiers}]

    def _steps(self, rung: Rung, num_images: int) -> tuple[PlanStep, ...]:
        steps, _ = self._with(rung)
        if num_images == self._start.num_images:
            return steps
        settings = {"MEMFIT.MICRO_BATCH": num_images}
        return PlanStep("smaller micro-batches", "exact", settings, ""), *steps

    def _obstacle(self, dry_job: DryJob, num_images: int) -> str:
        """A line about what stands in the way, and what would change it."""
        use = dry_job.use(num_images)
        gb = use.total_bytes / GB
        if self._trains_batch_norm and num_images > 1:
            one = dry_job.use(1).total_bytes / GB
            return (
                f"BatchNorm is trained: the {num_images} images of one GPU cannot be split, and "
                f"need {gb:.2f} GB. One image on each of {num_images} GPUs needs {one:.2f} GB"
            )
        training, *evaluation = (use.allocated_bytes for use in dry_job.uses())
        if evaluation and evaluation[0] > training:
            return (
                "Evaluation takes more memory than training. To plan for training alone: "
                "--training-only, or DATASETS.TEST ()"
            )
        owner, num_bytes = use.breakdown.most_common(1)[0]
        images = "one image needs" if num_images == 1 else f"{num_images} images need"
        return (
            f"With all that may change, {images} {gb:.2f} GB. The largest part: {owner} "
            f"{num_bytes / GB:.2f} GB"
        )


def _named(names: Iterable[str], blocks: tuple[str, ...]) -> Rung:
    """A rung with these techniques; its blocks, if it has checkpointing."""
    names = tuple(names)
    return Rung(names, blocks if _CHECKPOINT in names else ())


def _saved_by_blocks(timeline: Timeline, factor: float) -> tuple[Counter[str], Counter[str]]:
    """Bytes at the peak that recomputing each block would save, and its operations.

    Args:
        factor: times the images of the timeline.
    """
    at_peak = timeline.alive_at_peak()
    saved: Counter[str] = Counter()
    work: Counter[str] = Counter()
    names = {call.name for call in timeline.calls}
    for call in timeline.calls:
        if any(name.startswith(f"{call.name}.") for name in names):
            continue  # a stage, whose blocks are there, too
        made = (e.allocation for e in timeline.events[call.begin : call.end] if type(e) is Allocate)
        kept = (a for a in made if a in at_peak and a not in call.outputs)
        saved[call.name] += round(factor * sum(a.num_bytes for a in kept))
        work[call.name] += call.flops
    return +saved, work
