"""The least harmful changes that make a job fit a budget."""

import logging
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Optional, Union

import torch
from detectron2.config import CfgNode
from omegaconf import DictConfig

from ..errors import ConfigError
from ..job import Job, WorstCase
from ..job.datasets import Size
from ..memory import check_budget
from ..presets import why_no_card_has
from ..techniques import TIERS, get_technique
from .cost_fit import with_cost_model
from .device_model import DeviceModel
from .dry_job import DryJob, usable_bytes
from .order import harm
from .plan import Plan, PlanStep
from .probe import job_class
from .trials import Choice, Trials, choice_of

__all__ = ["Planner", "plan_memory"]

logger = logging.getLogger(__name__)

_GB = 2**30

_WORTH_IT = 0.97  # what is tried later must be faster than this times what was found before
_MICRO_BATCH = "smaller micro-batches"
_OF_BATCH_NORM = "the images that BatchNorm's statistics are of."


def plan_memory(
    cfg: Union[CfgNode, DictConfig, Job],
    budget_gb: float,
    num_gpus: int = 1,
    allow: Sequence[str] = ("exact", "precision"),
    device: Optional[Union[str, Path, DeviceModel]] = None,
    case: Optional[WorstCase] = None,
    progress: Callable[[str], None] = lambda line: None,
    probe: bool = False,
    *,
    trainer: Any = None,
    batch: Any = None,
    image_size: Optional[Size] = None,
    num_instances: Optional[int] = None,
    evaluates: bool = True,
    cost_model: bool = False,
) -> Plan:
    """Find the fastest of the changes that make a job fit, from the first tier in which some do.

    Effective batch, learning rate and iterations stay as they are.

    Args:
        budget_gb: of the device, for the whole process, in 2^30 bytes.
        allow: tiers that may be used, of "exact", "precision" and "recipe".
        progress: called with a line for each dry run.
        cfg, num_gpus, device, case, probe, trainer, batch, image_size, num_instances, evaluates: as
            for :func:`~d2_memfit.planner.estimate_memory`.
        cost_model: whether windows are cut by predicted bytes, where they must be cut.

    Raises:
        ConfigError: a value cannot work, or the config's model cannot be built.
    """
    check_budget(budget_gb)
    if budget_gb is None or isinstance(budget_gb, str):
        raise ConfigError("a plan needs a budget in GB, such as 6")
    unknown = set(allow) - set(TIERS)
    if unknown or isinstance(allow, str):
        raise ConfigError(f"allow must be some of {', '.join(TIERS)}, got {allow!r}")
    facts = {"image_size": image_size, "num_instances": num_instances}
    given = batch if case is None else case
    job = Job.of(cfg, trainer, num_gpus, batch=given, **facts)
    if not isinstance(device, DeviceModel):
        device = DeviceModel.choose(device, job.cfg.MODEL.DEVICE)
    warning = why_no_card_has(budget_gb) if device.is_gpu else None
    if warning and not _has_card_of(budget_gb):
        logger.warning(warning)
    planner = Planner(job, device, job_class(probe, device), evaluates, progress)
    plan = planner.plan(budget_gb, [tier for tier in TIERS if tier in allow])
    return with_cost_model(plan, job, device, allow, progress) if cost_model else plan


def _has_card_of(budget_gb: float) -> bool:
    """Whether this machine has a GPU with so much memory."""
    if not torch.cuda.is_available():
        return False
    return torch.cuda.get_device_properties(0).total_memory >= budget_gb * _GB


