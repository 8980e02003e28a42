# Copyright (c) the d2_memfit developers.
"""Private names of Detectron2 and PyTorch, and differences between Detectron2 v0.6 and main.

Both releases of Detectron2 report the version 0.6, so each difference is detected by its feature.
PyTorch may rename what is private in any release. No other module uses private names of them,
except those that a subclass inherits. Each name is tested in ``tests/common/test_compat.py``.
"""

import inspect
import sys
from contextlib import AbstractContextManager
from typing import Any, Callable, Optional
from unittest.mock import patch

import torch
import torch.distributed as dist
from detectron2.data.common import MapDataset, _MapIterableDataset
from detectron2.data.samplers import TrainingSampler
from detectron2.engine import DefaultTrainer, HookBase, SimpleTrainer, TrainerBase
from detectron2.engine.defaults import create_ddp_model as _create_ddp_model
from detectron2.engine.hooks import BestCheckpointer, EvalHook, PeriodicCheckpointer
from detectron2.utils import comm, events
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _device, _python_dispatch, _pytree

# On main, DefaultTrainer's state includes optimizer and scaler; on v0.6 only iteration and hooks.
SAVES_INNER_TRAINER = "state_dict" in vars(DefaultTrainer)

# Random values that training samplers draw in their constructor, and that determine their order.
DRAWN_BY_SAMPLERS = ("_seed", "_seed_subset", "_indexes_subset")

# Main also writes the data time of each rank.
_WRITES_RANK_DATA_TIME = "cur_iter" in inspect.signature(SimpleTrainer.write_metrics).parameters

BatchNorm = nn.modules.batchnorm._BatchNorm
Convolution = nn.modules.conv._ConvNd
take_tensors = torch._utils._take_tensors  # lists of one dtype and device, up to some bytes each
DeviceContext = _device.DeviceContext
TorchDispatchMode = _python_dispatch.TorchDispatchMode
tree_flatten = _pytree.tree_flatten
tree_iter = _pytree.tree_iter
tree_map = _pytree.tree_map
tree_unflatten = _pytree.tree_unflatten

map_datasets = MapDataset, _MapIterableDataset  # of images by index, and in the loader's order

# F.cross_entropy calls its cross_entropy_loss(logits, target, weight, reduction (1 is the mean),
# ignore_index, label_smoothing).
cross_entropy_owner = torch._C._nn

constructors = _device._device_constructors  # functions that make tensors, and have a ``device``

# The system sends this process a signal when the one that started it is gone, on Linux.
end_with_parent = torch.multiprocessing._prctl_pr_set_pdeathsig  # type: ignore[attr-defined]

# Makes a tensor of a subclass, which has no memory of its own.
make_wrapper: Any = torch.Tensor._make_wrapper_subclass

# Sequence number of the next node that autograd records in this thread.
next_autograd_node_number = torch._C._autograd._get_sequence_nr

# A ``__torch_function__`` for subclasses of tensors: their results are plain tensors.
without_torch_function = torch._C._disabled_torch_function_impl


class DispatchMode(TorchDispatchMode):
    """A mode for which PyTorch does not import torch._dynamo, or wrap each call of the class."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


def has_compiled_ops() -> bool:
    """Whether Detectron2's C++ operators exist. The fast COCO evaluation needs them."""
    # detectron2.layers imports them, if they are there. Without a compiler, they may be empty.
    return hasattr(sys.modules.get("detectron2._C"), "COCOevalEvaluateImages")


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
    if comm._LOCAL_PROCESS_GROUP is None:
        return comm.get_world_size()
    return comm.get_local_size()


def inner_trainer(trainer: Any) -> Any:
    """The trainer inside a ``DefaultTrainer``; other trainers are returned unchanged."""
    return getattr(trainer, "_trainer", trainer)


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


def storage_id(storage: torch.UntypedStorage) -> int:
    """Address of a storage's C++ object; all tensors of the storage have the same one."""
    return storage._cdata


def version_of(tensor: torch.Tensor) -> int:
    """PyTorch's version counter: in-place changes of a tensor and of views of its storage."""
    return tensor._version


def schema(operator: Any) -> Any:
    """Names, aliases and types of an operator's arguments and results."""
    return operator._schema


def is_in_backward() -> bool:
    """Whether this thread runs a backward of autograd."""
    return torch._C._current_graph_task_id() != -1


def autograd_node_number() -> Optional[int]:
    """Sequence number of the node whose backward runs in this thread; None without one."""
    node = torch._C._current_autograd_node()
    return None if node is None else node._sequence_nr()


def know_as_builtin(function: Any, original: Any) -> None:
    """Register a function with TorchScript as a replacement of one of its builtins."""
    builtins = torch.jit._builtins
    name = builtins._find_builtin(original)
    if name is not None:
        builtins._register_builtin(function, name)


def has_communication_hooks(model: DistributedDataParallel) -> bool:
    """Whether the user has registered communication hooks, such as fp16_compression."""
    return bool(model._comm_hooks)


def has_kernels_for_bfloat16() -> bool:
    """Whether oneDNN has kernels for bfloat16 on this CPU. Without them PyTorch is far slower."""
    return torch.ops.mkldnn._is_mkldnn_bf16_supported()


def default_group_replaced(num_ranks: Optional[int]) -> AbstractContextManager[Any]:
    """While open, code that asks torch.distributed for its default group is told of one of so many
    ranks, in which nothing can run; or of none.

    All questions, such as ``dist.is_initialized()`` and ``dist.get_rank()``, end at the property
    ``WORLD`` of ``GroupMember``'s metaclass.
    """
    group = num_ranks and dist.ProcessGroup(0, num_ranks)  # type: ignore[call-arg, arg-type]
    return patch.object(type(dist.GroupMember), "WORLD", property(lambda _: group))


def compiled_frames() -> int:
    """Number of functions that ``torch.compile`` has tried to compile in this process."""
    utils: Any = sys.modules.get("torch._dynamo.utils")
    return 0 if utils is None else utils.counters["frames"]["total"]


def workers_of(iterator: Any) -> list[Any]:
    """Worker processes of a ``DataLoader``'s iterator."""
    return getattr(iterator, "_workers", [])


def shut_down(iterator: Any) -> None:
    """Ask the worker processes of a ``DataLoader``'s iterator to end, and wait for them."""
    if hasattr(iterator, "_shutdown_workers"):
        iterator._shutdown_workers()


def clear_cublas_workspaces() -> None:
    """Free the workspaces of cuBLAS. PyTorch without CUDA does not have this function."""
    torch._C._cuda_clearCublasWorkspaces()


def record_memory_history(max_entries: int) -> None:
    """Start to record events of the CUDA allocator, at most ``max_entries``; 0 stops it."""
    kinds: Any = "all" if max_entries else None
    torch.cuda.memory._record_memory_history(enabled=kinds, max_entries=max_entries)


def dump_memory_snapshot(file: str) -> None:
    """Write the allocator's segments and recorded events, for https://pytorch.org/memory_viz."""
    torch.cuda.memory._dump_snapshot(file)


def own_buffers(module: nn.Module) -> dict[str, Any]:
    """The buffers of a module itself, with those that are None; a change of the dict changes it."""
    return module._buffers
