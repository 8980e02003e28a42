# Copyright (c) the d2_memfit developers.
"""What is replaced while a forward and its backward run, so that a model's counts can be answered.

Four things, all undone at the end of the ``with``: the collective methods of ``ProcessGroup``;
the function behind ``F.cross_entropy``; the property that tells of the default process group; and
methods of a few well-known criteria, whose counts cannot be seen from outside (:mod:`.means`).
"""

import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from traceback import walk_stack
from types import SimpleNamespace
from typing import Any, TypeVar
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.distributed.nn  # its functions' default group is the group at import
from torch import nn
from torch.autograd.function import FunctionCtx

from ..common.compat import cross_entropy_owner, default_group_replaced, tree_iter
from .means import answered_means
from .window import MicroBatch, count_objects

# The methods behind torch.distributed's functions.
_METHOD = re.compile(r"_?(all|barrier|broadcast|gather|monitored_barrier|recv|reduce|scatter|send)")
# Files of helper functions: a collective's place is the code that calls them.
_HERE, _PYTORCH = str(Path(__file__).parents[1]), str(Path(torch.__file__).parent)
_PASSED_ON = (_PYTORCH, _HERE, "/detectron2/utils/comm.py")
_MOST_COUNTS = 4096  # numbers in a tensor that are taken for counts, such as one for each class
_REDUCTION_MEAN = 1  # what PyTorch's functions of losses call it

Place = tuple[tuple[str, int], ...]  # file and line of the call and its callers, innermost first


class Collective:
    """One call of a collective.

    Attributes:
        name: that of the method behind it.
        place: where the model's code calls it.
        tensors: the tensors that the call changes in place.
        num_ranks: those of its group.
        scale: factor by which an all_reduce multiplies a value that all ranks have: the ranks of
            its group for a sum, 1 for a mean; 0 for other calls.
        is_count: whether it may sum numbers that losses are divided by.
    """

    def __init__(self, name: str, args: Sequence[Any], num_ranks: int) -> None:
        self.name, self.num_ranks, self.place = name, num_ranks, place_of_caller()
        self.tensors = [t for t in tree_iter(args[:1]) if isinstance(t, torch.Tensor)]
        op = getattr(args[1], "reduceOp", args[1]) if len(args) > 1 else None
        factor = num_ranks if op == dist.ReduceOp.SUM else 1 if op == dist.ReduceOp.AVG else 0
        self.scale = factor if name == "allreduce" else 0
        self.is_count = (
            self.scale > 0
            and self.tensors[0].numel() <= _MOST_COUNTS
            and self.tensors[0].dtype != torch.bool
            and not (self.tensors[0].requires_grad or _is_in_function_with_backward())
        )

    def run_alone(self) -> bool:
        """Answer as if all ranks had sent what this one sends; return whether that was done."""
        if self.num_ranks == 1:  # a group of this process alone
            return False
        for tensor in self.tensors if self.scale else ():
            tensor.detach().mul_(self.scale)
        return self.scale > 0 or self.name in ("barrier", "broadcast", "reduce")

    def __str__(self) -> str:
        file, line = self.place[0] if self.place else ("a file that is not known", 0)
        return f"{self.name.strip('_').replace('all', 'all_')} in {file}:{line}"


