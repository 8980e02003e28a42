# Copyright (c) the d2_memfit developers.
"""Detectron2's default trainer with accumulation, as one more base class."""

import logging
import weakref
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import TYPE_CHECKING, Any, Optional

import torch
from detectron2.checkpoint import DetectionCheckpointer
from detectron2.config import CfgNode
from detectron2.engine import AMPTrainer, DefaultTrainer, SimpleTrainer, TrainerBase
from detectron2.solver import LRMultiplier
from detectron2.utils import comm
from torch import nn

from .. import compat
from ..common.logs import start_logging
from ..common.patching import files_of_classes, replaced_functions
from ..config import with_memfit_keys
from ..errors import ConfigError
from ..job import Job
from ..memory import use_expandable_segments
from ..settings import auto_scale_workers
from .build import Run
from .checkpoint import MemfitCheckpointer, checkpointers_of
from .ending import saved_at_end, saved_if_failing
from .evaluating import evaluating
from .train_loop import AccumulatingTrainer

__all__ = ["MemfitMixin", "MemfitTrainer"]

logger = logging.getLogger(__name__)

# Arguments of an AccumulatingTrainer that are not in a config.
_KEPT = ("loss_fn", "clip_gradients", "gather_metric_period", "zero_grad_before_forward")

if TYPE_CHECKING:  # the mixin alone is not a trainer, and stands before one
    from detectron2.engine import DefaultTrainer as _Trainer
else:
    _Trainer = object


def _of_a_job(init: Callable[..., None]) -> Callable[..., None]:
    """Make a trainer's ``__init__`` build its parts as a job's; the outermost one decides."""

    @wraps(init)
    def __init__(self: "MemfitMixin", cfg: CfgNode, *args: Any, **kwargs: Any) -> None:
        if "_job_run" in vars(self):
            init(self, cfg, *args, **kwargs)
            return
        cfg = self._make_run(cfg)
        with _ddp_on_a_cpu(type(self), cfg):
            init(self, cfg, *args, **kwargs)
        self._complete()

    return __init__


def _ddp_on_a_cpu(trainer: type, cfg: CfgNode) -> AbstractContextManager[None]:
    """While open, ``create_ddp_model`` in a trainer's files works on a CPU, without device ids."""
    files = [f for f in files_of_classes(trainer.__mro__) if hasattr(f, "create_ddp_model")]
    if not cfg.MODEL.DEVICE.startswith("cpu") or comm.get_world_size() == 1 or not files:
        return nullcontext()
    return replaced_functions(files, {"create_ddp_model": lambda _: compat.create_ddp_model})


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
        with saved_at_end(self):
            return train(self, *args, **kwargs)

    return method


