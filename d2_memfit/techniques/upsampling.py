# Copyright (c) the d2_memfit developers.
"""Upsampling to image size, done when it is needed."""

from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from .lazy_rows import LazyRows, on_meta

__all__ = ["UpsamplesLater"]

_interpolate = F.interpolate  # a dry run replaces the function


class UpsamplesLater(TorchFunctionMode):
    """While open, ``F.interpolate`` returns :class:`LazyRows` for results of at least image size.

    Examples are masks of queries and scores of classes.

    Args:
        batch: Detectron2's list of dicts with an image [3, height, width]. Other batches change
            nothing.
    """

    def __init__(self, batch: Any) -> None:
        super().__init__()
        is_known = isinstance(batch, list) and all(_has_image(image) for image in batch)
        sizes = [image["image"].shape[-2:] for image in batch] if is_known else []
        self._least = [min(lengths) for lengths in zip(*sizes)]  # height and width

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is _interpolate and self._least and args and _has_rows(args[0]):
            like = func(on_meta(args[0]), *args[1:], **kwargs)
            if all(a >= b for a, b in zip(like.shape[-2:], self._least)):
                return func(LazyRows.of(args[0], 2), *args[1:], **kwargs)
        return func(*args, **kwargs)


def _has_image(image: Any) -> bool:
    return isinstance(image, dict) and isinstance(image.get("image"), torch.Tensor)


def _has_rows(x: Any) -> bool:
    is_plain = type(x) is torch.Tensor and not (torch.is_grad_enabled() and x.requires_grad)
    return is_plain and x.dim() == 4 and x.is_floating_point()