@contextmanager
def noticed_collectives(handle: Callable[[Collective], bool]) -> Iterator[None]:
    """While open, pass the collectives of this process to ``handle``, and run those for which it
    returns False.

    They are seen where PyTorch passes them to a process group. The name or library of the call does
    not matter. DistributedDataParallel's own are not seen, nor are functional collectives, which
    torch.compile and DTensor use.
    """

    def noticed(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def method(group: dist.ProcessGroup, *args: Any, **kwargs: Any) -> Any:
            is_done = handle(Collective(name, args, group.size()))
            return done if is_done else original(group, *args, **kwargs)

        return method

    done = SimpleNamespace(wait=lambda *_: True)  # the handle of a finished collective
    with ExitStack() as stack:
        for name in filter(_METHOD.match, dir(dist.ProcessGroup)):
            method = noticed(name, getattr(dist.ProcessGroup, name))
            stack.enter_context(patch.object(dist.ProcessGroup, name, method))
        yield


@cache  # one function: torch.compile compiles again for another
def _cross_entropy(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def cross_entropy(logits: Any, target: Any, weight: Any, *rest: Any) -> torch.Tensor:
        loss = original(logits, target, weight, *rest)
        is_other = weight is None or target.is_floating_point() or rest[0] != _REDUCTION_MEAN
        if is_other or counts is None or torch.compiler.is_compiling():
            return loss
        is_counted = target != rest[1]
        weight = weight.to(torch.promote_types(weight.dtype, torch.float32))
        own = (weight[target.where(is_counted, 0)] * is_counted).sum()
        return loss * counts.factor(own, 1e-12)

    return cross_entropy


# The Answers while a forward runs.
counts: Any = None
Number = TypeVar("Number", float, torch.Tensor)

# The kind of count ("sum" over ranks, "count" or "mean"), its place, and the number of the call
# there in one forward. Plain types, for checkpoints.
Site = tuple[str, Place, int]
Numbers = dict[Site, torch.Tensor]  # float64 on the host; a vector has a number for each class
FEW = 16  # numbers in a sum over ranks that are counts in any case; more may be statistics
OBJECTS: Site = ("objects", (), 0)
IMAGES: Site = ("images", (), 0)


@dataclass
class Answers:
    """Notes the counts of forwards, and answers them with those of the window.

    A count without a total is answered with the forward's own, as if all ranks had the same.
    With one, a sum over objects is divided by ``total x share``, the share being the micro-batch's
    images over the window's. The trainer multiplies the loss by its images over
    ``expected_images``, and the reduction by ``expected_images`` over the window's images. The sum
    over ``total`` is left.

    Args:
        model: the model that runs.
        is_exact: whether means of Detectron2's heads are counted, too.
        on_other: handles collectives that are not counts.
        report: a ``LossReport``, for how the losses are weighted.
        totals: the window's counts, of all ranks.
        images: those of the window, of all ranks and of this one.
        ranks: number of ranks that take part.
    """

    model: nn.Module
    is_exact: bool
    on_other: Callable[[Collective], bool]
    report: Any
    totals: Numbers = field(default_factory=dict)
    images: tuple[float, float] = (0.0, 0.0)
    ranks: int = 1
    # Counts of each completed forward; losses of Detectron2's heads that are not counted; and
    # whether a running mean over windows was asked for.
    noted: list[dict[Site, Any]] = field(default_factory=list)
    nearly: set[str] = field(default_factory=set)
    estimates: bool = False

    def __post_init__(self) -> None:
        self._forward: dict[Site, Any] = {}  # the running one
        self._calls: Counter[Any] = Counter()
        self._means = answered_means(self.model, self.is_exact, lambda: counts)

    @contextmanager
    def around(self, micro_batch: MicroBatch) -> Iterator[None]:
        """Answer in a micro-batch's forward, and in its backward, which may compute parts again."""
        self._calls.clear()
        self._forward = {OBJECTS: count_objects(micro_batch.data), IMAGES: micro_batch.num_images}
        entropy = _cross_entropy(cross_entropy_owner.cross_entropy_loss)
        with ExitStack() as stack:
            stack.enter_context(patch(f"{__name__}.counts", self))
            stack.enter_context(noticed_collectives(self._handle))
            stack.enter_context(patch.object(cross_entropy_owner, "cross_entropy_loss", entropy))
            for cls, name, method in self._means:
                stack.enter_context(patch.object(cls, name, method))
            if self.report.simulates_ranks:
                stack.enter_context(default_group_replaced(2))
            yield

    @property
    def own_share(self) -> float:
        """The running micro-batch's share of the images of this rank, for a running mean."""
        self.estimates = True
        return self._share(self.images[1])

    def count(self, own: Number, minimum: float) -> Number:
        """Answer :func:`window_count`: this forward's share of the window's count."""
        return self._answer("count", own, minimum)

    def factor(self, own: Number, minimum: float) -> Number:
        """Factor that makes a loss, a mean over ``own`` elements, the window's mean."""
        return _limited(own, minimum) / self._answer("mean", own, minimum)

    def weighted(self, losses: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """At the end of a forward: the losses, so that the micro-batch's share of the images is the
        right weight of each.
        """
        self.noted.append(self._forward)
        self._calls.clear()
        share, weights = self._share(self.images[0]), self.report.weights
        factors = {"sum": 1 / (share * self.ranks)}
        if OBJECTS in self.totals:  # a batch without any object is divided by 1
            own, whole = self._forward[OBJECTS], self.totals[OBJECTS].item()
            factors["objects"] = max(own, 1) / (max(whole, 1) * share)
        return {k: v * factors[weights[k]] if k in weights else v for k, v in losses.items()}

    def _share(self, images: float) -> float:
        return self._forward[IMAGES] / images if images else 1.0

    def _answer(self, kind: str, own: Number, minimum: float) -> Number:
        site = self._note(kind, own)
        if site not in self.totals:
            return _limited(own, minimum)
        answer = self.totals[site].clamp(min=minimum) * self._share(self.images[0])
        if isinstance(own, torch.Tensor):
            dtype = own.dtype if own.is_floating_point() else torch.float32
            return answer.reshape(own.shape).to(own.device, dtype)
        return answer.item()

    def _handle(self, call: Collective) -> bool:
        if not call.is_count:
            return call.num_ranks > 1 and self.on_other(call)
        tensor = call.tensors[0].detach()
        site = self._note("sum", tensor)
        if site in self.totals:
            answer = self.totals[site] / self.ranks * call.scale
            answer = answer if tensor.is_floating_point() else answer.round()
            tensor.copy_(answer.reshape(tensor.shape))
            return True
        is_statistics = self.ranks > 1 and tensor.numel() > FEW
        return self.on_other(call) if is_statistics else call.run_alone()

    def _note(self, kind: str, value: Any) -> Site:
        place = place_of_caller()
        site = (kind, place, self._calls[kind, place])
        self._calls[kind, place] += 1
        self._forward[site] = torch.as_tensor(value).detach().clone()
        return site


def _limited(own: Number, minimum: float) -> Number:
    if isinstance(own, torch.Tensor):
        return own.detach().float().clamp(min=minimum)
    return max(own, minimum)


def place_of_caller(depth: int = 3) -> Place:
    """File and line of the innermost code that is neither PyTorch's nor ours, and its callers.

    The result is the same on all machines, wherever the code is installed, and in a part of the
    forward that runs again.
    """
    place: list[tuple[str, int]] = []
    for frame, line in walk_stack(sys._getframe(1)):
        file = frame.f_code.co_filename
        if not any(part in file for part in _PASSED_ON):
            place.append(("/".join(Path(file).parts[-2:]), line))
        elif place:
            break
    return tuple(place[:depth])


def _is_in_function_with_backward() -> bool:
    """Whether an ``autograd.Function`` of the module that runs makes this call."""
    for frame, _ in walk_stack(sys._getframe(1)):
        is_module = isinstance(frame.f_locals.get("self"), nn.Module)
        if is_module or any(isinstance(v, FunctionCtx) for v in frame.f_locals.values()):
            return not is_module
    return False


def added(counts: Iterable[Mapping[Site, Any]]) -> Numbers:
    """Sums of counts, site by site. This waits for counts on a device."""
    sums: Numbers = {}
    for of_forward in counts:
        for site, count in of_forward.items():
            own = torch.as_tensor(count).detach().to("cpu", torch.float64).reshape(-1)
            before = sums.get(site, torch.zeros_like(own))
            # NaN: with other shapes it is not a count of anything.
            sums[site] = before + (own if own.shape == before.shape else torch.nan)
    return sums


def is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether counts are equal, to the rounding of float32."""
    return one.shape == other.shape and torch.allclose(one, other, rtol=1e-5, atol=1e-5)
