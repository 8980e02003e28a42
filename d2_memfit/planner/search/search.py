# Copyright (c) the d2_memfit developers.
"""The search for changes that make a job fit a budget."""

import logging
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any, Optional, Union

import torch
from detectron2.config import CfgNode
from omegaconf import DictConfig

from ...common.units import GB
from ...config.cards import why_no_card_has
from ...errors import ConfigError
from ...job import Job, Size
from ...memory import check_budget
from ...techniques import TIERS, get_technique
from ..device import DeviceModel
from ..estimates import (
    DryJob,
    as_in_run,
    chance_to_fit,
    job_class,
    margin_of,
    objects_that_fit,
)
from .fastest import Fastest
from .plan import OtherPlan, Plan, PlanStep
from .trials import Choice, Trials, choice_of

__all__ = ["Planner", "plan_memory"]

logger = logging.getLogger(__name__)

_MICRO_BATCH = "smaller micro-batches"
_NOT_KNOWN = "not known"  # until the losses are tested
_BY_TEST = (
    "what losses are divided by, unless that is declared. The test before the first window names "
    "such losses; d2-memfit doctor names them now"
)
_OF_BATCH_NORM = "the images in BatchNorm's statistics."


def plan_memory(
    cfg: Union[CfgNode, DictConfig, Job],
    budget_gb: float,
    num_gpus: Optional[int] = None,
    allow: Sequence[str] = ("exact", "precision"),
    device: Optional[Union[str, Path, DeviceModel]] = None,
    progress: Callable[[str], None] = lambda line: None,
    probe: bool = False,
    *,
    trainer: Any = None,
    batch: Any = None,
    image_size: Optional[Size] = None,
    num_instances: Optional[int] = None,
    evaluates: bool = True,
    prefer: str = "exact",
    counts_objects: bool = False,
    run: Optional[Union[str, Path]] = None,
) -> Plan:
    """Find the least harmful changes with which a job fits a budget.

    A job that fits is not changed. Otherwise the plan is the fastest one of the least harm, as
    :meth:`Fastest.choice` says. Effective batch, learning rate and iterations do not change.

    Args:
        budget_gb: device memory for the whole process, in GB of 2^30 bytes.
        allow: tiers that may be used, of "exact", "precision" and "recipe".
        progress: called with a line for each dry run.
        cfg, num_gpus, device, probe, trainer, batch, image_size, num_instances, evaluates, run: as
            for :func:`~d2_memfit.planner.estimate_memory`.
        prefer: "exact", or "speed" for the plan that is predicted to be the fastest with the tiers
            "exact" and "precision".
        counts_objects: whether to find the most objects with which the planned job fits.

    Raises:
        ConfigError: a value cannot work, or the config's model cannot be built.
    """
    check_budget(budget_gb)
    if budget_gb is None or isinstance(budget_gb, str):
        raise ConfigError("a plan needs a budget in GB, such as 6")
    unknown = set(allow) - set(TIERS)
    if unknown or isinstance(allow, str):
        raise ConfigError(f"allow must be some of {', '.join(TIERS)}, got {allow!r}")
    job = Job.from_any(
        cfg, trainer, num_gpus, batch=batch, image_size=image_size, num_instances=num_instances
    )
    if not isinstance(device, DeviceModel):
        device = DeviceModel.choose(device, job.cfg.MODEL.DEVICE)
    warning = why_no_card_has(budget_gb) if device.is_gpu else None
    if warning and not (budget_gb <= device.usable_gb or _has_card_of(budget_gb)):
        logger.warning(warning)
    if run is not None:
        device = as_in_run(device, job, run, under_budget=True)
    planner = Planner(job, device, job_class(probe, device), evaluates, progress)
    tiers = [tier for tier in TIERS if tier in allow]
    return planner.plan(budget_gb, tiers, prefer, counts_objects and not probe)


def _has_card_of(budget_gb: float) -> bool:
    """Whether this machine has a GPU with this much memory."""
    if not torch.cuda.is_available():
        return False
    return torch.cuda.get_device_properties(0).total_memory >= budget_gb * GB


