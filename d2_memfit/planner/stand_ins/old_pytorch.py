# Copyright (c) the d2_memfit developers.
"""Functions of earlier releases of PyTorch that keep more for the backward."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch.autograd import Function
from torch.nn import functional

from ...common.patching import replaced_functions

__all__ = ["as_in_pytorch"]


@contextmanager
def as_in_pytorch(version: tuple[int, int]) -> Iterator[None]:
    """While open, functions keep what they kept in a release such as (1, 9), until the backward.

    ``relu`` kept its input until 1.10 (pytorch#63027; in place, it keeps its result), and
    ``cross_entropy`` until 1.11 (pytorch#64000, pytorch#65242). These say the same of ``softmax``,
    but runs with 1.10 did not keep it (docs/HOW_ACCURATE.md).
    """
    relu = {"relu": lambda _: _Relu.apply} if version < (1, 10) else {}
    loss = {"cross_entropy": _keeping_its_input} if version < (1, 11) else {}
    with replaced_functions([torch], relu), replaced_functions([functional], loss):
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
    """Returns a tensor, and keeps it until the backward of what is made of the result."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient


def _keeping_its_input(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def keep_input(input: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        result: torch.Tensor = original(_Keep.apply(input), *args, **kwargs)
        return result

    return keep_input