class MemfitMixin(_Trainer):
    """Base class for projects with their own trainer: ``class Trainer(MemfitMixin, TheirTrainer)``.

    All ``build_*`` methods, hooks and the checkpointer stay the project's. The trainer that runs
    the steps, ``self._trainer``, becomes an :class:`AccumulatingTrainer` with the options of the
    config. A class of the project's own must be derived from it. Checkpoints contain optimizer,
    gradient scaler, learning rate, random states and the order of the data. Checkpoints of plain
    Detectron2, v0.6 or main, can be resumed; missing parts are logged.

    A config without the keys of d2_memfit gets their defaults.

    Raises:
        ConfigError: a value in the config cannot work, or a key would do nothing.
        TypeError: this is not the first base class; the project's ``__init__`` does not take the
            config first; or its own inner trainer is not an ``AccumulatingTrainer``.
    """

    _job_run: Run
    _random_state: Optional[torch.Tensor] = None  # before a loader was first iterated

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        order = cls.__mro__
        if DefaultTrainer in order and order.index(DefaultTrainer) < order.index(MemfitMixin):
            raise TypeError(f"MemfitMixin must be the first base class of {cls.__name__}")
        if issubclass(cls, SimpleTrainer) and not issubclass(cls, AccumulatingTrainer):
            raise TypeError(
                f"{cls.__name__} is a SimpleTrainer: add AccumulatingTrainer as its last base "
                f"class, as in class {cls.__name__}(MemfitMixin, TheirTrainer, AccumulatingTrainer)"
            )

        def inherited(name: str) -> Callable[..., Any]:
            return lambda self, *args, **kwargs: getattr(super(cls, self), name)(*args, **kwargs)

        # A project's own may go past that of a base class: super(DefaultTrainer, self).__init__().
        init = vars(cls).get("__init__", inherited("__init__"))
        cls.__init__ = _of_a_job(init)  # type: ignore[method-assign]
        cls.train = _saved_at_end(vars(cls).get("train", inherited("train")))
        test = vars(cls).get("test", classmethod(inherited("test")))
        if isinstance(test, classmethod):
            cls.test = _evaluating(test.__func__)

    def _make_run(self, cfg: CfgNode) -> CfgNode:
        """Make the job; return the config for the project's ``__init__``."""
        if not isinstance(cfg, CfgNode):
            raise TypeError(
                f"the first argument of {type(self).__name__} must be the config, as in "
                f"DefaultTrainer, got a {type(cfg).__module__}.{type(cfg).__name__}. Of a copy of "
                "Detectron2: docs/COMPATIBILITY.md#labgym"
            )
        start_logging(cfg.OUTPUT_DIR)
        cfg = with_memfit_keys(cfg)
        if cfg.MEMFIT.BUDGET_GB is not None or cfg.MEMFIT.PRESET:
            use_expandable_segments()  # before "auto" asks the GPU
        self._job_run = run = Run(Job.from_trainer(type(self), cfg))
        for part in ("model", "optimizer", "loader"):
            name = "build_train_loader" if part == "loader" else f"build_{part}"
            self.__dict__[name] = self._noting_random_state(run.building(part, getattr(self, name)))
        return run.cfg

    def _noting_random_state(self, build: Callable[..., Any]) -> Callable[..., Any]:
        def build_part(*args: Any, **kwargs: Any) -> Any:
            part = build(*args, **kwargs)
            self._random_state = torch.get_rng_state()
            return part

        return build_part

    @property
    def _trainer(self) -> Any:
        try:
            return self.__dict__["_trainer"]
        except KeyError:
            raise AttributeError(f"{type(self).__name__} has no _trainer yet") from None

    @_trainer.setter
    def _trainer(self, made: Any) -> None:
        if type(made) in (SimpleTrainer, AMPTrainer):
            trainer = AccumulatingTrainer.__new__(AccumulatingTrainer)
        elif isinstance(made, AccumulatingTrainer):
            trainer = made
        else:
            name = type(made).__name__
            raise TypeError(
                f"{name} runs the steps, and is not derived from AccumulatingTrainer: write class "
                f"{name}(AccumulatingTrainer), or add it as the last base class. For losses of "
                "your own: self._trainer = SimpleTrainer(model, data_loader, optimizer); "
                "self._trainer.loss_fn = FUNCTION"
            )
        self._give_options(trainer, made)
        self.__dict__["_trainer"] = trainer

    def _give_options(self, trainer: AccumulatingTrainer, made: SimpleTrainer) -> None:
        """Initialise a trainer as another was made, with the options of the config."""
        options = self._job_run.options
        _check_made(made, options)
        self._undo_first_draw()
        kept = _KEPT if isinstance(made, AccumulatingTrainer) else ("gather_metric_period",)
        given = {name: vars(made)[name] for name in kept if name in vars(made)}
        base = {name: vars(made)[name] for name in vars(TrainerBase())}  # hooks, iterations
        scaler = getattr(made, "grad_scaler", None)
        AccumulatingTrainer.__init__(
            trainer, made.model, made.data_loader, made.optimizer, **options, **given
        )
        trainer.__dict__.update(base)
        if scaler is not None and scaler.is_enabled() and trainer.precision.scaler is not None:
            trainer.precision.scaler = scaler
        trainer.run = self._job_run
        self._random_state = torch.get_rng_state()

    def _undo_first_draw(self) -> None:
        """Undo what the constructor of v0.6 draws for the workers that it starts, if no more was
        drawn. The trainer with the options of the config draws it again.
        """
        if self._random_state is None:
            return
        now = torch.get_rng_state()
        torch.set_rng_state(self._random_state)
        torch.empty((), dtype=torch.int64).random_()
        is_all = torch.equal(torch.get_rng_state(), now)
        torch.set_rng_state(self._random_state if is_all else now)

    def _complete(self) -> None:
        """Check what the project's ``__init__`` made, and add checkpointers' parts and hooks."""
        if self._inner is self:
            self._give_options(self, self)
        self._inner.optimizer.register_step_pre_hook(lambda *_: self._check_step())
        self._job_run.complete(
            self,
            f"{type(self).__name__}.__init__ makes that part by itself. Call there "
            "self.build_model(cfg), self.build_optimizer(cfg, model), self.build_train_loader(cfg)",
        )
        for checkpointer in checkpointers_of(self, MemfitCheckpointer):
            if checkpointer.save_dir and "trainer" not in checkpointer.checkpointables:
                checkpointer.add_checkpointable("trainer", weakref.proxy(self))

    @property
    def checkpointer(self) -> Any:
        """The project's checkpointer. Its saves are whole files, and its loads are verified."""
        if "checkpointer" not in vars(self):
            raise AttributeError(f"{type(self).__name__} has no checkpointer yet")
        return vars(self)["checkpointer"]

    @checkpointer.setter
    def checkpointer(self, made: Any) -> None:
        if isinstance(made, DetectionCheckpointer) and not isinstance(made, MemfitCheckpointer):
            made = MemfitCheckpointer.like(made)
        self.__dict__["checkpointer"] = made

    @property
    def _inner(self) -> Any:
        """The trainer that runs the steps: ``self`` if the project's trainer is a SimpleTrainer."""
        return compat.inner_trainer(self)

    def _check_step(self) -> None:
        """Before the optimizer steps: raise an error for keys that this step does not read."""
        if self._inner.agreed_stop_signal is None:  # a step of the project's own
            self._job_run.check_run_step(type(self), type(self._inner))

    def before_train(self) -> None:
        if self._inner is not self:
            self._job_run.start(self)
        super().before_train()  # of an AccumulatingTrainer, it starts the run too
        self._inner.restore_again()

    def after_step(self) -> None:
        self._check_step()
        self._inner.done = self.iter  # a step of the project's own does not say so
        super().after_step()

    def after_train(self) -> None:
        if self._job_run.has_started:  # otherwise no hook has
            with saved_if_failing(self):
                super().after_train()

    auto_scale_workers = staticmethod(auto_scale_workers)

    def gather_states(self) -> None:
        """Collect on rank 0 the states of all ranks for a checkpoint. All ranks must call it."""
        if self._inner is self:
            super().gather_states()
        else:
            self._trainer.gather_states()

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        state["iteration"] = min(self.iter, self.max_iter - 1)  # one more after training
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
        self._trainer.load_run(None)
        if isinstance(self.scheduler, LRMultiplier):
            # It is in the optimizer's state. The scheduler sets it only when it steps.
            for group, lr in zip(self.optimizer.param_groups, self.scheduler.get_lr()):
                group["lr"] = lr


