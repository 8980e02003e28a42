# Copyright (c) the d2_memfit developers.
"""Stand-ins for compiled operators: the same allocations as on a GPU, without values.

Deformable convolution is torchvision's operator, which has a meta kernel. Its weights are those of
Detectron2's modules. Deformable attention is that of Deformable DETR, which other projects have by
the same name.
"""

import math
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torchvision.ops import deform_conv2d

from ..common.patching import Groups

__all__ = ["compiled_operators"]

deform_conv = import_module("detectron2.layers.deform_conv")  # a function has this name, too

_ATTENTION = "MultiScaleDeformableAttention"


def compiled_operators() -> Groups:
    """For :func:`cuda_as_cpu`: run models that need operators compiled by Detectron2 for a GPU."""
    functions = {"deform_conv": _convolve, "modulated_deform_conv": _convolve_modulated}
    places: list[tuple[Any, dict[str, Any]]] = [(deform_conv, functions)]
    if _ATTENTION in sys.modules:
        attention = {"ms_deform_attn_forward": _attend, "ms_deform_attn_backward": _attend_backward}
        places.append((sys.modules[_ATTENTION], attention))
    return [([file], {k: _by(f) for k, f in functions.items()}) for file, functions in places]


def _by(new: Any) -> Callable[[Any], Any]:
    return lambda original: new


def _convolve(x: Any, offset: Any, weight: Any, *settings: Any) -> torch.Tensor:
    return deform_conv2d(x, offset, weight, None, *settings[:3])  # stride, padding, dilation


def _convolve_modulated(
    x: Any, offset: Any, mask: Any, weight: Any, bias: Any, *settings: Any
) -> torch.Tensor:
    return deform_conv2d(x, offset, weight, bias, *settings[:3], mask)


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
    value: Any, sizes: Any, starts: Any, locations: Any, weights: Any, *args: Any
) -> Any:
    return torch.zeros_like(value), torch.zeros_like(locations), torch.zeros_like(weights)
