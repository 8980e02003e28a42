# Copyright (c) the d2_memfit developers.
"""PyTorch's losses with reduction "mean", which divide by a count of their own batch."""

import inspect
from collections.abc import Callable
from typing import Any, Optional, Protocol

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

__all__ = ["CountsOfMeans", "MeanLosses"]

_OF_CLASSES = (F.cross_entropy, F.nll_loss)
_ELEMENTWISE = (
    F.binary_cross_entropy,
    F.binary_cross_entropy_with_logits,
    F.huber_loss,
    F.l1_loss,
    F.mse_loss,
    F.smooth_l1_loss,
)
_SIGNATURES = {f: inspect.signature(f) for f in (*_OF_CLASSES, *_ELEMENTWISE)}
_MEANS = (torch.Tensor.mean, torch.mean)
_CLAMPS = (
    torch.clamp,
    torch.clamp_min,
    torch.clip,
    torch.Tensor.clamp,
    torch.Tensor.clamp_min,
    torch.Tensor.clip,
    torch.max,
    torch.maximum,
    torch.Tensor.max,
    torch.Tensor.maximum,
)
_CLAMPS_IN_PLACE = (torch.Tensor.clamp_, torch.Tensor.clamp_min_, torch.Tensor.clip_)


class CountsOfMeans(Protocol):
    """The source of the window's counts."""

    def count_of_mean(self, kind: str, count: torch.Tensor) -> Optional[float]:
        """Record the divisor of a mean; return the divisor to use in its place, or None.

        Args:
            kind: "weights" or "mean".
        """
        ...

    def share_of(self, value: float) -> Optional[float]:
        """The share of the window's count that a number was answered with; None if it was not."""
        ...


class MeanLosses(TorchFunctionMode):
    """While open, means of losses are taken over the window.

    These are the means of PyTorch's losses, and ``mean()`` of one- or two-dimensional losses, such
    as one per object. A lower limit of a count, such as ``clamp(num_boxes, min=1)``, applies to the
    window's count.

    Args:
        counts: source of the window's counts.
    """

    def __init__(self, counts: CountsOfMeans) -> None:
        super().__init__()
        self._counts = counts

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _SIGNATURES:
            return self._loss(func, args, kwargs)
        if func in _MEANS and len(args) == 1 and not kwargs and args[0].dim() in (1, 2):
            count = torch.tensor(float(args[0].numel()))
            divisor = self._counts.count_of_mean("mean", count)
            if divisor is not None and args[0].requires_grad:
                return args[0].sum() / divisor
        clamps = func in _CLAMPS or func in _CLAMPS_IN_PLACE
        if clamps and len(args) + len(kwargs) > 1 and _is_count(args[0]):
            share = self._counts.share_of(float(args[0].flatten()[0]))
            if share and func in _CLAMPS_IN_PLACE:
                return func(args[0].div_(share), *args[1:], **kwargs).mul_(share)
            if share:
                return func(args[0] / share, *args[1:], **kwargs) * share
        if func is torch.Tensor.item and _is_count(args[0]) and args[0].numel() == 1:
            value = args[0].item()
            share = self._counts.share_of(value)
            return ShareOfCount(value, share) if share else value
        return func(*args, **kwargs)

    def _loss(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        call = _SIGNATURES[func].bind(*args, **kwargs)
        call.apply_defaults()
        given = call.arguments
        is_old_style = given.get("size_average") is not None or given.get("reduce") is not None
        if given["reduction"] != "mean" or is_old_style:
            return func(*args, **kwargs)
        kind, count = "mean", None
        if func in _OF_CLASSES and not given["target"].is_floating_point():
            is_counted = given["target"] != given["ignore_index"]
            count = is_counted.sum()
            if given["weight"] is not None:
                kind = "weights"
                count = given["weight"].double()[given["target"][is_counted]].sum()
        elif func not in _OF_CLASSES:
            shape = torch.broadcast_shapes(given["input"].shape, given["target"].shape)
            count = torch.tensor(float(torch.Size(shape).numel()))
        if count is None:  # a distribution over classes: a mean over the batch
            return func(*args, **kwargs)
        divisor = self._counts.count_of_mean(kind, count)
        if divisor is None:
            return func(*args, **kwargs)
        given["reduction"] = "sum"
        total = func(*call.args, **call.kwargs)
        return total / divisor if divisor else total


class ShareOfCount(float):
    """A share of a count that compares like the whole count, as in ``max(num_positive, 1.0)``."""

    def __new__(cls, value: float, share: float) -> "ShareOfCount":
        self = super().__new__(cls, value)
        self._share = share
        return self

    _share: float

    def __truediv__(self, other: float) -> "ShareOfCount":
        return ShareOfCount(float(self) / other, self._share)

    def __lt__(self, other: float) -> bool:
        return float(self) / self._share < other

    def __gt__(self, other: float) -> bool:
        return float(self) / self._share > other

    def __le__(self, other: float) -> bool:
        return float(self) / self._share <= other

    def __ge__(self, other: float) -> bool:
        return float(self) / self._share >= other


def _is_count(value: Any) -> bool:
    if not isinstance(value, torch.Tensor) or value.requires_grad:
        return False
    return 0 < value.numel() <= 16 and value.is_floating_point()