def _check_made(made: SimpleTrainer, options: Mapping[str, Any]) -> None:
    """Check that a project's inner trainer does not contradict the config."""
    if getattr(made, "async_write_metrics", False):
        raise ConfigError(
            "async_write_metrics=True cannot be used: all ranks look at the losses before the "
            "step, so that one that is not finite changes nothing. Leave it False"
        )
    dtype, steps = options["precision"].dtype, options["accumulation_steps"]
    if type(made) is AMPTrainer and dtype == torch.float32:
        logger.warning(
            "AMPTrainer is made, and SOLVER.AMP.ENABLED is False: this run trains in float32. Set "
            "it True for mixed precision, or make a SimpleTrainer"
        )
    if hasattr(made, "accumulation_steps"):
        for name, given, asked, default in (
            ("accumulation_steps", made.accumulation_steps, steps, 1),
            ("precision", made.precision.dtype, dtype, torch.float32),
            ("recovery", made.recovery is not None, options["recovery"] is not None, False),
        ):
            if given not in (asked, default):
                raise ConfigError(
                    f"AccumulatingTrainer is made with {name} {given}, and the config asks for "
                    f"{asked}: leave {name} out there, and set it in the config"
                )


class MemfitTrainer(MemfitMixin, DefaultTrainer):
    """A ``DefaultTrainer`` with accumulation, recovery and techniques."""
