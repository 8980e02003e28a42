# Copyright (c) the d2_memfit developers.
"""Detectron2's default trainer with accumulation, as one more base class."""

import logging
import weakref
from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any

import torch
from detectron2.checkpoint import DetectionCheckpointer
from detectron2.config import CfgNode
from detectron2.engine import AMPTrainer, DefaultTrainer, SimpleTrainer, TrainerBase
from detectron2.solver import LRMultiplier

from ..common import compat
from ..common.errors import start_logging
from ..common.patching import files_of_classes, replaced_functions
from ..config.load import with_memfit_keys
from ..config.settings import auto_scale_workers
from ..job import Job
from .build import Run
from .checkpoint import MemfitCheckpointer, checkpointers_of
from .ending import saved_at_end, saved_if_failing
from .evaluating import evaluating
from .train_loop import AccumulatingTrainer

logger = logging.getLogger(__name__)

# Arguments of trainers that are not in a config.
_KEPT = ("loss_fn", "clip_gradients", "gather_metric_period")

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
        files = files_of_classes([*type(self).__mro__, DefaultTrainer])
        with replaced_functions((files, {"create_ddp_model": lambda _: compat.create_ddp_model})):
            init(self, cfg, *args, **kwargs)
        self._complete()

    return __init__


def _within(context: Callable[..., Any], method: Callable[..., Any]) -> Callable[..., Any]:
    """Make a method that runs within a context, which is made with the same arguments."""

    @wraps(method)
    def within(*args: Any, **kwargs: Any) -> Any:
        with context(*args, **kwargs):
            return method(*args, **kwargs)

    return within


