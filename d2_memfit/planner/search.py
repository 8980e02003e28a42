"""The least harmful changes that make a job fit a budget."""

import logging
import re
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, Optional, Union

import torch
from detectron2.config import CfgNode
from torch.nn.modules.batchnorm import _BatchNorm

from ..checks import check_positive_int
from ..config import check_config, with_memfit_keys, with_settings
from ..errors import ConfigError
from ..memory import check_budget
from ..presets import why_no_card_has
from ..scaling import auto_scale_workers
from ..techniques import TECHNIQUES, TIERS, get_technique
from . import job
from .device_model import DeviceModel
from .dry_job import DryJob, usable_bytes
from .order import IN_EVALUATION, NOT_PLANNED, ON_GPU_ONLY, harm
from .plan import Plan, PlanStep
from .probe import job_class
from .timeline import Timeline
from .worst_case import WorstCase, worst_case

__all__ = ["Planner", "plan_memory"]

logger = logging.getLogger(__name__)

_GB = 2**30

_WORTH_IT = 0.97  # what is tried later must be faster than this times what was found before
_MICRO_BATCH = "smaller micro-batches"
_OF_BATCH_NORM = "the images that BatchNorm's statistics are of."


def plan_memory(
    cfg: CfgNode,
    budget_gb: float,
    num_gpus: int = 1,
    allow: Sequence[str] = ("exact", "precision"),
    device: Optional[Union[str, Path]] = None,
    case: Optional[WorstCase] = None,
    progress: Callable[[str], None] = lambda line: None,
    probe: bool = False,
) -> Plan:
    """Find the fastest of the changes that make a job fit, from the first tier in which some do.

    Effective batch, learning rate and iterations stay as they are.

    Args:
        budget_gb: of the device, for the whole process, in 2^30 bytes.
        allow: tiers that may be used, of "exact", "precision" and "recipe".
        num_gpus, device, case, probe: as for :func:`~d2_memfit.planner.estimate_memory`.
        progress: called with a line for each dry run.

    Raises:
        ConfigError: a value cannot work, or the config's model cannot be built.
    """
    check_budget(budget_gb)
    if budget_gb is None or isinstance(budget_gb, str):
        raise ConfigError("a plan needs a budget in GB, such as 6")
    check_positive_int("num_gpus", num_gpus)
    unknown = set(allow) - set(TIERS)
    if unknown or isinstance(allow, str):
        raise ConfigError(f"allow must be some of {', '.join(TIERS)}, got {allow!r}")
    cfg = with_memfit_keys(cfg)
    check_config(cfg)
    cfg = auto_scale_workers(cfg, num_gpus)
    check_config(cfg, num_gpus)
    cfg.defrost()
    chosen_device = DeviceModel.choose(device, cfg.MODEL.DEVICE)
    warning = why_no_card_has(budget_gb) if chosen_device.is_gpu else None
    if warning and not _has_card_of(budget_gb):
        logger.warning(warning)
    planner = Planner(cfg, num_gpus, chosen_device, case, progress, probe)
    return planner.plan(budget_gb, [tier for tier in TIERS if tier in allow])


def _has_card_of(budget_gb: float) -> bool:
    """Whether this machine has a GPU with so much memory."""
    if not torch.cuda.is_available():
        return False
    return torch.cuda.get_device_properties(0).total_memory >= budget_gb * _GB


