# Copyright (c) the d2_memfit developers.
"""Forwards that leave nothing behind, and whose images do not depend on their batch."""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from detectron2.utils.events import EventStorage, get_event_storage
from torch import nn
from torch.overrides import TorchFunctionMode

from ..state import Snapshot

__all__ = ["SameDraws", "without_traces"]

# The functions at import: other contexts may replace them later.
_RANDPERM = torch.randperm
_DRAWS = (
    _RANDPERM,
    torch.bernoulli,
    torch.rand,
    torch.rand_like,
    torch.randint,
    torch.randint_like,
    torch.randn,
    torch.randn_like,
    torch.Tensor.bernoulli_,
    torch.Tensor.normal_,
    torch.Tensor.uniform_,
)
_DROPOUT = (F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout)


@contextmanager
def without_traces(model: nn.Module) -> Iterator[None]:
    """Run forwards without gradients that leave the model, random states and log unchanged.

    Attributes of the model's modules, such as ``training``, are put back, too.
    """
    snapshot = Snapshot(model)
    try:
        with torch.no_grad(), EventStorage(get_event_storage().iter):
            yield
    finally:
        snapshot.restore()


class SameDraws(TorchFunctionMode):
    """While open, random numbers do not depend on earlier ones, and nothing is dropped.

    It is for tests of a model: nothing is trained under it.

    Args:
        seed: another one gives other numbers.
        same_rows: whether all rows of a random tensor have the same numbers. An object's are then
            the same in whatever batch it is.
    """

    def __init__(self, seed: int = 0, same_rows: bool = True) -> None:
        super().__init__()
        self._seed = seed
        self._same_rows = same_rows

    def __enter__(self) -> Any:
        self._seed_all()
        return super().__enter__()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _DROPOUT:
            return args[0] if args else kwargs["input"]
        if func not in _DRAWS:
            return func(*args, **kwargs)
        self._seed_all()
        drawn = func(*args, **kwargs)
        if func is _RANDPERM:  # of the anchors or proposals of an image
            return drawn.copy_(torch.arange(len(drawn)).roll(self._seed * len(drawn) // 3))
        if self._same_rows and drawn.dim() > 0 and len(drawn) > 0:
            drawn.detach().copy_(drawn[:1].clone().expand_as(drawn))
        return drawn

    def _seed_all(self) -> None:
        random.seed(self._seed)
        np.random.seed(self._seed)
        torch.manual_seed(self._seed)
