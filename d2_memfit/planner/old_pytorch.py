# Copyright (c) the d2_memfit developers.
"""Tensors that PyTorch before 1.11 kept for the backward, as on the zoo's machines."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, Optional

import torch
from torch.autograd import Function
from torch.nn import functional

from ..patching import replaced_functions

__all__ = ["pytorch_before_1_11"]


@contextmanager
def pytorch_before_1_11() -> Iterator[None]:
    """While open, ``relu``, ``softmax`` and ``cross_entropy`` keep their inputs for the backward.

    Sources: pytorch#63027 on ReLU (in-place ReLU keeps its result); pytorch#64000 on softmax and
    log_softmax, whose inputs were kept until pytorch#65242.
    """
    losses = {"softmax": _keeping_its_input, "cross_entropy": _cross_entropy}
    with (
        replaced_functions([torch], {"relu": lambda _: _Relu.apply}),
        replaced_functions([functional], losses),
    ):
        yield


class _Relu(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return torch.ops.aten.relu(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return torch.ops.aten.threshold_backward(gradient, x, 0)


class _Keep(Function):
    """Returns a tensor, and keeps another one until the backward."""

    @staticmethod
    def forward(ctx: Any, result: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(kept)
        return result.view_as(result)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient, None


def _keeping_its_input(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def keep_input(input: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        kept: torch.Tensor = _Keep.apply(original(input, *args, **kwargs), input.detach())
        return kept

    return keep_input


def _cross_entropy(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def cross_entropy(
        input: torch.Tensor,
        target: torch.Tensor,
        weight: Optional[torch.Tensor] = None,
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        scores = _keeping_its_input(functional.log_softmax)(input, 1)
        return functional.nll_loss(scores, target, weight, *args, **kwargs)

    return cross_entropy
