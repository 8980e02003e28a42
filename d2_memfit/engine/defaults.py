# Copyright (c) the d2_memfit developers.
"""Detectron2's default trainer with accumulation, as one more base class."""

import logging
import os
from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from typing import TYPE_CHECKING, Any, Optional

from detectron2.config import CfgNode
from detectron2.engine import DefaultTrainer, HookBase, TrainerBase
from detectron2.solver import LRMultiplier
from detectron2.utils import comm
from fvcore.common.checkpoint import Checkpointer
from torch import nn

from .. import compat
from ..common.files import is_config_dump, is_local, whole_file
from ..common.logs import start_logging
from ..config import with_memfit_keys, without_memfit_keys
from ..errors import CheckpointError, RankError, one_line
from ..job import Job, checked_loader
from ..memory import enforce_budget, use_expandable_segments
from ..settings import auto_scale_workers
from ..techniques import apply_techniques
from .build import check_applied, check_run_step, trainer_options
from .evaluating import evaluating
from .hooks import BestCheckpoint, explains_hooks, job_hooks
from .project_parts import project_parts
from .resuming import MemfitCheckpointer, Progress, SaveOnEnding, call_after_train, saved_at_end
from .train_loop import AccumulatingTrainer

__all__ = ["MemfitMixin", "MemfitTrainer"]

logger = logging.getLogger(__name__)


if TYPE_CHECKING:  # the mixin alone is not a trainer, and stands before one
    from detectron2.engine import DefaultTrainer as _Trainer
else:
    _Trainer = object


def _of_a_job(init: Callable[..., None]) -> Callable[..., None]:
    """Make a trainer's ``__init__`` build its parts as a job's; the outermost one decides."""

    @wraps(init)
    def __init__(self: "MemfitMixin", cfg: CfgNode, *args: Any, **kwargs: Any) -> None:
        if "_job" in vars(self):
            init(self, cfg, *args, **kwargs)
            return
        cfg = self._begin(cfg)
        ddp_options = apply_techniques("ddp", {}, cfg)
        with project_parts(self, trainer_options(self._job), ddp_options) as made:
            self._trainers, self._checkpointers = made
            init(self, cfg, *args, **kwargs)
        self._complete(ddp_options)

    return __init__


