# Copyright (c) the d2_memfit developers.
"""One way to make a trainer: what the run of a job needs, whoever makes its parts."""

import logging
import os
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Optional

import torch
from detectron2.config import CfgNode
from detectron2.engine import HookBase, TrainerBase
from detectron2.utils import comm
from detectron2.utils.events import get_event_storage
from fvcore.common.checkpoint import Checkpointer
from torch import nn

from .. import compat
from ..common.checks import value_of
from ..common.files import is_config_dump, is_local, whole_file
from ..config import default_keys, without_memfit_keys
from ..errors import CheckpointError, ConfigError, RankError, one_line
from ..job import Job, checked_loader
from ..job.parts import GivenParts, TrainerParts
from ..memory import enforce_budget, use_expandable_segments
from ..techniques import apply_techniques, techniques_on
from .checkpoint import MemfitCheckpointer, checkpointers_of
from .ending import SaveOnEnding
from .hooks import EnforceBudget, LeakDetector, MemoryMonitor, MemorySnapshot
from .not_finite import has_random_weights_behind_frozen_norms
from .peak_recorder import PeakRecorder
from .run_state import GatherStates
from .train_loop import AccumulatingTrainer

__all__ = ["Run", "build_trainer", "job_hooks"]

logger = logging.getLogger(__name__)

_OF_RUN_STEP = (
    "SOLVER.ACCUMULATION_STEPS",
    "MEMFIT.MICRO_BATCH",
    "MEMFIT.OOM.POLICY",
    "MEMFIT.AMP_DTYPE",
    "MEMFIT.MONITOR.SNAPSHOT_ON_OOM",
)


