# Copyright (c) the d2_memfit developers.
"""One way to make a trainer: what the run of a job needs, whoever makes its parts."""

import logging
import os
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Optional

import torch
from detectron2.config import CfgNode
from detectron2.engine import HookBase
from detectron2.utils import comm
from fvcore.common.checkpoint import Checkpointer
from torch import nn

from ..common import compat
from ..common.checks import value_of
from ..common.errors import CheckpointError, ConfigError, RankError, one_line
from ..common.files import is_config_dump, is_local, whole_file
from ..config.keys import all_keys
from ..config.load import with_settings
from ..config.settings import NormalizerOptions, RecoveryOptions
from ..job import Job, TrainerParts, checked_loader
from ..memory import enforce_budget
from ..techniques.registry import apply_techniques, techniques_on
from .checkpoint import MemfitCheckpointer, checkpointers_of
from .ending import SaveOnEnding
from .hooks import EnforceBudget, LeakDetector, MemoryMonitor, MemorySnapshot, PeakRecorder
from .run_state import GatherStates
from .train_loop import AccumulatingTrainer

logger = logging.getLogger(__name__)


class Run:
    """The run of a job: budget, techniques, hooks, checkpointers, endings, and checks over ranks.

    All ways to make a trainer go through it, in this order: it is made, it wraps the functions that
    build the parts (:meth:`building`), it completes the trainer (:meth:`complete`), and it begins
    with ``train()`` (:meth:`start`).

    Args:
        job: its budget is set here.

    Attributes:
        cfg: the job's config with the techniques of the part "config".
        options: keyword arguments of :class:`AccumulatingTrainer` that the job's keys ask for.
        not_built: the parts, as ``Technique.part``, whose techniques are not applied yet.
        has_started: whether hooks were told of the start.

    Raises:
        ConfigError: the job asks for a plan, and was not planned.
    """

    def __init__(self, job: Job) -> None:
        if job.cfg.MEMFIT.PLAN.ENABLED:
            how = "Write Trainer(fit_config(cfg, Trainer)), or set it False"
            raise ConfigError(f"MEMFIT.PLAN.ENABLED True: a trainer does not plan. {how}")
        enforce_budget(job.budget_gb, job.cfg.MODEL.DEVICE)
        self.job = job
        self.cfg = apply_techniques("config", job.cfg, job.cfg)
        self.options: dict[str, Any] = {
            "accumulation_steps": job.cfg.SOLVER.ACCUMULATION_STEPS,
            "precision": job.precision(),
            "micro_batch_size": job.cfg.MEMFIT.MICRO_BATCH,
            "recovery": RecoveryOptions.from_cfg(job.cfg),
            "normalizers": NormalizerOptions.from_cfg(job.cfg),
        }
        self.not_built = {"model", "optimizer", "loader"}
        self.random_state = torch.get_rng_state()  # before a trainer first iterates over its loader
        self.has_started = False

    def building(self, part: str, build: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a function that builds a part, so that the part's techniques are applied."""

        def build_part(*args: Any, **kwargs: Any) -> Any:
            if part == "loader":
                made = self.with_techniques(part, checked_loader(build, self.cfg))(*args, **kwargs)
            else:
                made = self.with_techniques(part, build(*args, **kwargs))
            self.random_state = torch.get_rng_state()
            return made

        return build_part

    def undo_first_draw(self) -> None:
        """Undo what the constructor of v0.6 draws for the workers that it starts, if no more was
        drawn since a part was built. The trainer with the options of the config draws it again.
        """
        now = torch.get_rng_state()
        torch.set_rng_state(self.random_state)
        torch.empty((), dtype=torch.int64).random_()
        is_all = torch.equal(torch.get_rng_state(), now)
        torch.set_rng_state(self.random_state if is_all else now)

    def with_techniques(self, part: str, made: Any) -> Any:
        """Apply the techniques of a part to it; return the part to use."""
        self.not_built.discard(part)
        return apply_techniques(part, made, self.cfg)

    def complete(self, why_not: str) -> None:
        """Check that all techniques are applied, and make the job's hooks.

        Args:
            why_not: why a technique would not be applied, and what to do.

        Raises:
            ConfigError: a technique is on and would do nothing.
        """
        job = self.job
        for part in sorted(self.not_built):
            for technique in techniques_on(part, job.cfg):
                raise ConfigError(f"technique {technique.name} would do nothing: {why_not}")
        self._hooks = job_hooks(job)
        images, steps = job.cfg.SOLVER.IMS_PER_BATCH, job.cfg.SOLVER.ACCUMULATION_STEPS
        text = "Effective batch: SOLVER.IMS_PER_BATCH %d x SOLVER.ACCUMULATION_STEPS %d, %d ranks"
        logger.info(text, images, steps, job.ranks)

    def start(self, trainer: Any) -> None:
        """Start ``train()`` on all ranks, or on none. The weights are loaded.

        Raises:
            CheckpointError: the ranks would go on from different iterations.
            RankError: another rank cannot start.
        """
        firsts = comm.all_gather(trainer.start_iter)
        if len(set(firsts)) > 1:
            text = f"the ranks would go on from different iterations, {firsts}: OUTPUT_DIR"
            raise CheckpointError(f"{text} {self.cfg.OUTPUT_DIR} must be a folder that all see")
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

    def _start(self, trainer: Any) -> None:
        own = next(iter(checkpointers_of(trainer, Checkpointer)), None)
        hooks = compat.hooks_of(trainer)
        num_others = len(hooks)
        trainer.register_hooks([hook for hook in self._hooks if hook not in hooks])
        hooks[:] = hooks[num_others:] + hooks[:num_others]  # the job's come first
        for checkpointer in checkpointers_of(trainer, MemfitCheckpointer):
            checkpointer.start_run(is_new=checkpointer is own and trainer.start_iter == 0)
        if not any(isinstance(hook, SaveOnEnding) for hook in hooks):
            trainer.register_hooks([SaveOnEnding(own)])
        hooks.sort(key=lambda hook: isinstance(hook, SaveOnEnding))  # after everything
        if isinstance(self.job.parts, TrainerParts):
            _write_plain_config(self.job.cfg)

    def check_run_step(self, trainer: type, inner: type[AccumulatingTrainer]) -> None:
        """Raise :class:`ConfigError` if a key is set that only our ``run_step`` reads.

        Args:
            trainer, inner: the classes of a trainer and of its ``_trainer``. The ``run_step`` of
                one, or ``train``, does not call that of ``AccumulatingTrainer``.
        """
        names = ("SOLVER.ACCUMULATION_STEPS", "MEMFIT.MICRO_BATCH", "MEMFIT.OOM.POLICY")
        keys = [(key, value_of(self.job.cfg, key.name)) for key in all_keys() if key.name in names]
        asked = [f"{key.name} {value}" for key, value in keys if value != key.default]
        if asked:
            is_inner = inner.run_step is not AccumulatingTrainer.run_step
            cls, step = (inner, "super()") if is_inner else (trainer, "self._trainer")
            text = f"{', '.join(asked)}: {cls.__name__} steps without {step}.run_step(), which"
            how = "For losses of your own: self._trainer.loss_fn = FUNCTION"
            raise ConfigError(f"{text} reads these keys. Call it. {how}")


def job_hooks(job: Job) -> list[HookBase]:
    """The hooks of MEMFIT.MONITOR, BUDGET_GB and OOM, and those that each job has.

    Register them on all ranks, before the hooks that write and save.
    """
    monitor, device = job.cfg.MEMFIT.MONITOR, job.cfg.MODEL.DEVICE
    made: list[HookBase] = [GatherStates()]
    if monitor.SNAPSHOT:
        rank = "" if comm.is_main_process() else f"/rank{comm.get_rank()}"
        made.append(MemorySnapshot(job.cfg.OUTPUT_DIR + rank))
    if monitor.PERIOD is not None:
        made.append(MemoryMonitor(monitor.PERIOD, job.budget_gb))
    if monitor.LEAKS is not None:
        made.append(LeakDetector(monitor.LEAKS))
    if job.budget_gb is not None and device.startswith("cuda"):
        made.append(EnforceBudget(job.budget_gb, device))
    if comm.is_main_process():
        made.append(PeakRecorder(job))
    return made


def _write_plain_config(cfg: CfgNode) -> None:
    """Write OUTPUT_DIR/detectron2_config.yaml, with which plain Detectron2 uses the result."""
    path = os.path.join(cfg.OUTPUT_DIR, "detectron2_config.yaml")
    if not (comm.is_main_process() and cfg.OUTPUT_DIR and is_local(path)):
        return
    if os.path.exists(path) and not is_config_dump(path):
        logger.warning("%s was not written by a training, and stays as it is", path)
        return
    weights = os.path.join(cfg.OUTPUT_DIR, "model_final.pth")
    plain = with_settings(cfg, {"MODEL.WEIGHTS": weights})
    del plain["MEMFIT"], plain.SOLVER["ACCUMULATION_STEPS"]
    with suppress(OSError), whole_file(path, "w") as file:  # a full disk: the checkpointer says so
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
        workers = {"DATALOADER.NUM_WORKERS": run.cfg.DATALOADER.NUM_WORKERS}
        is_same = run.cfg.DATALOADER.NUM_WORKERS == cfg.DATALOADER.NUM_WORKERS
        parts = job.parts.with_cfg(run.cfg, {} if is_same else workers)
        data_loader = run.building("loader", parts.build_train_loader)()
    else:
        run.not_built.add("config")
    own = {"loss_fn": job.parts.loss_fn, "clip_gradients": job.parts.clip_gradients()}
    model = compat.create_ddp_model(model, **job.parts.ddp_options())
    trainer = AccumulatingTrainer(model, data_loader, optimizer, **{**run.options, **own, **kwargs})
    run.complete("build_trainer got a data_loader. Leave that out, or turn the technique off")
    trainer.run = run
    return trainer