def _evaluating(test: Callable[..., Any]) -> Any:
    """Make a class method ``test`` of a function that evaluates under the keys of the config."""

    @wraps(test)
    def method(cls: Any, cfg: CfgNode, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with evaluating(cfg, model) as complete:
            return test(cls, complete, model, *args, **kwargs)

    return classmethod(method)


def _saved_at_end(train: Callable[..., Any]) -> Callable[..., Any]:
    """Make a ``train`` that saves, whatever ends it."""

    @wraps(train)
    def method(self: "MemfitMixin", *args: Any, **kwargs: Any) -> Any:
        try:
            with saved_at_end(self):
                return train(self, *args, **kwargs)
        finally:
            for checkpointer in self._checkpointers:
                checkpointer.end_run()

    return method


@explains_hooks
class MemfitMixin(_Trainer):
    """Base class for projects with their own trainer: ``class Trainer(MemfitMixin, TheirTrainer)``.

    All ``build_*`` methods, hooks and the checkpointer stay the project's. The trainer that runs
    the steps becomes an :class:`AccumulatingTrainer`, whoever makes it. Checkpoints contain
    optimizer, gradient scaler, learning rate, random states and the order of the data. Checkpoints
    of plain Detectron2, v0.6 or main, can be resumed; missing parts are logged.

    A config without the keys of d2_memfit gets their defaults.

    Raises:
        ConfigError: a value in the config cannot work, or a key would do nothing.
        TypeError: this is not the first base class. Or the project's ``__init__`` does not take the
            config first, or makes no ``SimpleTrainer``.
    """

    _has_begun = False
    _hooks: list[HookBase]
    _job: Job
    _not_built: set[str]
    _trainers: list[AccumulatingTrainer]
    _checkpointers: list[MemfitCheckpointer]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        order = cls.__mro__
        if DefaultTrainer in order and order.index(DefaultTrainer) < order.index(MemfitMixin):
            raise TypeError(f"MemfitMixin must be the first base class of {cls.__name__}")

        def inherited(name: str) -> Callable[..., Any]:
            return lambda self, *args, **kwargs: getattr(super(cls, self), name)(*args, **kwargs)

        # A project's own may go past that of a base class: super(DefaultTrainer, self).__init__().
        init = vars(cls).get("__init__", inherited("__init__"))
        cls.__init__ = _of_a_job(init)  # type: ignore[method-assign]
        cls.train = _saved_at_end(vars(cls).get("train", inherited("train")))
        test = vars(cls).get("test", classmethod(inherited("test")))
        if isinstance(test, classmethod):
            cls.test = _evaluating(test.__func__)

    def _begin(self, cfg: CfgNode) -> CfgNode:
        """Make the job; return the config for the project's ``__init__``."""
        if not isinstance(cfg, CfgNode):
            raise TypeError(
                f"the first argument of {type(self).__name__} must be the config, as in "
                f"DefaultTrainer, got a {type(cfg).__name__}"
            )
        start_logging(cfg.OUTPUT_DIR)
        cfg = with_memfit_keys(cfg)
        if cfg.MEMFIT.BUDGET_GB is not None or cfg.MEMFIT.PRESET:
            use_expandable_segments()  # before "auto" asks the GPU
        self._job = Job.from_trainer(type(self), cfg)
        cfg = apply_techniques("config", self._job.cfg, self._job.cfg)
        enforce_budget(self._job.budget_gb, cfg.MODEL.DEVICE)
        self._not_built = {"model", "optimizer", "loader"}
        self.__dict__.update(
            build_model=self._building("model", self.build_model, cfg),
            build_optimizer=self._building("optimizer", self.build_optimizer, cfg),
            build_train_loader=self._building(
                "loader", checked_loader(self.build_train_loader, cfg), cfg
            ),
        )
        return cfg

    def _building(self, part: str, build: Callable[..., Any], cfg: CfgNode) -> Callable[..., Any]:
        """A ``build_*`` method with techniques, whichever class defines it."""

        def build_part(*args: Any, **kwargs: Any) -> Any:
            self._not_built.discard(part)
            if part == "loader":
                return apply_techniques(part, build, cfg)(*args, **kwargs)
            return apply_techniques(part, build(*args, **kwargs), cfg)

        return build_part

    def _complete(self, ddp_options: dict[str, Any]) -> None:
        """Check what the project's ``__init__`` made, and add hooks."""
        self._check_inner()
        cfg = self._job.cfg
        model = self._inner.model
        if any(getattr(model, name, value) != value for name, value in ddp_options.items()):
            self._not_built.add("ddp")
        check_applied(
            self._job,
            self._not_built,
            f"{type(self).__name__}.__init__ makes that part by itself. Call there "
            "self.build_model(cfg), self.build_optimizer(cfg, model), self.build_train_loader(cfg) "
            "and detectron2.engine.create_ddp_model(model)",
        )
        others = self._hooks
        self._hooks = []
        self.register_hooks(job_hooks(self._job))  # before the project's, which write and save
        self._hooks += others
        if cfg.MEMFIT.BEST.METRIC:  # after those that evaluate
            self.register_hooks([BestCheckpoint(self._job, self.checkpointer)])
        logger.info(
            "Effective batch: SOLVER.IMS_PER_BATCH %d x SOLVER.ACCUMULATION_STEPS %d, on %d ranks",
            cfg.SOLVER.IMS_PER_BATCH,
            cfg.SOLVER.ACCUMULATION_STEPS,
            comm.get_world_size(),
        )

    def _check_inner(self) -> None:
        if not any(self._inner is trainer for trainer in self._trainers):
            name = type(self).__name__
            inner = type(self._inner).__name__
            raise TypeError(
                f"{name} runs its steps by a {inner} that its __init__ does not make from a "
                "SimpleTrainer. Write there: self._trainer = SimpleTrainer(model, data_loader, "
                "optimizer). For losses of your own: self._trainer.loss_fn = FUNCTION"
            )

    @property
    def _inner(self) -> Any:
        """The trainer that runs the steps: ``self`` if the project's trainer is a SimpleTrainer."""
        return compat.inner_trainer(self)

    def before_train(self) -> None:
        self._has_begun = False
        self._check_inner()
        starts = comm.all_gather(self.start_iter)  # all ranks have read their weights
        if len(set(starts)) > 1:
            raise CheckpointError(
                f"the ranks would go on from different iterations, {starts}: OUTPUT_DIR "
                f"{self._job.cfg.OUTPUT_DIR} must be one folder that all of them see"
            )
        own = getattr(self, "checkpointer", None)
        self._begin_checkpoints(own)
        if not any(isinstance(hook, SaveOnEnding) for hook in self._hooks):  # the last one
            own = own if isinstance(own, Checkpointer) else None
            self.register_hooks([SaveOnEnding(own, self._job.cfg.MEMFIT.STOP_ON_SIGNALS)])
        _write_plain_config(self._job.cfg)
        super().before_train()
        self._inner.run_state.restore_again(self.start_iter)
        self._has_begun = True

    def _begin_checkpoints(self, own: Any) -> None:
        """Begin the run of all checkpointers, on all ranks or on none."""
        error: Optional[Exception] = None
        try:
            for checkpointer in self._checkpointers:
                checkpointer.begin_run(is_new=checkpointer is own and self.start_iter == 0)
        except Exception as e:
            error = e
        texts = comm.all_gather(error and one_line(error))
        if error is not None:
            raise error
        for rank, text in enumerate(texts):
            if text is not None:
                raise RankError(f"rank {rank} cannot begin the run: {text}")

    def before_step(self) -> None:
        self._inner.agreed_stop_signal = None
        super().before_step()

    def after_step(self) -> None:
        if self._inner.agreed_stop_signal is None:  # a run_step of the project's own
            check_run_step(self._job, type(self), type(self._inner))
            self._inner.progress = Progress(self.iter, has_stepped=True)
        super().after_step()

    def after_train(self) -> None:
        if self._has_begun:  # or else some hooks have not
            call_after_train(self, super().after_train)

    auto_scale_workers = staticmethod(auto_scale_workers)

    def gather_states(self) -> None:
        """Collect on rank 0 the states of all ranks for a checkpoint. All ranks must call it."""
        if self._inner is self:
            super().gather_states()
        else:
            self._trainer.gather_states()

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        if not compat.SAVES_INNER_TRAINER and self._inner is not self:
            state["_trainer"] = self._trainer.state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self._inner is self:  # its state has the optimizer
            super().load_state_dict(state_dict)
            return
        if "_trainer" in state_dict:
            super().load_state_dict(state_dict)
            if not compat.SAVES_INNER_TRAINER:
                self._trainer.load_state_dict(state_dict["_trainer"])
            return
        logger.warning(
            "The checkpoint has no optimizer state (Detectron2 v0.6 saves none). Iteration and "
            "learning rate are resumed, momentum starts at zero"
        )
        TrainerBase.load_state_dict(self, state_dict)
        self._trainer.run_state.load_state_dict(None)
        if isinstance(self.scheduler, LRMultiplier):
            # It is in the optimizer's state. The scheduler sets it only when it steps.
            for group, lr in zip(self.optimizer.param_groups, self.scheduler.get_lr()):
                group["lr"] = lr


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


class MemfitTrainer(MemfitMixin, DefaultTrainer):
    """A ``DefaultTrainer`` with accumulation, recovery and techniques."""
