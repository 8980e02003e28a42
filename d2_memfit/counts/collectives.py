# Copyright (c) the d2_memfit developers.
"""Detection of calls that communicate with other ranks, whatever library makes them."""

import re
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import dropwhile, islice, takewhile
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Optional

import torch
import torch.distributed as dist
from torch import nn

from ..common.patching import replaced_functions
from ..compat.pytorch import default_group_answered

__all__ = [
    "Collective",
    "Handler",
    "Place",
    "PretendedRanks",
    "noticed_collectives",
    "place_of_caller",
]

if dist.is_available():
    import torch.distributed.nn  # its functions' default group is the group at import

# The methods behind torch.distributed's functions, and the names by which users know some.
_METHOD = re.compile(r"_?(all|barrier|broadcast|gather|monitored_barrier|recv|reduce|scatter|send)")
_NAMES = {
    "allreduce": "all_reduce",
    "allgather": "all_gather",
    "_allgather_base": "all_gather_into_tensor",
    "all_gather_single": "all_gather_into_tensor",
}

# Files of helper functions: a collective's place is the code that calls them.
_PASSED_ON = (
    str(Path(torch.__file__).parent),
    str(Path(__file__).parents[1]),
    "/detectron2/utils/comm.py",
)

_FEW = 16  # numbers in a tensor that are taken for counts
_MOST_COUNTS = 4096  # the same, if they add up, such as one for each class
_FUNCTION = torch.autograd.function.__file__

Place = tuple[tuple[str, int], ...]  # file and line of the call and its callers, innermost first


@dataclass
class Collective:
    """One call of a collective.

    Attributes:
        name: as in ``torch.distributed``.
        place: where the model's code calls it.
        module: class of the innermost module that calls it.
        tensors: the tensors that the call changes in place.
        sent: the tensors that it sends, if they are others, as in an all_gather.
        num_ranks: those of its group.
        scale: factor by which it multiplies a value that all ranks have: the ranks of its group
            for a sum, 1 for a mean; None for other calls.
        is_differentiable: whether gradients flow through it.
    """

    name: str
    place: Place
    module: str
    tensors: Sequence[torch.Tensor]
    sent: Sequence[torch.Tensor]
    num_ranks: int
    scale: Optional[int]
    is_differentiable: bool

    @property
    def is_count(self) -> bool:
        """Whether it may sum numbers that losses are divided by."""
        return (
            self.scale is not None
            and self.name == "all_reduce"
            and not self.is_differentiable
            and self.tensors[0].numel() <= _MOST_COUNTS
            and self.tensors[0].dtype != torch.bool
        )

    @property
    def is_large(self) -> bool:
        """Whether it sums so many numbers that they may be no counts: statistics, for example."""
        return self.tensors[0].numel() > _FEW

    def run_alone(self) -> bool:
        """Answer as if all ranks had sent what this one sends; return whether that is possible."""
        if self.name in ("all_gather", "all_gather_into_tensor") and len(self.sent) == 1:
            for received in self.tensors:
                received.view(-1, *self.sent[0].shape).copy_(self.sent[0])
        elif self.name in ("all_reduce", "reduce"):
            for tensor in self.tensors:
                tensor.mul_(self.scale or 1)
        else:
            return self.name in ("barrier", "broadcast", "monitored_barrier")
        return True

    def __str__(self) -> str:
        file, line = self.place[0] if self.place else ("a file that is not known", 0)
        return f"{self.name} in {file}:{line} ({self.module})"


# Called with a collective; returns whether it was handled. If not, the collective runs.
Handler = Callable[[Collective], bool]


@contextmanager
def noticed_collectives(handle: Handler) -> Iterator[None]:
    """While open, pass the collectives of this process to ``handle``.

    They are seen where PyTorch passes them to a process group. The name or library of the call does
    not matter. DistributedDataParallel's own are not seen, nor are functional collectives, which
    torch.compile and DTensor use.
    """
    if not dist.is_available():
        yield
        return
    methods = {
        name: _method(_NAMES.get(name, name), handle)
        for name in filter(_METHOD.match, dir(dist.ProcessGroup))
    }
    with replaced_functions([dist.ProcessGroup], methods):
        yield


