# Copyright (c) the d2_memfit developers.
"""Private names of PyTorch that d2_memfit uses. No other module uses private names of PyTorch.

PyTorch may rename them in any release. ``tests/compat/test_pytorch.py`` tests each name.
"""

import sys
from contextlib import AbstractContextManager
from typing import Any, Optional
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _device, _python_dispatch, _pytree

BatchNorm = nn.modules.batchnorm._BatchNorm
Convolution = nn.modules.conv._ConvNd
take_tensors = torch._utils._take_tensors  # lists of one dtype and device, up to some bytes each
DeviceContext = _device.DeviceContext
TorchDispatchMode = _python_dispatch.TorchDispatchMode
tree_flatten = _pytree.tree_flatten
tree_iter = _pytree.tree_iter
tree_map = _pytree.tree_map
tree_unflatten = _pytree.tree_unflatten

# F.cross_entropy calls its cross_entropy_loss(logits, target, weight, reduction (1 is the mean),
# ignore_index, label_smoothing).
cross_entropy_owner = torch._C._nn

# A ``__torch_function__`` for subclasses of tensors: their results are plain tensors.
without_torch_function = torch._C._disabled_torch_function_impl


def storage_id(storage: torch.UntypedStorage) -> int:
    """Address of a storage's C++ object; all tensors of the storage have the same one."""
    return storage._cdata


def version_of(tensor: torch.Tensor) -> int:
    """PyTorch's version counter: in-place changes of a tensor and of views of its storage."""
    return tensor._version


def make_wrapper(cls: type, shape: Any, **options: Any) -> Any:
    """Make a tensor of a subclass that has no memory of its own."""
    return torch.Tensor._make_wrapper_subclass(cls, shape, **options)


def schema(operator: Any) -> Any:
    """Names, aliases and types of an operator's arguments and results."""
    return operator._schema


def is_in_backward() -> bool:
    """Whether this thread runs a backward of autograd."""
    return torch._C._current_graph_task_id() != -1


def next_autograd_node_number() -> int:
    """Sequence number of the next node that autograd records in this thread."""
    return torch._C._autograd._get_sequence_nr()


def autograd_node_number() -> Optional[int]:
    """Sequence number of the node whose backward runs in this thread; None without one."""
    node = torch._C._current_autograd_node()
    return None if node is None else node._sequence_nr()


def constructors() -> set[Any]:
    """Functions of PyTorch that make tensors, with an argument ``device``."""
    return set(torch.utils._device._device_constructors())


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


def forget_compiled() -> None:
    """Let compiled functions compile again at their next call, so that :func:`compiled_frames`
    tells of them.
    """
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()


def end_with_parent(number: int) -> None:
    """Let the system send this process a signal when the one that started it is gone, on Linux."""
    torch.multiprocessing._prctl_pr_set_pdeathsig(number)  # type: ignore[attr-defined]


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