class Planner:
    """Finds plans, and remembers the dry runs that it has made on the way.

    Args:
        job, device, run_job, evaluates, progress: as for :class:`~.trials.Trials`.
    """

    def __init__(
        self,
        job: Job,
        device: DeviceModel,
        run_job: type[DryJob] = DryJob,
        evaluates: bool = True,
        progress: Callable[[str], None] = lambda line: None,
    ) -> None:
        self._trials = Trials(job, device, run_job, evaluates, progress)
        self._window = job.geometry.window
        self._images = job.geometry.largest_micro_batch

    def plan(self, budget_gb: float, tiers: Sequence[str]) -> Plan:
        """
        Args:
            budget_gb: of the device, for the whole process.
            tiers: that may be used, in the order of harm.
        """
        trials = self._trials
        margin = trials.job.cfg.MEMFIT.PLAN.MARGIN
        trials.limit_bytes = usable_bytes(budget_gb, margin)
        start = choice_of((), self._images)
        choice = start if trials.fits(start) else self._search(tiers)
        fits = choice is not None
        smallest_gb: Optional[float] = None
        must_allow: Sequence[str] = ()
        if choice is None:
            choice = self._smallest(tiers)
            smallest_gb = trials.dry_job(choice).least_bytes() / (1 - margin) / _GB
            more = _more(tiers)
            must_allow = next((t for t in more if trials.fits(self._smallest(t))), ())
        before, after = trials.dry_job(start), trials.dry_job(choice)
        return Plan(
            budget_gb=budget_gb,
            margin=margin,
            fits=fits,
            steps=self._steps(choice),
            settings={**trials.settings(choice), **self._safety(budget_gb)},
            before=before.estimate(trials.limit_bytes),
            estimate=after.estimate(trials.limit_bytes),
            time_factor=after.seconds() / before.seconds(),
            smallest_budget_gb=smallest_gb,
            must_allow=tuple(must_allow),
            evaluation_decides=after.evaluation_decides(trials.limit_bytes),
            left_out=tuple(trials.left_out),
        )

    def _search(self, tiers: Sequence[str]) -> Optional[Choice]:
        """The fastest of the choices that fit, from the first of the tiers in which some do."""
        exact = self._trials.names("exact") if "exact" in tiers else ()
        least = self._least_images([tier for tier in tiers if tier != "recipe"])
        found = self._fastest((), exact, least)
        if found is not None:
            return found
        precision = self._helpful("precision") if "precision" in tiers else ()
        if precision:
            found = self._fastest(precision, exact, least)
        recipe = self._helpful("recipe") if found is None and "recipe" in tiers else ()
        least = self._least_images(tiers)
        for i in range(len(recipe) + 1):
            if found is None and self._trials.fits(
                choice_of((*precision, *recipe[:i], *exact), least)
            ):
                found = self._fastest((*precision, *recipe[:i]), exact, least)
        return found

    def _helpful(self, tier: str) -> tuple[str, ...]:
        """Techniques of a tier with which the job does something else, each alone."""
        return tuple(name for name in self._trials.names(tier) if self._trials.helps(name))

    def _smallest(self, tiers: Sequence[str]) -> Choice:
        names = [name for tier in tiers for name in self._helpful(tier)]
        choice = choice_of(names, self._least_images(tiers))
        while not self._trials.runs(choice):  # each alone it does
            choice = choice_of(choice.names[:-1], choice.num_images)
        return choice

    def _least_images(self, tiers: Sequence[str]) -> int:
        return 1 if self._trials.micro_batch_tier in tiers else self._images

    def _fastest(
        self, lead: tuple[str, ...], more: tuple[str, ...], least_images: int
    ) -> Optional[Choice]:
        """Of those with all in ``lead``, and one or the first few of ``more`` as far as needed."""
        more = tuple(name for name in more if self._trials.helps(name, lead))
        first_few = [more[:i] for i in range(2, len(more) + 1)]
        best, best_seconds = None, float("inf")
        for names in [(), *((name,) for name in more), *first_few]:
            names = (*lead, *names)
            if not self._trials.runs(choice_of(names, 1)):
                continue
            if self._least_seconds(names) > _WORTH_IT * best_seconds:
                continue
            num_images = self._most_images(names, least_images)
            if num_images is None:
                continue
            choice = self._without_what_is_not_needed(choice_of(names, num_images))
            if self._trials.dry_job(choice).seconds() < _WORTH_IT * best_seconds:
                best, best_seconds = choice, self._trials.dry_job(choice).seconds()
        return best

    def _least_seconds(self, names: tuple[str, ...]) -> float:
        """Of an iteration, if all images went through the model at once."""
        one = self._trials.dry_job(choice_of(names, 1))
        work = one.training.work
        calls = work["forward"].num_operators + work["backward"].num_operators
        num_micro_batches = len(one.job.geometry.micro_batch_sizes())
        overhead = calls * self._trials.device.seconds_per_operator * num_micro_batches
        return one.seconds() - overhead * (1 - 1 / self._images)

    def _most_images(self, names: tuple[str, ...], least: int) -> Optional[int]:
        """The largest micro-batch that fits; memory grows with it by as much for each image."""
        if not self._trials.fits(choice_of(names, least)):
            return None
        if least == self._images:
            return least
        if not self._trials.fits(choice_of(names, 2)):
            return 1
        one, two = (self._trials.dry_job(choice_of(names, i)).training_bytes() for i in (1, 2))
        guess = 2 + int((self._trials.limit_bytes - two) / max(two - one, 1))
        num_images = self._even(min(guess, self._images))
        while not self._trials.fits(choice_of(names, num_images)):
            num_images = self._even(num_images - 1)
        return num_images

    def _even(self, num_images: int) -> int:
        """The smallest micro-batch with which an iteration has no more of them."""
        return min(-(-self._window // -(-self._window // num_images)), self._images)

    def _without_what_is_not_needed(self, choice: Choice) -> Choice:
        """Try without each technique, first those that harm most."""
        for name in sorted(choice.names, key=harm, reverse=True):
            names = list(choice.names)
            names.remove(name)
            if self._trials.fits(choice_of(names, choice.num_images)):
                choice = choice_of(names, choice.num_images)
        return choice

    def _steps(self, choice: Choice) -> tuple[PlanStep, ...]:
        steps = []
        before = choice_of((), self._images)
        if choice.num_images < self._images:
            after = choice_of((), choice.num_images)
            steps.append(self._step(_MICRO_BATCH, self._trials.micro_batch_tier, before, after))
            before = after
        for name in choice.names:
            after = choice_of((*before.names, name), choice.num_images)
            steps.append(self._step(name, get_technique(name).tier, before, after))
            before = after
        return tuple(steps)

    def _step(self, name: str, tier: str, before: Choice, after: Choice) -> PlanStep:
        settings, there = self._trials.settings(after), self._trials.settings(before)
        one, other = self._trials.dry_job(before), self._trials.dry_job(after)
        return PlanStep(
            name=name,
            tier=tier,
            settings={k: v for k, v in settings.items() if k not in there or there[k] != v},
            what=_what_changes(name) if tier == "recipe" else "",
            gb_before=one.total_bytes(self._trials.limit_bytes) / _GB,
            gb_after=other.total_bytes(self._trials.limit_bytes) / _GB,
            time_factor=other.seconds() / one.seconds(),
        )

    def _safety(self, budget_gb: float) -> dict[str, Any]:
        """What keeps the job in its budget if an image is not as expected."""
        job = self._trials.job
        settings: dict[str, Any] = {"MEMFIT.BUDGET_GB": budget_gb}
        if job.ranks == 1 or not self._trials.synchronizes:  # recovery cannot have both
            settings["MEMFIT.OOM.POLICY"] = "split"
        return settings


def _more(tiers: Sequence[str]) -> list[list[str]]:
    """What else could be allowed, in the order of harm."""
    return [[*TIERS[:i]] for i in range(1, len(TIERS) + 1) if not set(TIERS[:i]) <= set(tiers)]


def _what_changes(name: str) -> str:
    """As the docstring of a technique of the recipe tier says it."""
    if name == _MICRO_BATCH:
        return _OF_BATCH_NORM
    found = re.search(r"Changes: (.*?)(\n\n|$)", get_technique(name).__doc__ or "", re.DOTALL)
    return " ".join(found[1].split()) if found else ""
