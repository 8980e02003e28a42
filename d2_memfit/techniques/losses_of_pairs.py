# Copyright (c) the d2_memfit developers.
"""Losses that are sums over pairs of queries and objects, computed for some pairs at a time."""

from collections.abc import Sequence
from functools import partial
from inspect import signature
from typing import Any, Callable, Optional

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import set_checkpoint_early_stop

from ..random_state import RandomState
from ..torch_private import tree_iter
from .objects import chunks_of, count_objects, device_of, is_targets, take_objects
from .recomputation import recompute_in_backward

__all__ = ["LossCall"]
_rand = torch.rand  # a dry run replaces the function


class LossCall:
    """A call of a criterion's loss: (predictions, targets, indices, number of objects, ...).

    Args:
        loss: the criterion's method, called as ``loss(criterion, *args, **kwargs)``.
        args: ``indices`` holds, for each image, the numbers of queries and of their objects.

    Attributes:
        counts: numbers of pairs in each image; None if the arguments have another form.
        device: device of the predictions.
    """

    def __init__(
        self,
        loss: Callable[..., Any],
        criterion: nn.Module,
        args: Sequence[Any],
        kwargs: dict[str, Any],
    ) -> None:
        self._loss = loss
        self._criterion = criterion
        bound = signature(loss).bind(criterion, *args, **kwargs)
        self._arguments = list(bound.args[1:])
        self._kwargs = bound.kwargs
        self._position = list(signature(loss).parameters).index("indices") - 1
        targets, self._indices = self._arguments[self._position - 1 : self._position + 1]
        self.counts: Optional[list[int]] = None
        if is_targets(targets) and count_objects(targets) and _are_pairs(self._indices):
            self.counts = [len(queries) for queries, _ in self._indices]
        self.device = device_of(self._arguments)

    def of(self, chosen: Sequence[slice]) -> "LossCall":
        """The call with only some pairs of each image, and their objects."""
        arguments = list(self._arguments)
        pairs = [(q[part], o[part]) for (q, o), part in zip(self._indices, chosen)]
        targets = arguments[self._position - 1]
        arguments[self._position - 1] = take_objects(targets, [objects for _, objects in pairs])
        arguments[self._position] = [(q, torch.arange(len(o), device=o.device)) for q, o in pairs]
        return LossCall(self._loss, self._criterion, arguments, self._kwargs)

    def run(self, chunk_size: int) -> tuple[Any, list[torch.Tensor]]:
        """Compute the loss in chunks.

        Args:
            chunk_size: pairs whose losses are computed at a time, and again in the backward.

        Returns:
            The result of the loss, and the values in it.
        """
        assert self.counts is not None
        state = RandomState(self.device)
        results, start = [], 0
        for chunk in chunks_of(self.counts, chunk_size):
            state.restore()
            part = slice(start, start + sum(s.stop - s.start for s in chunk))
            run = partial(self._run_chunk, chunk, _DrawnForAll(part, sum(self.counts)))
            if torch.is_grad_enabled():
                # Mask2Former's losses are TorchScript, which cannot be stopped half-way.
                with set_checkpoint_early_stop(False):
                    results.append(recompute_in_backward(self._criterion, run, *self._arguments))
            else:
                results.append(run())
            start = part.stop
        total = _sum(results)
        return total, [torch.as_tensor(value).detach() for value in tree_iter(total)]

    def _run_chunk(self, chunk: Sequence[slice], draws: "_DrawnForAll", *_: Any) -> Any:
        call = self.of(chunk)  # made here, and again in the backward: masks of objects are large
        with draws:
            return call._loss(call._criterion, *call._arguments, **call._kwargs)


class _DrawnForAll(TorchFunctionMode):
    """While open, random numbers for some pairs are the same as in a draw for all pairs.

    Args:
        part: the pairs.
        num: number of all pairs.
    """

    def __init__(self, part: slice, num: int) -> None:
        super().__init__()
        self._part = part
        self._num = num

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is _rand and args:
            shape = args if isinstance(args[0], int) else tuple(args[0])
            if shape[:1] == (self._part.stop - self._part.start,):
                return func(self._num, *shape[1:], **kwargs)[self._part].clone()
        return func(*args, **kwargs)


def _are_pairs(indices: Any) -> bool:
    return isinstance(indices, (list, tuple)) and all(
        isinstance(pair, (list, tuple)) and len(pair) == 2 and torch.is_tensor(pair[0])
        for pair in indices
    )


def _sum(results: Sequence[Any]) -> Any:
    if isinstance(results[0], dict):
        return {name: sum(result[name] for result in results) for name in results[0]}
    return sum(results)