class Run:
    """The run of a job: budget, techniques, hooks, checkpointers, endings, and checks over ranks.

    All ways to make a trainer go through it, in this order: it is made, it wraps the functions that
    build the parts (:meth:`building`), it completes the trainer (:meth:`complete`), and it begins
    with ``train()`` (:meth:`start`) or with the first step of a loop without it
    (:meth:`check_loop`).

    Args:
        job: its budget is set here.

    Attributes:
        cfg: the job's config with the techniques of the part "config".
        options: keyword arguments of :class:`AccumulatingTrainer` that the job's keys ask for.
        not_built: the parts, as ``Technique.part``, whose techniques are not applied yet.
        has_started: whether hooks were told of the start, or a loop without them was checked.

    Raises:
        ConfigError: the job asks for a plan, and was not planned.
    """

    def __init__(self, job: Job) -> None:
        if job.cfg.MEMFIT.PLAN.ENABLED:
            raise ConfigError(
                "MEMFIT.PLAN.ENABLED True: a trainer does not plan. Call d2_memfit.fit_config "
                "before, as in Trainer(fit_config(cfg, Trainer)), or set it False"
            )
        if job.budget_gb is not None:
            use_expandable_segments()
        enforce_budget(job.budget_gb, job.cfg.MODEL.DEVICE)
        self.job = job
        self.cfg = apply_techniques("config", job.cfg, job.cfg)
        self.options: dict[str, Any] = {
            "accumulation_steps": job.geometry.accumulation_steps,
            "precision": job.precision(),
            "micro_batch_size": job.geometry.micro_batch_size,
            "recovery": job.recovery,
            "normalizers": job.normalizers,
        }
        self.not_built = {"model", "optimizer", "loader"}
        self.has_started = False

    def building(self, part: str, build: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a function that builds a part, so that the part's techniques are applied."""

        def build_part(*args: Any, **kwargs: Any) -> Any:
            if part == "loader":
                return self.with_techniques(part, checked_loader(build, self.cfg))(*args, **kwargs)
            return self.with_techniques(part, build(*args, **kwargs))

        return build_part

    def with_techniques(self, part: str, made: Any) -> Any:
        """Apply the techniques of a part to it; return the part to use."""
        self.not_built.discard(part)
        return apply_techniques(part, made, self.cfg)

    def complete(self, trainer: TrainerBase, why_not: str) -> None:
        """Check that all techniques are applied, and add the job's hooks before the trainer's.

        Args:
            why_not: why a technique would not be applied, and what to do.

        Raises:
            ConfigError: a technique is on and would do nothing.
        """
        job = self.job
        for part in sorted(self.not_built):
            for name in techniques_on(part, job.cfg):
                raise ConfigError(f"technique {name} is on and would do nothing: {why_not}")
        self._hooks = job_hooks(job)
        self._register_hooks(trainer)
        self._project_trainer = (
            "" if type(trainer) is AccumulatingTrainer else type(trainer).__name__
        )
        logger.info(
            "Effective batch: SOLVER.IMS_PER_BATCH %d x SOLVER.ACCUMULATION_STEPS %d, on %d ranks",
            job.cfg.SOLVER.IMS_PER_BATCH,
            job.cfg.SOLVER.ACCUMULATION_STEPS,
            job.ranks,
        )

    def _register_hooks(self, trainer: TrainerBase) -> None:
        """Register the job's hooks that the trainer does not have, before all others."""
        hooks = compat.hooks_of(trainer)
        num_others = len(hooks)
        trainer.register_hooks([hook for hook in self._hooks if hook not in hooks])
        hooks[:] = hooks[num_others:] + hooks[:num_others]

    def start(self, trainer: Any) -> None:
        """Start ``train()`` on all ranks, or on none. The weights are loaded.

        Raises:
            CheckpointError: the ranks would go on from different iterations.
            RankError: another rank cannot start.
        """
        _check_same_iteration(trainer.start_iter, self.cfg.OUTPUT_DIR)
        error: Optional[Exception] = None
        try:
            self._start(trainer)
        except Exception as e:
            error = e
        texts = comm.all_gather(error and one_line(error))
        if error is not None:
            raise error
        self.has_started = not any(texts)
        for rank, text in enumerate(texts):
            if text is not None:
                raise RankError(f"rank {rank} cannot start the run: {text}")

    def check_loop(self) -> None:
        """Check a loop of ``run_step()``, which calls no hooks, such as a project's ``train``.

        Raises:
            ConfigError: a key would do nothing in it.
            CheckpointError: as in :meth:`start`.
        """
        if self.has_started:
            return
        self.has_started = True
        defaults = default_keys()
        if self.job.cfg.MEMFIT.MONITOR != defaults.MEMFIT.MONITOR:
            raise ConfigError(
                "MEMFIT.MONITOR is on, and a loop of run_step() calls no hooks: train with "
                "trainer.train(start_iter, max_iter), or leave its keys at their defaults"
            )
        if self._project_trainer and comm.is_main_process():
            logger.warning(
                "%s runs a step before its before_train() was called, so no hook runs: nothing is "
                "saved when a signal or an error ends the run. Call before_train(), before_step(), "
                "after_step() and after_train(), as detectron2.engine.TrainerBase.train does",
                self._project_trainer,
            )
        _check_same_iteration(get_event_storage().iter, self.cfg.OUTPUT_DIR)

    def _start(self, trainer: Any) -> None:
        self._register_hooks(trainer)  # a project may have replaced the list since
        own = next(iter(checkpointers_of(trainer, Checkpointer)), None)
        hooks = compat.hooks_of(trainer)
        for checkpointer in checkpointers_of(trainer, MemfitCheckpointer):
            checkpointer.start_run(is_new=checkpointer is own and trainer.start_iter == 0)
        if not any(isinstance(hook, SaveOnEnding) for hook in hooks):
            trainer.register_hooks([SaveOnEnding(own, self.cfg.MEMFIT.STOP_ON_SIGNALS)])
        hooks.sort(key=lambda hook: isinstance(hook, SaveOnEnding))  # after everything
        if isinstance(self.job.parts, TrainerParts):
            _write_plain_config(self.job.cfg)
        loads_nothing = not self.cfg.MODEL.WEIGHTS and not isinstance(self.job.parts, GivenParts)
        model = compat.inner_trainer(trainer).model
        if loads_nothing and has_random_weights_behind_frozen_norms(model):
            logger.warning(
                "MODEL.WEIGHTS is empty, and frozen batch norm does not normalise the activations "
                "of random weights, so training is likely to diverge. Name weights, or set "
                "MODEL.RESNETS.NORM GN (BN for a light backbone) and MODEL.BACKBONE.FREEZE_AT 0"
            )

    def check_run_step(self, trainer: type, inner: type[AccumulatingTrainer]) -> None:
        """Raise :class:`ConfigError` if a key is set that only our ``run_step`` reads.

        Args:
            trainer, inner: the classes of a trainer and of its ``_trainer``. The ``run_step`` of
                one, or ``train``, does not call that of ``AccumulatingTrainer``.
        """
        defaults = default_keys()
        values = {key: value_of(self.job.cfg, key) for key in _OF_RUN_STEP}
        asked = [f"{key} {v}" for key, v in values.items() if v != value_of(defaults, key)]
        if asked:
            is_inner = inner.run_step is not AccumulatingTrainer.run_step
            cls, step = (inner, "super()") if is_inner else (trainer, "self._trainer")
            raise ConfigError(
                f"{', '.join(asked)}: {cls.__name__} steps without {step}.run_step(), which reads "
                "these keys. Call it in its run_step, and run_step in its train. For losses of "
                "your own: self._trainer.loss_fn = FUNCTION"
            )


def job_hooks(job: Job) -> list[HookBase]:
    """The hooks of MEMFIT.MONITOR, BUDGET_GB and OOM, and those that each job has.

    Register them on all ranks, before the hooks that write and save.
    """
    monitor, device = job.cfg.MEMFIT.MONITOR, job.cfg.MODEL.DEVICE
    made: list[HookBase] = [GatherStates()]
    if monitor.SNAPSHOT_ON_OOM:
        rank = "" if comm.is_main_process() else f"/rank{comm.get_rank()}"
        made.append(MemorySnapshot(job.cfg.OUTPUT_DIR + rank))
    if monitor.PERIOD is not None:
        made.append(MemoryMonitor(monitor.PERIOD, job.budget_gb))
    if monitor.LEAK_WINDOW is not None:
        made.append(LeakDetector(monitor.LEAK_WINDOW))
    if job.budget_gb is not None and device.startswith("cuda"):
        made.append(EnforceBudget(job.budget_gb, device))
    if comm.is_main_process():
        made.append(PeakRecorder(job))
    return made


def _check_same_iteration(first: int, output_dir: str) -> None:
    firsts = comm.all_gather(first)  # all ranks have read their weights
    if len(set(firsts)) > 1:
        raise CheckpointError(
            f"the ranks would go on from different iterations, {firsts}: OUTPUT_DIR {output_dir} "
            "must be one folder that all of them see"
        )


def _write_plain_config(cfg: CfgNode) -> None:
    """Write OUTPUT_DIR/detectron2_config.yaml, with which plain Detectron2 uses the result."""
    if not (comm.is_main_process() and cfg.OUTPUT_DIR and is_local(cfg.OUTPUT_DIR)):
        return
    plain = without_memfit_keys(cfg)
    plain.MODEL.WEIGHTS = os.path.join(cfg.OUTPUT_DIR, "model_final.pth")
    path = os.path.join(cfg.OUTPUT_DIR, "detectron2_config.yaml")
    with suppress(OSError):  # a full disk is the checkpointer's to report
        os.makedirs(cfg.OUTPUT_DIR, exist_ok=True)
        if os.path.exists(path) and not is_config_dump(path):
            logger.warning("%s was not written by a training, and stays as it is", path)
            return
        with whole_file(path, "w") as file:
            file.write(plain.dump())


def build_trainer(
    job: Job,
    model: Optional[nn.Module] = None,
    data_loader: Optional[Any] = None,
    optimizer: Optional[torch.optim.Optimizer] = None,
    **kwargs: Any,
) -> AccumulatingTrainer:
    """Build a trainer with the job's accumulation, precision, recovery, techniques and budget.

    Args:
        model: on the job's device; None builds the job's. DDP around it is replaced.
        data_loader: of this rank; None builds the job's.
        optimizer: optimizer of the model's parameters; None builds the job's.
        kwargs: other arguments of :class:`AccumulatingTrainer`, such as
            ``gather_metric_period``.

    Raises:
        ConfigError: a technique or recovery cannot work with the model or optimizer, or a key would
            do nothing.
    """
    run, cfg = Run(job), job.cfg
    model = job.parts.build_model(cfg.MODEL.DEVICE) if model is None else compat.without_ddp(model)
    model = run.with_techniques("model", model)
    optimizer = job.parts.build_optimizer(model) if optimizer is None else optimizer
    optimizer = run.with_techniques("optimizer", optimizer)
    if data_loader is None:
        data_loader = job.build_train_loader(run.cfg)
        run.not_built.discard("loader")
    else:
        run.not_built.add("config")
    options = {"loss_fn": job.parts.loss_fn, "clip_gradients": job.parts.clip_gradients()}
    trainer = AccumulatingTrainer(
        compat.create_ddp_model(model, **job.parts.ddp_options()),
        data_loader,
        optimizer,
        **{**run.options, **options, **kwargs},
    )
    why_not = "build_trainer got a data_loader. Leave that out, or turn the technique off"
    run.complete(trainer, why_not)
    trainer.run = run
    return trainer
