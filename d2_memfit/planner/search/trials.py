# Copyright (c) the d2_memfit developers.
"""The dry runs of a plan: a job with different techniques and micro-batch sizes."""

import math
from collections.abc import Callable, Iterable
from functools import cached_property
from typing import Any, NamedTuple, Optional

import torch
from detectron2.layers import NaiveSyncBatchNorm
from torch import nn

from ...common.units import GB
from ...compat.pytorch import BatchNorm, has_kernels_for_bfloat16
from ...errors import MemfitError
from ...job import Job
from ...memory import available_host_bytes
from ...techniques import TECHNIQUES, TIERS, get_technique
from ..device import DeviceModel
from ..dry_run import Timeline, one_line_errors
from ..estimates import DryJob, steps

__all__ = ["Choice", "Trials", "choice_of", "preference"]

_NO_LIMIT = 2**62

# In each tier, the least costly or harmful comes first; users' techniques come last.
_ORDER = {
    "exact": (
        *("PackedMasks", "ChunkedMatching", "EvaluationOnHost"),
        *("ShardedOptimizerStates", "ChunkedHeads", "ActivationCheckpointing"),
        "ActivationOffload",
    ),
    "precision": ("MixedPrecision", "EightBitOptimizerStates"),
    "recipe": (
        *("PolygonMasks", "DenoisingQueries", "FewerDetections", "SmallerRoiBatch"),
        *("OneImageSize", "MoreFrozenStages", "LowRankAdapters", "SmallerImages"),
        "FrozenModules",
    ),
}


class Choice(NamedTuple):
    """A choice of techniques and micro-batch size.

    Attributes:
        names: names of techniques, in the order of harm.
        num_images: images in a micro-batch.
        modules: for a technique by name, the modules it applies to in place of its own choice.
    """

    names: tuple[str, ...]
    num_images: int
    modules: tuple[tuple[str, tuple[str, ...]], ...] = ()

    def __str__(self) -> str:
        counts = {name: f" of {len(modules)} blocks" for name, modules in self.modules}
        names = [name + counts.get(name, "") for name in self.names]
        return ", ".join([f"{self.num_images} images in a micro-batch", *names])


def choice_of(
    names: Iterable[str],
    num_images: int,
    modules: Iterable[tuple[str, tuple[str, ...]]] = (),
) -> Choice:
    names = tuple(sorted(names, key=preference))
    return Choice(names, num_images, tuple(pair for pair in modules if pair[0] in names))


def preference(name: str) -> tuple[int, int]:
    """Smaller for a technique that should be tried first."""
    tier = get_technique(name).tier
    known = _ORDER[tier]
    return TIERS.index(tier), known.index(name) if name in known else len(known)


