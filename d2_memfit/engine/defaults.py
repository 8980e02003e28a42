# Copyright (c) the d2_memfit developers.
"""Detectron2's default trainer with accumulation, as one more base class."""

import logging
from functools import partial
from typing import TYPE_CHECKING, Any, Optional

from detectron2.config import CfgNode
from detectron2.engine import DefaultTrainer, HookBase, SimpleTrainer
from detectron2.solver import LRMultiplier
from detectron2.utils import comm
from torch import nn

from .. import compat
from ..config import with_memfit_keys
from ..cost_model import CostModel
from ..evaluation_in_parts import predictions_on_disk
from ..job import Job, RecoveryOptions, checked_loader, checked_test_loaders
from ..logs import start_logging
from ..memory import enforce_budget, use_expandable_segments
from ..presets import with_budget
from ..scaling import auto_scale_workers
from ..techniques import ShardedOptimizer, apply_techniques, ready_to_evaluate
from .budget_hook import EnforceBudget
from .checkpoint import MemfitCheckpointer
from .explained_hooks import explains_hooks
from .gather_states import GatherStates
from .hooks import memory_hooks
from .inference import recovering_inference
from .preemption import StopOnSignals
from .sharding import ConsolidateOptimizer
from .simple_trainers import accumulate_in
from .train_loop import AccumulatingTrainer

__all__ = ["MemfitMixin", "MemfitTrainer"]

logger = logging.getLogger(__name__)


if TYPE_CHECKING:  # it is no trainer by itself, and stands before one
    from detectron2.engine import DefaultTrainer as _Trainer
else:
    _Trainer = object