class PretendedRanks:
    """Tells code on one rank that there are two, so that it adds up its counts over ranks.

    A function that cannot work with two ranks sees one rank: see :meth:`spare`. While two ranks are
    pretended, also open :func:`noticed_collectives`, because there is no group to run collectives.

    Attributes:
        spared: functions that see one rank, by file and line.
    """

    NUM_RANKS = 2

    def __init__(self) -> None:
        self.spared: set[str] = set()
        self._asked: set[str] = set()

    @contextmanager
    def told(self) -> Iterator[None]:
        """While open, code that asks is told that there are two ranks, and that it is rank 0."""
        pretended = dist.ProcessGroup(0, self.NUM_RANKS)  # type: ignore[call-arg, arg-type]

        def answer(group: Any) -> Any:
            # Often a helper, is_dist_avail_and_initialized(), and the code that calls it.
            askers = {_name(frame.f_code) for frame in islice(_callers(), 2)}
            self._asked |= askers
            return group if askers & self.spared else pretended

        with default_group_answered(answer):
            yield

    def spare(self, error: BaseException) -> bool:
        """Show one rank to the innermost function that asked for ranks and led to an error.

        Returns:
            bool: whether there is one. If not, the error has another cause.
        """
        for frame, _ in reversed(list(traceback.walk_tb(error.__traceback__))):
            name = _name(frame.f_code)
            if name in self._asked - self.spared:
                self.spared.add(name)
                return True
        return False


def place_of_caller(depth: int = 3) -> Place:
    """File and line of the innermost code that is neither PyTorch's nor ours.

    The result is the same on all machines, wherever the code is installed.
    """
    return tuple((_file(frame.f_code), frame.f_lineno) for frame in islice(_callers(), depth))


def _file(code: CodeType) -> str:
    return "/".join(Path(code.co_filename).parts[-2:])


def _name(code: CodeType) -> str:
    return f"{_file(code)}:{code.co_firstlineno}"


def _callers() -> Iterator[FrameType]:
    """Frames of the model's code, innermost first, up to the module whose forward it is.

    They are the same if a part of the forward is computed again in the backward.
    """
    frames = dropwhile(_passes_on, _frames())
    return takewhile(lambda frame: not _passes_on(frame), frames)


def _passes_on(frame: FrameType) -> bool:
    return any(part in frame.f_code.co_filename for part in _PASSED_ON)


def _frames() -> Iterator[FrameType]:
    frame: Optional[FrameType] = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def _collective(name: str, args: Sequence[Any], num_ranks: int) -> Collective:
    module = "no module"
    is_differentiable = False
    for frame in _frames():
        owner = frame.f_locals.get("self")
        if isinstance(owner, nn.Module):
            module = type(owner).__name__
            break
        # The forward of a function with its own backward.
        is_differentiable |= frame.f_code.co_filename == _FUNCTION
    tensors = _flat(args[:1])
    sent = _flat(args[1:2])
    op = getattr(args[1], "reduceOp", args[1]) if len(args) > 1 else None
    return Collective(
        name,
        place_of_caller(),
        module,
        tensors,
        sent,
        num_ranks,
        _scale(op, num_ranks) if "reduce" in name and not sent else None,
        is_differentiable or any(t.requires_grad for t in tensors),
    )


def _method(name: str, handle: Handler) -> Callable[..., Any]:
    def replacement(original: Callable[..., Any]) -> Callable[..., Any]:
        def method(group: dist.ProcessGroup, *args: Any, **kwargs: Any) -> Any:
            call = _collective(name, args, group.size())
            return _Done() if handle(call) else original(group, *args, **kwargs)

        return method

    return replacement


def _scale(op: Any, num_ranks: int) -> Optional[int]:
    if op == dist.ReduceOp.SUM:
        return num_ranks
    return 1 if op == dist.ReduceOp.AVG else None


def _flat(value: Any) -> list[Any]:
    if isinstance(value, (list, tuple)):
        return [t for part in value for t in _flat(part)]
    return [value] if isinstance(value, torch.Tensor) else []


class _Done:
    """The handle of a finished collective."""

    def wait(self, *args: Any) -> bool:
        return True