class Trials:
    """Makes the dry runs of choices, each once.

    Args:
        job: the job to which choices are applied.
        device: the device to predict for.
        run_job: the class of its dry runs.
        evaluates: whether to include evaluation, or training alone.
        progress: called with a line for each dry run, and for each technique left out.

    Attributes:
        limit_bytes: device memory within which a choice must fit; no limit at first.
        budget_bytes: memory within which the allocator must never have to return its cache. It
            would do so in each iteration, and recovery would then halve the micro-batches.
        left_out: techniques with which the job does not run, and why; a line each.
    """

    def __init__(
        self,
        job: Job,
        device: DeviceModel,
        run_job: Callable[..., DryJob] = DryJob,
        evaluates: bool = True,
        progress: Callable[[str], None] = lambda line: None,
    ) -> None:
        # With some budget, because the allocator differs without one.
        self.job = job.with_settings({"MEMFIT.BUDGET_GB": job.budget_gb or 1.0})
        self.device = device
        self.limit_bytes: int = _NO_LIMIT
        self.budget_bytes: float = math.inf
        self._run_job = run_job
        self._evaluates = evaluates
        self._progress = progress
        self.left_out: list[str] = []
        self._dry_jobs: dict[Choice, DryJob] = {}
        self._failed: set[Choice] = set()
        self._evaluations: dict[tuple[str, ...], Timeline] = {}  # by the relevant techniques
        self._usable: dict[str, bool] = {}  # by name
        with one_line_errors():  # made once, for all choices that differ only in other settings
            _ = self.job.batches.assumptions

    def dry_job(self, choice: Choice) -> DryJob:
        """The dry run of a choice.

        Raises:
            ConfigError: the job does not run with these techniques.
        """
        if choice not in self._dry_jobs:
            key = tuple(filter(_matters_in_evaluation, choice.names))
            dry_job = self._run_job(
                self.job.with_settings(self.settings(choice)),
                self.device,
                self._evaluations.get(key),
                self._evaluates,
            )
            if dry_job.evaluation is not None:
                self._evaluations[key] = dry_job.evaluation
            self._progress(f"{dry_job.total_bytes(self.limit_bytes) / GB:.2f} GB: {choice}")
            self._dry_jobs[choice] = dry_job
        return self._dry_jobs[choice]

    def runs(self, choice: Choice) -> bool:
        """Whether the job runs with this choice. Techniques that prevent it are recorded.

        Raises:
            ConfigError: the job does not run even without techniques.
        """
        if choice in self._failed:
            return False
        try:
            self.dry_job(choice)
        except MemfitError as e:
            if not choice.names:
                raise
            self._failed.add(choice)
            if len(choice.names) == 1 and e.__cause__ is None:  # the technique itself says no
                self._rule_out(choice.names[0], e)
            else:
                self._leave_out(f"{', '.join(choice.names)}: left out, {e}")
            return False
        return True

    def _rule_out(self, name: str, error: MemfitError) -> None:
        self._usable[name] = False
        self._progress(f"{name} is left out: {error}")

    def _leave_out(self, line: str) -> None:
        if line not in self.left_out:
            self.left_out.append(line)
            self._progress(line)

    def helps(self, name: str) -> bool:
        """Whether the job runs with a technique, and differs from the job without it."""
        with_it, without = choice_of((name,), self.few), choice_of((), self.few)
        if not self.is_usable(name) or not self.runs(with_it):
            return False
        return self.dry_job(with_it).trace != self.dry_job(without).trace

    @property
    def num_dry_runs(self) -> int:
        return len(self._dry_jobs) + len(self._failed)

    def tried(self, names: Iterable[str]) -> list[int]:
        """Micro-batch sizes of the dry runs with these techniques."""
        names = choice_of(names, 1).names
        return [choice.num_images for choice in self._dry_jobs if choice.names == names]

    def interpolated_seconds(self, names: Iterable[str], num_images: int) -> Optional[float]:
        """Seconds of an iteration, interpolated from micro-batches of one and of two images.

        None if these were not tried.
        """
        if not {1, 2} <= set(self.tried(names)):
            return None
        one, two = (self.dry_job(choice_of(names, n)).seconds() for n in (1, 2))
        return one + 2 * (two - one) * (1 - 1 / num_images)

    def fits(self, choice: Choice) -> bool:
        if not self.runs(choice):
            return False
        return self.is_within(self.dry_job(choice)) and self.host_holds(choice)

    def is_within(self, dry_job: DryJob) -> bool:
        """Whether a job stays within both limits of the device."""
        return dry_job.fits(self.limit_bytes) and dry_job.total_bytes() <= self.budget_bytes

    def host_holds(self, choice: Choice) -> bool:
        """Whether the host has the RAM for what a choice moves there."""
        dry_job = self.dry_job(choice)
        is_used = dry_job.offloaded_bytes or dry_job.evaluation_host_bytes
        return not is_used or dry_job.host_bytes <= self._host_bytes

    @cached_property
    def _host_bytes(self) -> float:
        """RAM for a rank: MEMFIT.HOST.BUDGET_GB, or what this machine has if it has the GPU."""
        budget_gb = self.job.cfg.MEMFIT.HOST.BUDGET_GB
        if budget_gb is not None:
            return budget_gb * GB / self.job.ranks
        return available_host_bytes() / self.job.ranks if torch.cuda.is_available() else math.inf

    def settings(self, choice: Choice) -> dict[str, Any]:
        """The config keys of a choice and their values."""
        settings = {}
        job, modules = self.job, dict(choice.modules)
        for name in choice.names:
            of_technique = get_technique(name).enabling_settings(job.cfg)
            if name in modules:
                of_technique = {key: list(modules[name]) for key in of_technique}
            settings.update(of_technique)
            job = job.with_settings(of_technique)
        if choice.num_images < self.job.geometry.largest_micro_batch:
            settings["MEMFIT.MICRO_BATCH"] = choice.num_images
        return settings

    def names(self, tier: str) -> tuple[str, ...]:
        """Techniques of a tier that a dry run can try, in the order of harm."""
        names = [n for n, t in TECHNIQUES if t.tier == tier and t.in_plans]
        return tuple(sorted(names, key=preference))

    @property
    def micro_batch_tier(self) -> str:
        """Tier of smaller micro-batches: they change the statistics of trained BatchNorm."""
        trains = any(isinstance(m, BatchNorm) and m.training for m in self._model.modules())
        return "recipe" if trains else "exact"

    @cached_property
    def few(self) -> int:
        """Images with which techniques are compared: the fewest that an exact plan may use."""
        return 1 if self.micro_batch_tier == "exact" else self.job.geometry.largest_micro_batch

    @property
    def synchronizes(self) -> bool:
        """Whether the model has layers that communicate with other ranks."""
        kinds = (nn.SyncBatchNorm, NaiveSyncBatchNorm)
        return any(isinstance(m, kinds) for m in self._model.modules())

    @cached_property
    def _model(self) -> nn.Module:
        with one_line_errors():
            return steps.build(self.job)[0]

    def usable(self, names: Iterable[str]) -> list[str]:
        """The techniques among these with which the model can be built."""
        likely = [name for name in names if self.is_usable(name)]
        if self._builds(likely):
            return likely
        return [name for name in likely if self._builds([name])]

    def _builds(self, names: list[str]) -> bool:
        choice = choice_of(names, 1)
        try:
            if choice not in self._dry_jobs:
                with one_line_errors():
                    steps.build(self.job.with_settings(self.settings(choice)))
        except MemfitError as e:
            if len(names) == 1:
                self._rule_out(names[0], e)
            return False
        return True

    def is_usable(self, name: str) -> bool:
        """Whether a technique can be turned on here, according to its settings."""
        if name not in self._usable:
            self._usable[name] = self._can_turn_on(name)
        return self._usable[name]

    def _can_turn_on(self, name: str) -> bool:
        technique = get_technique(name)
        if technique.gpu_only and not self.device.is_gpu:
            return False
        if technique.min_ranks > self.job.ranks:
            return False
        if technique.uses_float16 and self.device.float16_fails:
            card = self.device.description
            self._leave_out(f"{name}: left out, float16 is known to fail on {card}")
            return False
        if technique.uses_float16 and not (self.device.is_gpu or has_kernels_for_bfloat16()):
            self._leave_out(f"{name}: left out, PyTorch has no fast 16 bits on this CPU")
            return False
        try:
            with one_line_errors():
                settings = technique.enabling_settings(self.job.cfg)
                return self.job.with_settings(settings).cfg != self.job.cfg
        except MemfitError as e:
            self._rule_out(name, e)
            return False


def _matters_in_evaluation(name: str) -> bool:
    technique = get_technique(name)
    return technique.tier == "recipe" or technique.in_evaluation
