# Copyright (c) the d2_memfit developers.
"""Stand-ins for compiled operators: the same allocations as on a GPU, without values.

Deformable convolution is torchvision's operator, which has a meta kernel. Its weights are those of
Detectron2's modules. Deformable attention is that of Deformable DETR, which other projects have by
the same name.
"""

import math
import sys
from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from typing import Any

import torch
from detectron2 import layers
from detectron2.modeling.backbone import resnet
from torch import nn
from torch.autograd import Function

from ..common.patching import Groups
from ..compat import pretended_compiled_ops
from ..compat.pytorch import pair

__all__ = ["compiled_operators"]

deform_conv = import_module("detectron2.layers.deform_conv")  # a function has this name, too

_ATTENTION = "MultiScaleDeformableAttention"

_deform_conv2d = torch.ops.torchvision.deform_conv2d
_deform_conv2d_backward = torch.ops.torchvision._deform_conv2d_backward


def compiled_operators() -> Groups:
    """For :func:`cuda_as_cpu`: run models that need operators compiled by Detectron2 for a GPU."""
    functions = {"deform_conv": _convolve, "modulated_deform_conv": _convolve_modulated}
    places: list[tuple[Any, dict[str, Any]]] = [(deform_conv, functions)]
    if _ATTENTION in sys.modules:
        attention = {"ms_deform_attn_forward": _attend, "ms_deform_attn_backward": _attend_backward}
        places.append((sys.modules[_ATTENTION], attention))
    if not issubclass(deform_conv.DeformConv, nn.Module):
        classes = {name: getattr(_source(), name) for name in ("DeformConv", "ModulatedDeformConv")}
        places += [(layers, classes), (resnet, classes), (_source(), functions)]
    return [([file], {k: _by(f) for k, f in functions.items()}) for file, functions in places]


def _by(new: Any) -> Callable[[Any], Any]:
    return lambda original: new


@cache
def _source() -> Any:
    """The module of deformable convolutions, loaded as if its operators were compiled.

    Without them, Detectron2's main branch has classes there that only raise.
    """
    spec = spec_from_file_location("detectron2.layers.deform_conv", deform_conv.__file__)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    with pretended_compiled_ops():
        spec.loader.exec_module(module)
    return module


class _Deformable(Function):
    """Deformable convolution with the buffers of Detectron2's deform_conv_cuda.cu.

    They are columns of ``images_at_once`` images and, without a mask, a copy of the result or of
    its gradient.
    """

    @staticmethod
    def forward(ctx: Any, images_at_once: int, settings: Any, *tensors: Any) -> torch.Tensor:
        x, weight, _, mask, _ = tensors
        ctx.images_at_once, ctx.settings = images_at_once, settings
        ctx.save_for_backward(*tensors)
        result = _deform_conv2d(*_all_there(tensors), *settings, mask is not None)
        _buffers(x, weight, result, images_at_once, mask is None)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        x, weight, _, mask, _ = tensors = ctx.saved_tensors
        gradients = _deform_conv2d_backward(
            gradient, *_all_there(tensors), *ctx.settings, mask is not None
        )
        _buffers(x, weight, gradient, ctx.images_at_once, mask is None)
        return None, None, *(g if t is not None else None for g, t in zip(gradients, tensors))


def _buffers(
    x: torch.Tensor, weight: torch.Tensor, y: torch.Tensor, images_at_once: int, copies: bool
) -> None:
    rows = x.shape[1] * math.prod(weight.shape[2:])
    _ = x.new_zeros(rows, images_at_once * math.prod(y.shape[2:])), y.clone() if copies else None


def _all_there(tensors: Any) -> Any:
    x, weight, offset, mask, bias = tensors
    mask = x.new_zeros(len(x), 1) if mask is None else mask
    return x, weight, offset, mask, x.new_zeros(len(weight)) if bias is None else bias


def _convolve(x: torch.Tensor, offset: Any, weight: Any, *settings: Any) -> Any:
    images_at_once = max(n for n in range(1, 65) if len(x) % n == 0)
    return _Deformable.apply(images_at_once, _pairs(*settings), x, weight, offset, None, None)


def _convolve_modulated(
    x: torch.Tensor, offset: Any, mask: Any, weight: Any, bias: Any, *settings: Any
) -> Any:
    return _Deformable.apply(1, _pairs(*settings), x, weight, offset, mask, bias)


def _pairs(stride: Any, padding: Any, dilation: Any, *groups: int) -> tuple[int, ...]:
    return *pair(stride), *pair(padding), *pair(dilation), *groups


def _attend(
    value: torch.Tensor, sizes: Any, starts: Any, locations: torch.Tensor, *args: Any
) -> torch.Tensor:
    """Deformable attention without values.

    Args:
        value: [images, pixels, heads, channels].
        locations: [images, queries, heads, levels, points, 2].
    """
    return value.new_zeros(*locations.shape[:2], math.prod(value.shape[2:]))


def _attend_backward(
    value: torch.Tensor,
    sizes: Any,
    starts: Any,
    locations: torch.Tensor,
    weights: torch.Tensor,
    *args: Any,
) -> Any:
    return torch.zeros_like(value), torch.zeros_like(locations), torch.zeros_like(weights)
