"""The differences between Detectron2 v0.6 and main.

Both have version 0.6, so each difference is found by testing for the feature. All differences are
in this file.
"""

import importlib.util
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Callable

import torch.distributed as dist
from detectron2.engine import DefaultTrainer, SimpleTrainer, TrainerBase, defaults
from detectron2.engine.defaults import create_ddp_model as _create_ddp_model
from detectron2.utils import comm, events
from detectron2.utils.events import get_event_storage
from torch import nn
from torch.nn.parallel import DistributedDataParallel

# Main saves optimizer and scaler with DefaultTrainer's state, v0.6 only iteration and hooks.
SAVES_INNER_TRAINER = "state_dict" in vars(DefaultTrainer)

# Main calls hooks after the backward pass; v0.6 does not.
_HAS_AFTER_BACKWARD = hasattr(TrainerBase, "after_backward")

# Main writes each rank's own data time too.
_WRITES_RANK_DATA_TIME = "cur_iter" in inspect.signature(SimpleTrainer.write_metrics).parameters


def has_compiled_ops() -> bool:
    """Whether Detectron2's C++ operators exist. The fast COCO evaluation needs them."""
    if importlib.util.find_spec("detectron2._C") is None:
        return False
    from detectron2 import _C

    return hasattr(_C, "COCOevalEvaluateImages")


def after_backward(trainer: TrainerBase) -> None:
    """Call the hooks after the backward pass, on main."""
    if _HAS_AFTER_BACKWARD:
        trainer.after_backward()


def put_rank_data_time(seconds: float) -> None:
    """Write this rank's data time, if Detectron2 does."""
    if _WRITES_RANK_DATA_TIME:
        get_event_storage().put_scalar("rank_data_time", seconds)


def local_world_size() -> int:
    """Number of ranks on this machine; all ranks if ``launch`` did not start the job."""
    try:
        return comm.get_local_size()
    except AssertionError:
        return comm.get_world_size()


def keep_iterator(trainer: SimpleTrainer, batches: Any) -> None:
    """Let a trainer iterate these batches, though its ``data_loader`` is another object.

    v0.6 takes the iterator in its constructor; main takes it when the first iteration needs it.
    """
    if hasattr(trainer, "_data_loader_iter_obj") and batches is not trainer.data_loader:
        trainer._data_loader_iter_obj = batches


def current_iteration() -> int:
    """Iteration of the running training, or 0. Only main can tell whether one runs."""
    stack = events._CURRENT_STORAGE_STACK
    return stack[-1].iter if stack else 0


def create_ddp_model(model: nn.Module, **kwargs: Any) -> nn.Module:
    """Detectron2's ``create_ddp_model``, also for the CPU, where DDP takes no device ids."""
    if next(model.parameters()).device.type == "cpu":
        kwargs.setdefault("device_ids", None)
    return _create_ddp_model(model, **kwargs)


def without_ddp(model: nn.Module) -> nn.Module:
    """The model inside ``DistributedDataParallel``; other models are returned unchanged."""
    return model.module if isinstance(model, DistributedDataParallel) else model


@contextmanager
def patched_default_trainer(
    create_trainer: Callable[..., Any],
    create_checkpointer: Callable[..., Any],
    ddp_options: dict[str, Any],
) -> Iterator[None]:
    """While open, ``DefaultTrainer.__init__`` makes its parts with the functions given here.

    Neither release has a hook for this. Replacing the parts later would start the data loader's
    workers twice on v0.6. Hooks built in between would keep the old parts.

    Args:
        create_trainer: called as ``create_trainer(model, data_loader, optimizer)``.
        create_checkpointer: called like :class:`DetectionCheckpointer`.
        ddp_options: keyword arguments of ``DistributedDataParallel``, in addition to Detectron2's.
    """
    parts = {
        "SimpleTrainer": create_trainer,
        "AMPTrainer": create_trainer,
        "DetectionCheckpointer": create_checkpointer,
        "create_ddp_model": partial(create_ddp_model, **ddp_options),
    }
    originals = {name: getattr(defaults, name) for name in parts}
    try:
        vars(defaults).update(parts)
        yield
    finally:
        vars(defaults).update(originals)


def create_local_process_group(ranks_per_machine: int) -> None:
    """Tell ``comm`` which ranks share this machine. All ranks must call it."""
    if hasattr(comm, "create_local_process_group"):
        comm.create_local_process_group(ranks_per_machine)
        return
    for first in range(0, dist.get_world_size(), ranks_per_machine):
        ranks = list(range(first, first + ranks_per_machine))
        group = dist.new_group(ranks)
        if dist.get_rank() in ranks:
            comm._LOCAL_PROCESS_GROUP = group