class Planner:
    """Finds a plan, and remembers the dry runs that it has made on the way.

    Args:
        cfg: with the keys of d2_memfit, and checked.
        num_gpus, device, case, progress, probe: as for :func:`plan_memory`.
    """

    def __init__(
        self,
        cfg: CfgNode,
        num_gpus: int,
        device: DeviceModel,
        case: Optional[WorstCase] = None,
        progress: Callable[[str], None] = lambda line: None,
        probe: bool = False,
    ) -> None:
        self._cfg = cfg.clone()
        self._num_gpus = num_gpus
        self._device = device
        self._case = case
        self._progress = progress
        self._run_job = job_class(probe, device)
        batch = cfg.SOLVER.IMS_PER_BATCH // num_gpus
        self._window = batch * cfg.SOLVER.ACCUMULATION_STEPS
        self._images = min(cfg.MEMFIT.MICRO_BATCH or batch, self._window)
        self._jobs: dict[_Choice, DryJob] = {}
        self._evaluations: dict[tuple[str, ...], Timeline] = {}  # by the techniques that matter
        self._usable: dict[str, tuple[str, ...]] = {}  # techniques by tier

    def plan(self, budget_gb: float, tiers: Sequence[str]) -> Plan:
        margin = self._cfg.MEMFIT.PLAN.MARGIN
        self._cfg.MEMFIT.BUDGET_GB = budget_gb
        self._limit_bytes = usable_bytes(budget_gb, margin)
        start = _choice((), self._images)
        choice = start if self._fits(start) else self._search(tiers)
        fits = choice is not None
        smallest_gb: Optional[float] = None
        must_allow: Sequence[str] = ()
        if choice is None:
            choice = self._smallest(tiers)
            smallest_gb = self._job(choice).least_bytes() / (1 - margin) / _GB
            must_allow = next((t for t in _more(tiers) if self._fits(self._smallest(t))), ())
        before, after = self._job(start), self._job(choice)
        return Plan(
            budget_gb=budget_gb,
            margin=margin,
            fits=fits,
            steps=self._steps(choice),
            settings={**self._settings(choice), **self._safety(budget_gb)},
            before=before.estimate(self._limit_bytes),
            estimate=after.estimate(self._limit_bytes),
            time_factor=after.seconds() / before.seconds(),
            smallest_budget_gb=smallest_gb,
            must_allow=tuple(must_allow),
        )

    def _search(self, tiers: Sequence[str]) -> Optional["_Choice"]:
        """The fastest of the choices that fit, from the first of the tiers in which some do."""
        names = {tier: self._names(tier) for tier in tiers}
        exact, precision = names.get("exact", ()), names.get("precision", ())
        recipe = names.get("recipe", ())
        least = self._least_images([tier for tier in tiers if tier != "recipe"])
        found = self._fastest((), exact, least)
        if found is None and precision:
            found = self._fastest(precision, exact, least)
        least = self._least_images(tiers)
        for i in range(len(recipe) + 1):
            if found is None and self._fits(_choice((*precision, *recipe[:i], *exact), least)):
                found = self._fastest((*precision, *recipe[:i]), exact, least)
        return found

    def _smallest(self, tiers: Sequence[str]) -> "_Choice":
        names = [name for tier in tiers for name in self._names(tier)]
        return _choice(names, self._least_images(tiers))

    def _least_images(self, tiers: Sequence[str]) -> int:
        return 1 if self._micro_batch_tier in tiers else self._images

    @cached_property
    def _micro_batch_tier(self) -> str:
        """Statistics of BatchNorm are of the images of a micro-batch."""
        model, _ = job.build(self._cfg)
        trains = any(isinstance(m, _BatchNorm) and m.training for m in model.modules())
        return "recipe" if trains else "exact"

    def _names(self, tier: str) -> tuple[str, ...]:
        """Techniques of a tier that change something here and that a dry run has."""
        if tier not in self._usable:
            names = [n for n, t in TECHNIQUES if t.tier == tier and n not in NOT_PLANNED]
            self._usable[tier] = tuple(filter(self._is_usable, sorted(names, key=harm)))
        return self._usable[tier]

    def _is_usable(self, name: str) -> bool:
        if name in ON_GPU_ONLY and not self._device.is_gpu:
            return False
        if name == "ShardedOptimizerStates" and self._num_gpus == 1:
            return False
        settings = get_technique(name).settings(self._cfg)
        cfg = with_settings(self._cfg, settings)
        if cfg == self._cfg:
            return False
        try:
            job.build(cfg)
        except ConfigError as e:
            self._progress(f"{name} is left out: {e}")
            return False
        return True

    def _fastest(
        self, lead: tuple[str, ...], more: tuple[str, ...], least_images: int
    ) -> Optional["_Choice"]:
        """Of those with all in ``lead``, and one or the first few of ``more`` as far as needed."""
        first_few = [more[:i] for i in range(2, len(more) + 1)]
        best, best_seconds = None, float("inf")
        for names in [(), *((name,) for name in more), *first_few]:
            names = (*lead, *names)
            if self._least_seconds(names) > _WORTH_IT * best_seconds:
                continue
            num_images = self._most_images(names, least_images)
            if num_images is None:
                continue
            choice = self._without_what_is_not_needed(_choice(names, num_images))
            if self._job(choice).seconds() < _WORTH_IT * best_seconds:
                best, best_seconds = choice, self._job(choice).seconds()
        return best

    def _least_seconds(self, names: tuple[str, ...]) -> float:
        """Of an iteration, if all images went through the model at once."""
        one = self._job(_choice(names, 1))
        work = one.training.work
        calls = work["forward"].num_operators + work["backward"].num_operators
        overhead = calls * self._device.seconds_per_operator * len(one.micro_batch_sizes())
        return one.seconds() - overhead * (1 - 1 / self._images)

    def _most_images(self, names: tuple[str, ...], least: int) -> Optional[int]:
        """The largest micro-batch that fits; memory grows with it by as much for each image."""
        if not self._fits(_choice(names, least)):
            return None
        if least == self._images:
            return least
        if not self._fits(_choice(names, 2)):
            return 1
        one, two = (self._job(_choice(names, i)).training_bytes() for i in (1, 2))
        guess = 2 + int((self._limit_bytes - two) / max(two - one, 1))
        num_images = self._even(min(guess, self._images))
        while not self._fits(_choice(names, num_images)):
            num_images = self._even(num_images - 1)
        return num_images

    def _even(self, num_images: int) -> int:
        """The smallest micro-batch with which an iteration has no more of them."""
        return min(-(-self._window // -(-self._window // num_images)), self._images)

    def _without_what_is_not_needed(self, choice: "_Choice") -> "_Choice":
        """Try without each technique, first those that harm most."""
        for name in sorted(choice.names, key=harm, reverse=True):
            names = list(choice.names)
            names.remove(name)
            if self._fits(_choice(names, choice.num_images)):
                choice = _choice(names, choice.num_images)
        return choice

    def _steps(self, choice: "_Choice") -> tuple[PlanStep, ...]:
        steps = []
        before = _choice((), self._images)
        if choice.num_images < self._images:
            after = _choice((), choice.num_images)
            steps.append(self._step(_MICRO_BATCH, self._micro_batch_tier, before, after))
            before = after
        for name in choice.names:
            after = _choice((*before.names, name), choice.num_images)
            steps.append(self._step(name, get_technique(name).tier, before, after))
            before = after
        return tuple(steps)

    def _step(self, name: str, tier: str, before: "_Choice", after: "_Choice") -> PlanStep:
        settings, there = self._settings(after), self._settings(before)
        one, other = self._job(before), self._job(after)
        return PlanStep(
            name=name,
            tier=tier,
            settings={k: v for k, v in settings.items() if k not in there or there[k] != v},
            what=_what_changes(name) if tier == "recipe" else "",
            gb_before=one.total_bytes(self._limit_bytes) / _GB,
            gb_after=other.total_bytes(self._limit_bytes) / _GB,
            time_factor=other.seconds() / one.seconds(),
        )

    def _settings(self, choice: "_Choice") -> dict[str, Any]:
        settings = {}
        cfg = self._cfg
        for name in choice.names:
            of_technique = get_technique(name).settings(cfg)
            settings.update(of_technique)
            cfg = with_settings(cfg, of_technique)
        if choice.num_images < self._images:
            settings["MEMFIT.MICRO_BATCH"] = choice.num_images
        return settings

    def _safety(self, budget_gb: float) -> dict[str, Any]:
        """What keeps the job in its budget if an image is not as expected."""
        settings: dict[str, Any] = {"MEMFIT.BUDGET_GB": budget_gb}
        if self._num_gpus == 1 or "SyncBN" not in self._cfg.dump():  # recovery cannot have both
            settings["MEMFIT.OOM.POLICY"] = "split"
        return settings

    def _fits(self, choice: "_Choice") -> bool:
        return self._job(choice).fits(self._limit_bytes)

    def _job(self, choice: "_Choice") -> DryJob:
        if choice not in self._jobs:
            cfg = with_settings(self._cfg, self._settings(choice))
            key = tuple(filter(_matters_in_evaluation, choice.names))
            dry_job = self._run_job(
                cfg,
                self._num_gpus,
                self._device,
                self._case or worst_case(cfg, self._num_gpus),
                self._evaluations.get(key),
            )
            if dry_job.evaluation is not None:
                self._evaluations[key] = dry_job.evaluation
            self._progress(f"{dry_job.total_bytes(self._limit_bytes) / _GB:.2f} GB: {choice}")
            self._jobs[choice] = dry_job
        return self._jobs[choice]


class _Choice(NamedTuple):
    names: tuple[str, ...]  # of techniques, in the order of what they harm
    num_images: int  # in a micro-batch

    def __str__(self) -> str:
        return ", ".join([f"{self.num_images} images in a micro-batch", *self.names])


def _choice(names: Iterable[str], num_images: int) -> _Choice:
    return _Choice(tuple(sorted(names, key=harm)), num_images)


def _more(tiers: Sequence[str]) -> list[list[str]]:
    """What else could be allowed, in the order of harm."""
    return [[*TIERS[:i]] for i in range(1, len(TIERS) + 1) if not set(TIERS[:i]) <= set(tiers)]


def _matters_in_evaluation(name: str) -> bool:
    return get_technique(name).tier == "recipe" or name in IN_EVALUATION


def _what_changes(name: str) -> str:
    """As the docstring of a technique of the recipe tier says it."""
    if name == _MICRO_BATCH:
        return _OF_BATCH_NORM
    found = re.search(r"Changes: (.*?)(\n\n|$)", get_technique(name).__doc__ or "", re.DOTALL)
    return " ".join(found[1].split()) if found else ""
