# Copyright (c) the d2_memfit developers.
"""The private names of PyTorch that d2_memfit uses. They stand here and nowhere else.

PyTorch may rename them in any release: ``tests/test_torch_private.py`` says which one has moved.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Optional

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm
from torch.nn.modules.conv import _ConvNd as Convolution
from torch.nn.modules.dropout import _DropoutNd as Dropout
from torch.nn.modules.utils import _pair as pair
from torch.nn.parallel import DistributedDataParallel
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_iter, tree_map, tree_unflatten

__all__ = [
    "BatchNorm",
    "Convolution",
    "DeviceContext",
    "Dropout",
    "TorchDispatchMode",
    "autograd_node_number",
    "buffers_by_name",
    "change_count",
    "clear_cublas_workspaces",
    "constructors",
    "default_store",
    "dump_memory_snapshot",
    "has_communication_hooks",
    "is_in_backward",
    "is_loader_worker",
    "know_as_builtin",
    "make_wrapper",
    "next_autograd_node_number",
    "pair",
    "parameters_by_name",
    "record_memory_history",
    "replaced_cross_entropy",
    "schema",
    "storage_id",
    "tree_flatten",
    "tree_iter",
    "tree_map",
    "tree_unflatten",
    "without_torch_function",
    "workers_of",
]

# A ``__torch_function__`` for subclasses of tensors: their results are plain tensors.
without_torch_function = torch._C._disabled_torch_function_impl


def storage_id(storage: torch.UntypedStorage) -> int:
    """Address of a storage's C++ object, which all its tensors share while one of them lives."""
    return storage._cdata


def change_count(tensor: torch.Tensor) -> int:
    """How often a tensor, or a view of the same storage, was changed in place."""
    return tensor._version


def make_wrapper(cls: type, shape: Any, **options: Any) -> Any:
    """A tensor of a subclass, without memory of its own."""
    return torch.Tensor._make_wrapper_subclass(cls, shape, **options)


def schema(operator: Any) -> Any:
    """Names, aliases and types of an operator's arguments and results."""
    return operator._schema


def buffers_by_name(module: nn.Module) -> dict[str, Any]:
    """The dict in which a module keeps its own buffers: tensors or None."""
    return module._buffers


def parameters_by_name(module: nn.Module) -> dict[str, Optional[nn.Parameter]]:
    """The dict in which a module keeps its own parameters."""
    return module._parameters


def is_in_backward() -> bool:
    """Whether autograd runs a backward in this thread."""
    return torch._C._current_graph_task_id() != -1


def next_autograd_node_number() -> int:
    """The number of the node that the next recorded operator of this thread makes."""
    return torch._C._autograd._get_sequence_nr()


def autograd_node_number() -> Optional[int]:
    """The number of the node whose backward runs; None where none does."""
    node = torch._C._current_autograd_node()
    return None if node is None else node._sequence_nr()


def constructors() -> set[Any]:
    """The functions of PyTorch that take ``device=`` and no tensor."""
    return set(torch.utils._device._device_constructors())


def know_as_builtin(function: Any, original: Any) -> None:
    """Let TorchScript, which knows its functions by id, take one function for another."""
    builtins = torch.jit._builtins
    name = builtins._find_builtin(original)
    if name is not None:
        builtins._register_builtin(function, name)


@contextmanager
def replaced_cross_entropy(
    make: Callable[[Callable[..., Any]], Callable[..., Any]],
) -> Iterator[None]:
    """While open, ``F.cross_entropy`` ends in another function than PyTorch's operator.

    Args:
        make: makes the function out of the operator, which takes logits, target, weight, reduction
            (1 is the mean, 2 the sum), ignore_index and label_smoothing.
    """
    owner = torch._C._nn
    original = owner.cross_entropy_loss
    owner.cross_entropy_loss = make(original)
    try:
        yield
    finally:
        owner.cross_entropy_loss = original


def has_communication_hooks(model: DistributedDataParallel) -> bool:
    """Whether gradients are reduced by functions of the user's, such as fp16_compression."""
    return bool(model._comm_hooks)


def default_store() -> "dist.Store":
    """The key-value store through which the ranks found each other."""
    return dist.distributed_c10d._get_default_store()


def is_loader_worker(process: Any) -> bool:
    """Whether a process of multiprocessing is a worker of a ``DataLoader``."""
    return getattr(process, "_target", None) is torch.utils.data._utils.worker._worker_loop


def workers_of(iterator: Any) -> list[Any]:
    """The processes of a ``DataLoader``'s iterator."""
    return getattr(iterator, "_workers", [])


def clear_cublas_workspaces() -> None:
    """Free the memory that cuBLAS keeps for its products. Only PyTorch for CUDA can."""
    torch._C._cuda_clearCublasWorkspaces()


def record_memory_history(max_entries: Optional[int]) -> None:
    """Note the allocator's events from now on, so many at most; None ends it."""
    if max_entries is None:
        torch.cuda.memory._record_memory_history(enabled=None)
    else:
        torch.cuda.memory._record_memory_history(max_entries=max_entries)


def dump_memory_snapshot(file: str) -> None:
    """Write what the allocator has and has noted, for https://pytorch.org/memory_viz."""
    torch.cuda.memory._dump_snapshot(file)