class Planner(Trials):
    """Finds plans. All plans of one planner share its dry runs."""

    def plan(
        self,
        budget_gb: float,
        tiers: Sequence[str],
        prefer: str = "exact",
        counts_objects: bool = False,
    ) -> Plan:
        """Find a plan.

        Args:
            budget_gb: device memory for the whole process.
            tiers: tiers that may be used, in the order of harm.
            prefer, counts_objects: as for :func:`plan_memory`.
        """
        margin = margin_of(self.job, self.device)
        self.budget_bytes = budget_gb * GB
        self.limit_bytes = margin.limit_bytes(self.budget_bytes)
        fastest = Fastest(self)
        choice = fastest.choice(tiers, prefer)
        fits = choice is not None
        smallest_gb = None
        must_allow: Sequence[str] = ()
        if choice is None:
            choice = fastest.smallest(tiers)
            smallest = self.dry_job(choice)
            needs_bytes = smallest.least_bytes()
            smallest_bytes = max(margin.budget_bytes(needs_bytes), smallest.total_bytes())
            smallest_gb = math.ceil(100 * smallest_bytes / GB) / 100  # as it is printed
            must_allow = next((t for t in _more(tiers) if self.fits(fastest.smallest(t))), ())
        before, after = self.dry_job(choice_of((), self._images)), self.dry_job(choice)
        if fits:
            needs_bytes = after.total_bytes(self.limit_bytes)
        objects = None
        if counts_objects:
            objects = objects_that_fit(after, self.limit_bytes, self.is_within)
        estimate = after.estimate(self.limit_bytes, with_range=True)
        return Plan(
            budget_gb=budget_gb,
            margin=1 - self.limit_bytes / self.budget_bytes,
            fits=fits,
            chance=chance_to_fit(self.job, self.device, needs_bytes, self.budget_bytes),
            steps=self._steps(choice, one_by_one=fits),
            settings={**self.settings(choice), **self._safety(budget_gb), **_on_host(after)},
            before=before.estimate(self.limit_bytes),
            estimate=replace(estimate, objects_that_fit=objects),
            time_factor=after.seconds() / before.seconds(),
            time_range=after.time_range(before),
            smallest_budget_gb=smallest_gb,
            must_allow=tuple(must_allow),
            evaluation_decides=after.evaluation_decides(self.limit_bytes),
            left_out=tuple(self.left_out),
            other=self._other(choice, fastest) if fits and prefer == "speed" else None,
        )

    @property
    def _images(self) -> int:
        return self.job.geometry.largest_micro_batch

    def _other(self, choice: Choice, fastest: Fastest) -> Optional[OtherPlan]:
        """The exact plan, if the choice is not exact."""
        other = fastest.choice(["exact"], "exact")
        if other is None or all(get_technique(name).tier == "exact" for name in choice.names):
            return None
        start, dry_job = (self.dry_job(c) for c in (choice_of((), self._images), other))
        return OtherPlan(
            self.settings(other),
            dry_job.total_bytes(self.limit_bytes) / GB,
            dry_job.seconds() / start.seconds(),
            dry_job.time_range(start),
        )

    def _steps(self, choice: Choice, one_by_one: bool) -> tuple[PlanStep, ...]:
        """One step per technique; or one per tier, which needs no dry run of each technique."""
        steps = []
        before = choice_of((), self._images)
        if choice.num_images < self._images:
            after = choice_of((), choice.num_images)
            tier = "recipe" if self.micro_batch_tier == "recipe" else _NOT_KNOWN
            steps.append(self._step([_MICRO_BATCH], tier, before, after))
            before = after
        of_tiers = groupby(choice.names, lambda name: get_technique(name).tier)
        groups = [[name] for name in choice.names] if one_by_one else [[*g] for _, g in of_tiers]
        for names in groups:
            after = choice_of((*before.names, *names), choice.num_images, choice.modules)
            steps.append(self._step(names, get_technique(names[0]).tier, before, after))
            before = after
        return tuple(steps)

    def _step(self, names: list[str], tier: str, before: Choice, after: Choice) -> PlanStep:
        settings, there = self.settings(after), self.settings(before)
        one, other = self.dry_job(before), self.dry_job(after)
        what = " ".join(map(_what_changes, names)) if tier in ("precision", "recipe") else ""
        return PlanStep(
            name="every technique" if names[1:] else names[0],
            tier=tier,
            settings={k: v for k, v in settings.items() if k not in there or there[k] != v},
            what=_BY_TEST if tier == _NOT_KNOWN else what,
            gb_before=one.total_bytes(self.limit_bytes) / GB,
            gb_after=other.total_bytes(self.limit_bytes) / GB,
            time_factor=other.seconds() / one.seconds(),
            time_range=other.time_range(one),
        )

    def _safety(self, budget_gb: float) -> dict[str, Any]:
        """Settings that keep the job in its budget if an image is larger than expected."""
        settings: dict[str, Any] = {"MEMFIT.BUDGET_GB": budget_gb}
        if self.job.ranks == 1 or not self.synchronizes:  # recovery cannot have both
            settings["MEMFIT.OOM.POLICY"] = "split"
        return settings


def _on_host(dry_job: DryJob) -> dict[str, Any]:
    """Settings for the host's memory."""
    offloaded_gb = round(dry_job.offloaded_bytes / GB, 3)
    return {"MEMFIT.PLAN.OFFLOADED_GB": offloaded_gb} if offloaded_gb else {}


def _more(tiers: Sequence[str]) -> list[list[str]]:
    """Further tiers that could be allowed, in the order of harm."""
    return [[*TIERS[:i]] for i in range(1, len(TIERS) + 1) if not set(TIERS[:i]) <= set(tiers)]


def _what_changes(name: str) -> str:
    """Text after "Changes:" in a technique's docstring."""
    if name == _MICRO_BATCH:
        return _OF_BATCH_NORM
    found = re.search(r"Changes: (.*?)(\n\n|$)", get_technique(name).__doc__ or "", re.DOTALL)
    return " ".join(found[1].split()) if found else ""
