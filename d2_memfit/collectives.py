# Copyright (c) the d2_memfit developers.
"""Detection of calls that communicate with other ranks, whatever library makes them."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Optional

import torch
import torch.distributed as dist
from torch import nn

__all__ = [
    "Collective",
    "Place",
    "noticed_collectives",
    "noticed_questions",
    "place_of_caller",
    "pretended_ranks",
]

if dist.is_available():
    import torch.distributed.nn  # its functions' default group is the group at import

# The methods behind torch.distributed's functions, with the names that users know.
_METHODS = {
    "allreduce": "all_reduce",
    "allreduce_coalesced": "all_reduce_coalesced",
    "allgather": "all_gather",
    "_allgather_base": "all_gather_into_tensor",
    "all_gather_single": "all_gather_into_tensor",
    "allgather_coalesced": "all_gather_coalesced",
    "allgather_into_tensor_coalesced": "all_gather_into_tensor",
    "all_gather_single_coalesced": "all_gather_into_tensor",
    "alltoall": "all_to_all",
    "alltoall_base": "all_to_all_single",
    "all_to_all_single": "all_to_all_single",
    "barrier": "barrier",
    "monitored_barrier": "monitored_barrier",
    "broadcast": "broadcast",
    "gather": "gather",
    "gather_single": "gather",
    "reduce": "reduce",
    "reduce_scatter": "reduce_scatter",
    "_reduce_scatter_base": "reduce_scatter_tensor",
    "reduce_scatter_single": "reduce_scatter_tensor",
    "reduce_scatter_tensor_coalesced": "reduce_scatter_tensor",
    "reduce_scatter_single_coalesced": "reduce_scatter_tensor",
    "scatter": "scatter",
    "send": "send",
    "recv": "recv",
    "recv_anysource": "recv",
}
# Functional collectives are operators, which find their group without Python.
_OPERATORS = (
    "all_reduce",
    "all_reduce_",
    "all_reduce_coalesced",
    "all_reduce_coalesced_",
    "all_gather_into_tensor",
    "all_gather_into_tensor_coalesced",
    "all_to_all_single",
    "broadcast",
    "broadcast_",
    "reduce_scatter_tensor",
    "reduce_scatter_tensor_coalesced",
)

_PACKAGE = str(Path(__file__).parent)

# Files of helper functions: a collective's place is the code that calls them.
_PASSED_ON = (
    str(Path(torch.__file__).parent),
    _PACKAGE,
    "/detectron2/utils/comm.py",
)

_MOST_COUNTS = 16  # numbers in a tensor; a larger one is not a count
_FUNCTION = torch.autograd.function.__file__

Place = tuple[tuple[str, int], ...]  # file and line of the call and its callers, innermost first


@dataclass
class Collective:
    """One call of a collective.

    Attributes:
        name: as in ``torch.distributed``.
        place: where the model's code calls it.
        module: class of the innermost module that calls it.
        tensors: the tensors that are sent; an in-place call changes them.
        num_ranks: ranks of its group.
        is_sum: True for a sum over ranks, False for a mean; None for others.
        is_differentiable: whether gradients flow through it.
    """

    name: str
    place: Place
    module: str
    tensors: Sequence[torch.Tensor]
    num_ranks: int
    is_sum: Optional[bool]
    is_differentiable: bool

    @property
    def is_count(self) -> bool:
        """Whether it may sum numbers that losses are divided by."""
        return (
            self.is_sum is not None
            and self.name == "all_reduce"
            and not self.is_differentiable
            and self.tensors[0].numel() <= _MOST_COUNTS
            and self.tensors[0].dtype != torch.bool
        )

    def __str__(self) -> str:
        file, line = self.place[0] if self.place else ("a file that is not known", 0)
        return f"{self.name} in {file}:{line} ({self.module})"


# Called with a collective; returns whether it was handled. If not, the collective runs.
Handler = Callable[[Collective], bool]


@contextmanager
def noticed_collectives(handle: Handler) -> Iterator[None]:
    """While open, pass all collectives of this process that Python knows to ``handle``.

    They are seen where PyTorch passes them to a process group, or to the operator of a functional
    collective. The name or library of the call does not matter. DistributedDataParallel's own are
    not seen.
    """
    if not dist.is_available():
        yield
        return
    with ExitStack() as stack:
        for method, name in _METHODS.items():
            if hasattr(dist.ProcessGroup, method):
                stack.enter_context(_replaced(dist.ProcessGroup, method, _method(name, handle)))
        functional = getattr(torch.ops, "_c10d_functional", None)
        for name in _OPERATORS:
            if functional is not None and hasattr(functional, name):
                stack.enter_context(_replaced(functional, name, _operator(name, handle)))
        yield


@contextmanager
def pretended_ranks(num_ranks: int) -> Iterator[None]:
    """While open, code that asks is told that there are ``num_ranks`` ranks, and that it is rank 0.

    Open :func:`noticed_collectives` too, with a handler for all collectives: there is no group to
    run them.
    """
    original = dist.GroupMember.WORLD
    dist.GroupMember.WORLD = dist.ProcessGroup(0, num_ranks)  # type: ignore[call-arg, arg-type]
    try:
        yield
    finally:
        dist.GroupMember.WORLD = original


@contextmanager
def noticed_questions() -> Iterator[list[bool]]:
    """While open, the list gets an entry each time code asks whether there are ranks."""
    asked: list[bool] = []
    if not dist.is_available():
        yield asked
        return
    kind = type(dist.GroupMember)  # all queries of torch.distributed end at its WORLD
    original = vars(kind)["WORLD"]

    def noticed(_: Any) -> property:
        def get(cls: Any) -> Any:
            asked.append(True)
            return original.fget(cls)

        return property(get, original.fset)

    with _replaced(kind, "WORLD", noticed):
        yield asked


def place_of_caller(depth: int = 3) -> Place:
    """File and line of the innermost code that is neither PyTorch's nor ours.

    The result is the same on all machines, wherever the code is installed.
    """
    place: list[tuple[str, int]] = []
    for frame in _frames():
        file = frame.f_code.co_filename
        if not any(part in file for part in _PASSED_ON):
            place.append(("/".join(Path(file).parts[-2:]), frame.f_lineno))
        is_over = place and file.startswith(_PACKAGE)  # the trainer, which calls the model
        if is_over or len(place) == depth:
            break
    return tuple(place)


def _frames() -> Iterator[FrameType]:
    frame: Optional[FrameType] = sys._getframe(2)
    while frame is not None:
        yield frame
        frame = frame.f_back


def _collective(name: str, given: Any, num_ranks: int, op: Any) -> Collective:
    module, is_differentiable = "no module", False
    for frame in _frames():
        owner = frame.f_locals.get("self")
        if isinstance(owner, nn.Module):
            module = type(owner).__name__
            break
        # The forward of a function with its own backward.
        is_differentiable |= frame.f_code.co_filename == _FUNCTION
    tensors = _flat(given)
    return Collective(
        name,
        place_of_caller(),
        module,
        tensors,
        num_ranks,
        _is_sum(op) if name in ("all_reduce", "reduce") else None,
        is_differentiable or any(t.requires_grad for t in tensors),
    )


def _method(name: str, handle: Handler) -> Callable[..., Any]:
    def replacement(original: Callable[..., Any]) -> Callable[..., Any]:
        def method(group: dist.ProcessGroup, *args: Any, **kwargs: Any) -> Any:
            op = getattr(args[1], "reduceOp", None) if len(args) > 1 else None
            call = _collective(name, args[:1], group.size(), op)
            return _Done() if handle(call) else original(group, *args, **kwargs)

        return method

    return replacement


def _operator(name: str, handle: Handler) -> Callable[..., Any]:
    def replacement(original: Callable[..., Any]) -> Callable[..., Any]:
        def operator(*args: Any, **kwargs: Any) -> Any:
            op = args[1] if len(args) > 1 else None
            ranks = dist.get_world_size() if dist.is_initialized() else 1
            call = _collective(name, args[:1], ranks, op)
            if name == "all_reduce":  # not in place, and may be a count
                call.tensors = [call.tensors[0].detach().clone()]
            if not handle(call):
                return original(*args, **kwargs)
            return call.tensors[0] if name == "all_reduce" else args[0]

        return operator

    return replacement


def _is_sum(op: Any) -> Optional[bool]:
    """True for a sum, False for a mean, None for another reduction."""
    if op == dist.ReduceOp.SUM or op == "sum":
        return True
    return False if op == getattr(dist.ReduceOp, "AVG", None) or op == "avg" else None


def _flat(value: Any) -> list[Any]:
    if isinstance(value, (list, tuple)):
        return [t for part in value for t in _flat(part)]
    return [value] if isinstance(value, torch.Tensor) else []


@contextmanager
def _replaced(owner: Any, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    original = vars(owner).get(name, getattr(owner, name, None))
    setattr(owner, name, make(original))
    try:
        yield
    finally:
        setattr(owner, name, original)


class _Done:
    """The handle of a finished collective."""

    def wait(self, *args: Any) -> bool:
        return True

    def is_completed(self) -> bool:
        return True