@explains_hooks
class MemfitMixin(_Trainer):
    """Base class for projects with their own trainer: ``class Trainer(MemfitMixin, TheirTrainer)``.

    The inner trainer becomes an :class:`AccumulatingTrainer`. All ``build_*`` methods and hooks
    stay the project's. Checkpoints contain optimizer, gradient scaler and learning rate, also on
    v0.6. Checkpoints of plain Detectron2, v0.6 or main, can be resumed; missing parts are logged.

    A config without the keys of d2_memfit gets their defaults.

    Raises:
        ConfigError: a value in the config cannot work.
        TypeError: this is not the first base class. Or the project's ``__init__`` does not take the
            config first, or makes its own inner trainer.
    """

    _hooks: list[HookBase]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        order = cls.__mro__
        if DefaultTrainer in order and order.index(DefaultTrainer) < order.index(MemfitMixin):
            raise TypeError(f"MemfitMixin must be the first base class of {cls.__name__}")

    def __init__(self, cfg: CfgNode, *args: Any, **kwargs: Any) -> None:
        if not isinstance(cfg, CfgNode):
            raise TypeError(
                f"the first argument of {type(self).__name__} must be the config, as in "
                f"DefaultTrainer, got a {type(cfg).__name__}"
            )
        start_logging(cfg.OUTPUT_DIR)
        cfg = with_memfit_keys(cfg)
        if cfg.MEMFIT.BUDGET_GB is not None or cfg.MEMFIT.PRESET:
            use_expandable_segments()  # before "auto" asks the GPU
        job = Job.from_trainer(type(self), cfg)
        cfg = apply_techniques("config", job.cfg, job.cfg)
        options: dict[str, Any] = {
            "accumulation_steps": job.geometry.accumulation_steps,
            "precision": job.precision(),
            "micro_batch_size": job.geometry.micro_batch_size,
            "cost_model": CostModel.from_cfg(job.cfg),
            "recovery": job.recovery,
            "normalizers": job.normalizers,
        }
        create_trainer = partial(AccumulatingTrainer, **options)
        if isinstance(self, SimpleTrainer):
            accumulate_in(self, options)
        self._init_has_run = True
        enforce_budget(job.budget_gb, cfg.MODEL.DEVICE)
        self._apply_techniques_when_built(cfg)
        ddp_options = apply_techniques("ddp", {}, cfg)
        with compat.patched_default_trainer(create_trainer, MemfitCheckpointer, ddp_options):
            super().__init__(cfg, *args, **kwargs)
        inner = self._inner
        if not isinstance(inner, AccumulatingTrainer):
            raise TypeError(
                f"{type(self).__name__} makes an inner trainer of its own, a "
                f"{type(inner).__name__}: derive that from d2_memfit.AccumulatingTrainer"
            )
        if "accumulation_steps" not in vars(inner):
            raise TypeError(
                f"{type(self).__name__} calls SimpleTrainer.__init__ by that name: call "
                "super().__init__(model, data_loader, optimizer)"
            )
        first = memory_hooks(cfg.MEMFIT.MONITOR, cfg.OUTPUT_DIR, cfg.MEMFIT.BUDGET_GB)
        if cfg.MEMFIT.BUDGET_GB is not None:
            first.append(EnforceBudget(cfg.MEMFIT.BUDGET_GB, cfg.MODEL.DEVICE))
        periods = cfg.SOLVER.CHECKPOINT_PERIOD, cfg.TEST.EVAL_PERIOD
        if comm.get_world_size() > 1:
            first.append(GatherStates(*periods))
        if isinstance(inner.optimizer, ShardedOptimizer):
            first.append(ConsolidateOptimizer(inner.optimizer, *periods))
        self._register_first(first)
        self._stops_on_signals = cfg.MEMFIT.STOP_ON_SIGNALS
        logger.info(
            "Effective batch: SOLVER.IMS_PER_BATCH %d x SOLVER.ACCUMULATION_STEPS %d, on %d ranks",
            cfg.SOLVER.IMS_PER_BATCH,
            cfg.SOLVER.ACCUMULATION_STEPS,
            comm.get_world_size(),
        )
        is_own = type(self).run_step not in (DefaultTrainer.run_step, AccumulatingTrainer.run_step)
        if is_own and cfg.SOLVER.ACCUMULATION_STEPS > 1:
            logger.warning(
                "%s overrides run_step. SOLVER.ACCUMULATION_STEPS %d works only if that calls "
                "self._trainer.run_step()",
                type(self).__name__,
                cfg.SOLVER.ACCUMULATION_STEPS,
            )

    @property
    def _inner(self) -> Any:
        """The trainer that runs the steps: ``self`` if the project's trainer is a SimpleTrainer."""
        return compat.inner_trainer(self)

    def register_hooks(self, hooks: list[Optional[HookBase]]) -> None:
        """Register hooks as ``TrainerBase`` does. Every project's ``__init__`` calls this."""
        if not hasattr(self, "_init_has_run"):
            raise TypeError(
                f"{type(self).__name__}.__init__ does not call that of MemfitMixin, so no key of "
                "d2_memfit would do anything: call super().__init__(cfg) there, and not "
                "super(DefaultTrainer, self).__init__(); or derive from DefaultTrainer, and make "
                "the inner trainer with d2_memfit.engine.build_trainer"
            )
        super().register_hooks(hooks)

    def before_train(self) -> None:
        checkpointer = getattr(self, "checkpointer", None)
        if isinstance(checkpointer, MemfitCheckpointer):
            comm.synchronize()  # all ranks have read their weights
            checkpointer.begin_run(self.start_iter)
            if self._stops_on_signals:  # after all other hooks
                self.register_hooks([StopOnSignals(checkpointer)])
                self._stops_on_signals = False
        elif checkpointer is not None:
            logger.warning(
                "The trainer's checkpointer is a %s: a crash may break its files, and signals end "
                "the run without a checkpoint. Make it a d2_memfit.engine.MemfitCheckpointer",
                type(checkpointer).__name__,
            )
        super().before_train()
        self._inner.run_state.restore_random_states()

    def _register_first(self, hooks: list[HookBase]) -> None:
        """Register hooks before the project's, which write and save."""
        others, self._hooks = self._hooks, []
        self.register_hooks(hooks)
        self._hooks += others

    def _apply_techniques_when_built(self, cfg: CfgNode) -> None:
        """Apply techniques after the ``build_*`` methods, whichever class defines them."""
        build_model, build_optimizer = self.build_model, self.build_optimizer
        self.__dict__.update(
            build_model=lambda *a, **k: apply_techniques("model", build_model(*a, **k), cfg),
            build_optimizer=lambda *a, **k: apply_techniques(
                "optimizer", build_optimizer(*a, **k), cfg
            ),
            build_train_loader=apply_techniques(
                "loader", checked_loader(self.build_train_loader, cfg), cfg
            ),
        )

    auto_scale_workers = staticmethod(auto_scale_workers)

    @classmethod
    def test(cls, cfg: CfgNode, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Run the project's ``test`` under MEMFIT.BUDGET_GB and MEMFIT.OOM."""
        cfg = with_budget(with_memfit_keys(cfg))
        if cfg.MEMFIT.BUDGET_GB is not None:
            enforce_budget(cfg.MEMFIT.BUDGET_GB, cfg.MODEL.DEVICE)
        options = RecoveryOptions.from_cfg(cfg)
        with (
            ready_to_evaluate(compat.without_ddp(model), cfg),
            recovering_inference(model, options),
            checked_test_loaders(cfg),
            predictions_on_disk(cfg),
        ):
            return super().test(cfg, model, *args, **kwargs)

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
        has_optimizer = "_trainer" in state_dict
        if not has_optimizer:
            logger.warning(
                "The checkpoint has no optimizer state (Detectron2 v0.6 saves none). Iteration and "
                "learning rate are resumed, momentum starts at zero"
            )
            inner = {k: v for k, v in self._trainer.state_dict().items() if k != "run"}
            state_dict = {**state_dict, "_trainer": inner}
        super().load_state_dict(state_dict)
        if not compat.SAVES_INNER_TRAINER:
            self._trainer.load_state_dict(state_dict["_trainer"])
        if not has_optimizer and isinstance(self.scheduler, LRMultiplier):
            # It is in the optimizer's state. The scheduler sets it only when it steps.
            for group, lr in zip(self.optimizer.param_groups, self.scheduler.get_lr()):
                group["lr"] = lr


class MemfitTrainer(MemfitMixin, DefaultTrainer):
    """A ``DefaultTrainer`` with accumulation, recovery and techniques."""
