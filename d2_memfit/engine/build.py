# Copyright (c) the d2_memfit developers.
"""One call from a job to its trainer, for your own loop and for LazyConfigs."""

from typing import Any, Optional

import torch
from torch import nn

from ..compat import create_ddp_model
from ..cost_model import CostModel
from ..job import Job
from ..memory import enforce_budget, use_expandable_segments
from ..techniques import apply_techniques
from .budget_hook import EnforceBudget
from .train_loop import AccumulatingTrainer

__all__ = ["build_trainer"]


def build_trainer(
    job: Job,
    model: Optional[nn.Module] = None,
    data_loader: Optional[Any] = None,
    optimizer: Optional[torch.optim.Optimizer] = None,
    **kwargs: Any,
) -> AccumulatingTrainer:
    """Build a trainer with the job's accumulation, precision, recovery, techniques and budget.

    Args:
        model: on the job's device, without DDP around it; None builds the job's.
        data_loader: of this rank; None builds the job's.
        optimizer: of the model's parameters; None is the job's own.
        kwargs: other arguments of :class:`AccumulatingTrainer`, such as ``loss_fn``.

    Raises:
        ConfigError: a technique or recovery cannot work with the model or optimizer.
    """
    if job.budget_gb is not None:
        use_expandable_segments()
    enforce_budget(job.budget_gb, job.cfg.MODEL.DEVICE)
    model = job.parts.build_model(job.cfg.MODEL.DEVICE) if model is None else model
    model = apply_techniques("model", model, job.cfg)
    optimizer = job.parts.build_optimizer(model) if optimizer is None else optimizer
    optimizer = apply_techniques("optimizer", optimizer, job.cfg)
    kwargs.setdefault("clip_gradients", job.parts.clip_gradients())
    trainer = AccumulatingTrainer(
        create_ddp_model(model, **job.ddp_options()),
        job.build_train_loader() if data_loader is None else data_loader,
        optimizer,
        accumulation_steps=job.geometry.accumulation_steps,
        precision=job.precision(),
        micro_batch_size=job.geometry.micro_batch_size,
        cost_model=CostModel.from_cfg(job.cfg),
        recovery=job.recovery,
        normalizers=job.normalizers,
        **kwargs,
    )
    if job.budget_gb is not None:
        trainer.register_hooks([EnforceBudget(job.budget_gb, job.cfg.MODEL.DEVICE)])
    return trainer