class MemfitMixin(_Trainer):
    """Base class for projects with their own trainer: ``class Trainer(MemfitMixin, TheirTrainer)``.

    All ``build_*`` methods, hooks and the checkpointer stay the project's. The trainer that runs
    the steps, ``self._trainer``, becomes an :class:`AccumulatingTrainer` with the options of the
    config, whatever options it was made with. A class of the project's own must be derived from it.
    Checkpoints contain optimizer,
    gradient scaler, learning rate, random states and the order of the data. Checkpoints of plain
    Detectron2, v0.6 or main, can be resumed; missing parts are logged.

    A config without the keys of d2_memfit gets their defaults.

    Raises:
        ConfigError: a value in the config cannot work, or a key would do nothing.
        TypeError: this is not the first base class; the project's ``__init__`` does not take the
            config first; or its own inner trainer is not an ``AccumulatingTrainer``.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        order = cls.__mro__
        if DefaultTrainer in order and order.index(DefaultTrainer) < order.index(MemfitMixin):
            raise TypeError(f"MemfitMixin must be the first base class of {cls.__name__}")
        if issubclass(cls, SimpleTrainer) and not issubclass(cls, AccumulatingTrainer):
            text = f"{cls.__name__} is a SimpleTrainer: add AccumulatingTrainer as its last base"
            how = f"class {cls.__name__}(MemfitMixin, TheirTrainer, AccumulatingTrainer)"
            raise TypeError(f"{text} class, as in {how}")

        def inherited(name: str) -> Callable[..., Any]:
            return lambda self, *args, **kwargs: getattr(super(cls, self), name)(*args, **kwargs)

        # A project's own may go past that of a base class: super(DefaultTrainer, self).__init__().
        init = vars(cls).get("__init__", inherited("__init__"))
        cls.__init__ = _of_a_job(init)  # type: ignore[method-assign]
        train = vars(cls).get("train", inherited("train"))
        cls.train = _within(lambda trainer, *_, **__: saved_at_end(trainer), train)
        test = vars(cls).get("test", classmethod(inherited("test")))
        if isinstance(test, classmethod):
            keys = lambda _, cfg, model, *__, **___: evaluating(cfg, model)  # noqa: E731
            cls.test = classmethod(_within(keys, test.__func__))

    def _make_run(self, cfg: CfgNode) -> CfgNode:
        """Make the job; return the config for the project's ``__init__``."""
        if not isinstance(cfg, CfgNode):
            raise TypeError(
                f"the first argument of {type(self).__name__} must be the config, as in "
                f"DefaultTrainer, got a {type(cfg).__module__}.{type(cfg).__name__}"
            )
        start_logging(cfg.OUTPUT_DIR)
        self._job_run = run = Run(Job.from_trainer(type(self), with_memfit_keys(cfg)))
        for part in ("model", "optimizer", "loader"):
            name = "build_train_loader" if part == "loader" else f"build_{part}"
            self.__dict__[name] = run.building(part, getattr(self, name))
        return run.cfg

    @property
    def _trainer(self) -> Any:
        return self._accumulating

    @_trainer.setter
    def _trainer(self, made: Any) -> None:
        trainer = made
        if type(made) in (SimpleTrainer, AMPTrainer):
            trainer = AccumulatingTrainer.__new__(AccumulatingTrainer)
        elif not isinstance(made, AccumulatingTrainer):
            name = type(made).__name__
            raise TypeError(
                f"{name} runs the steps, so write class {name}(AccumulatingTrainer), or add it as "
                "last base class. For losses of your own: self._trainer = SimpleTrainer(model, "
                "data_loader, optimizer); self._trainer.loss_fn = FUNCTION"
            )
        self._give_options(trainer, made)
        if isinstance(made, AMPTrainer) and trainer.precision.dtype == torch.float32:
            logger.warning("AMPTrainer is made, but SOLVER.AMP.ENABLED False trains in float32")
        self._accumulating = trainer

    def _give_options(self, trainer: AccumulatingTrainer, made: SimpleTrainer) -> None:
        """Initialise a trainer as another was made, with the options of the config."""
        run = self._job_run
        run.undo_first_draw()
        parts = made.model, made.data_loader, made.optimizer
        options = run.options | {name: v for name, v in vars(made).items() if name in _KEPT}
        base = {name: vars(made)[name] for name in vars(TrainerBase())}  # hooks, iterations
        AccumulatingTrainer.__init__(trainer, *parts, **options)
        trainer.__dict__.update(base)
        trainer.run = run
        run.random_state = torch.get_rng_state()

    def _complete(self) -> None:
        """Check what the project's ``__init__`` made, and add checkpointers' parts and hooks."""
        if self._inner is self:
            self._give_options(self, self)
        self._inner.optimizer.register_step_pre_hook(lambda *_: self._check_step())
        self._job_run.complete(
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
        self._inner.done = self.iter  # a step of the project's own does not say so
        super().after_step()

    def after_train(self) -> None:
        if self._job_run.has_started:  # otherwise no hook has
            with saved_if_failing(self):
                super().after_train()

    auto_scale_workers = staticmethod(auto_scale_workers)

    def gather_states(self) -> None:
        """Collect on rank 0 the states of all ranks for a checkpoint. All ranks must call it."""
        AccumulatingTrainer.gather_states(self._inner)

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        state["iteration"] = min(self.iter, self.max_iter - 1)  # one more after training
        if not compat.SAVES_INNER_TRAINER and self._inner is not self:
            state["_trainer"] = self._trainer.state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self._inner is self or "_trainer" in state_dict:
            super().load_state_dict(state_dict)
            if not compat.SAVES_INNER_TRAINER and self._inner is not self:
                self._trainer.load_state_dict(state_dict["_trainer"])
            return
        text = "The checkpoint has no optimizer state (Detectron2 v0.6 saves none):"
        logger.warning("%s iteration and learning rate are resumed, momentum is zero", text)
        TrainerBase.load_state_dict(self, state_dict)
        self._trainer.load_run(None)
        if isinstance(self.scheduler, LRMultiplier):
            # It is in the optimizer's state. The scheduler sets it only when it steps.
            for group, lr in zip(self.optimizer.param_groups, self.scheduler.get_lr()):
                group["lr"] = lr


class MemfitTrainer(MemfitMixin, DefaultTrainer):
    """A ``DefaultTrainer`` with accumulation, recovery and techniques."""
