# Copyright (c) the d2_memfit developers.
"""Differences between Detectron2 v0.6 and main, and the private names of Detectron2 in use.

Both releases report the version 0.6, so each difference is detected by its feature. No other module
uses private names of Detectron2, except those that a subclass inherits. Each name is tested in
``tests/compat/test_detectron2.py``. Private names of PyTorch are in ``compat/pytorch.py``.
"""

import importlib.util
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Callable, Optional

import torch.distributed as dist
from detectron2.data.common import _MapIterableDataset
from detectron2.data.samplers import TrainingSampler
from detectron2.engine import DefaultTrainer, HookBase, SimpleTrainer, TrainerBase
from detectron2.engine.defaults import create_ddp_model as _create_ddp_model
from detectron2.engine.hooks import BestCheckpointer, EvalHook, PeriodicCheckpointer
from detectron2.utils import comm, events
from torch import nn
from torch.nn.parallel import DistributedDataParallel

# On main, DefaultTrainer's state includes optimizer and scaler; on v0.6 only iteration and hooks.
SAVES_INNER_TRAINER = "state_dict" in vars(DefaultTrainer)

# Random values that training samplers draw in their constructor, and that determine their order.
DRAWN_BY_SAMPLERS = ("_seed", "_seed_subset", "_indexes_subset")

# Main also writes the data time of each rank.
_WRITES_RANK_DATA_TIME = "cur_iter" in inspect.signature(SimpleTrainer.write_metrics).parameters


def has_compiled_ops() -> bool:
    """Whether Detectron2's C++ operators exist. The fast COCO evaluation needs them."""
    if importlib.util.find_spec("detectron2._C") is None:
        return False
    from detectron2 import _C  # a setup without a compiler may have an empty one

    return hasattr(_C, "COCOevalEvaluateImages")


def after_backward(trainer: TrainerBase) -> None:
    """Call the hooks that main has for the time after the backward pass; v0.6 has none."""
    if hasattr(TrainerBase, "after_backward"):
        trainer.after_backward()


def put_rank_data_time(seconds: float) -> None:
    """Write this rank's data time, as main does; on v0.6, do nothing."""
    if _WRITES_RANK_DATA_TIME:
        events.get_event_storage().put_scalar("rank_data_time", seconds)


def local_world_size() -> int:
    """Number of ranks on this machine; of all ranks if ``launch`` did not start the job."""
    try:
        return comm.get_local_size()
    except AssertionError:
        return comm.get_world_size()


def inner_trainer(trainer: Any) -> Any:
    """The trainer inside a ``DefaultTrainer``; other trainers are returned unchanged."""
    return getattr(trainer, "_trainer", trainer)


@contextmanager
def at_iteration(trainer: TrainerBase, iteration: int) -> Iterator[None]:
    """While open, a trainer and the one inside are in another iteration, as for a checkpoint."""
    inner = inner_trainer(trainer)
    now = trainer.iter, inner.iter
    trainer.iter = inner.iter = iteration
    try:
        yield
    finally:
        trainer.iter, inner.iter = now


def hooks_of(trainer: TrainerBase) -> list[HookBase]:
    """Hooks that are registered with a trainer."""
    return trainer._hooks


def periods_of_states(trainer: TrainerBase) -> set[int]:
    """Periods, in iterations, of the hooks that save checkpoints or evaluate."""
    savers = (BestCheckpointer, EvalHook, PeriodicCheckpointer)
    hooks: list[Any] = [hook for hook in trainer._hooks if isinstance(hook, savers)]
    return {p for p in (getattr(h, "period", None) or h._period for h in hooks) if p > 0}


def split_map(loader: Any) -> tuple[Optional[Callable[[Any], Any]], Any]:
    """Split a loader into the function that Detectron2 maps over its batches and the loader inside.

    Without such a function, return None and the loader.
    """
    if type(loader) is _MapIterableDataset:
        return loader._map_func, loader._dataset
    return None, loader


def deals_its_indices(sampler: Any) -> bool:
    """Whether a sampler has the same ``__iter__`` as ``TrainingSampler``, in any class.

    It splits an endless order of indices among the ranks.
    """
    known = TrainingSampler.__iter__.__code__
    own = getattr(type(sampler).__iter__, "__code__", None)
    return own is not None and (own.co_code, own.co_names) == (known.co_code, known.co_names)


def endless_indices(sampler: Any) -> Iterator[int]:
    """Indices of all ranks, of a sampler for which :func:`deals_its_indices` is true."""
    return sampler._infinite_indices()


def rank_of(sampler: Any) -> int:
    """Rank whose indices such a sampler yields."""
    return sampler._rank


def num_ranks_of(sampler: Any) -> int:
    """Number of ranks among which such a sampler splits its indices."""
    return sampler._world_size


def keep_iterator(trainer: SimpleTrainer, batches: Any) -> None:
    """Make a trainer iterate over ``batches`` although its ``data_loader`` is another object.

    v0.6 creates the iterator in the constructor, main in the first iteration.
    """
    if hasattr(trainer, "_data_loader_iter_obj") and batches is not trainer.data_loader:
        trainer._data_loader_iter_obj = batches


def current_iteration() -> int:
    """Iteration of the running training; 0 if none runs."""
    stack = events._CURRENT_STORAGE_STACK
    return stack[-1].iter if stack else 0


def create_ddp_model(model: nn.Module, **kwargs: Any) -> nn.Module:
    """Detectron2's ``create_ddp_model``, which also works on the CPU, without device ids."""
    if next(model.parameters()).device.type == "cpu":
        kwargs.setdefault("device_ids", None)
    return _create_ddp_model(model, **kwargs)


def without_ddp(model: nn.Module) -> nn.Module:
    """The model inside ``DistributedDataParallel``; other models are returned unchanged."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def create_local_process_group(ranks_per_machine: int) -> None:
    """Register the ranks that share this machine in ``comm``. All ranks must call it."""
    for first in range(0, dist.get_world_size(), ranks_per_machine):
        ranks = list(range(first, first + ranks_per_machine))
        group = dist.new_group(ranks)
        if dist.get_rank() in ranks:
            comm._LOCAL_PROCESS_GROUP = group
