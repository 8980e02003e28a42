# Copyright (c) the d2_memfit developers.
"""Memory of earlier software: PyTorch 1.6 to 1.13, and cuDNN 7.

Published figures are of such software. d2_memfit does not run on it.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
from torch.autograd import Function
from torch.nn import functional

from d2_memfit.common.patching import replaced_functions
from d2_memfit.planner import dry_run
from d2_memfit.planner.device import DeviceModel
from d2_memfit.planner.timeline import Allocate, Change, Free, Timeline

__all__ = ["OldDevice", "as_in_cudnn_7", "as_in_pytorch"]

_MANY_CHANNELS = 128


@dataclass(frozen=True)
class OldDevice(DeviceModel):
    """A device on which ``optimizer.zero_grad()`` fills gradients with zeros, as until 2.0.

    So they exist in each forward.
    """

    @classmethod
    def like(cls, device: DeviceModel, version: tuple[int, int]) -> DeviceModel:
        """A device with a release of PyTorch such as (1, 13).

        Until 2.0, the optimizer updated parameters one by one. Until 1.11, cuBLAS took its
        workspace from the device itself, not from the allocator.
        """
        if version >= (2, 0):
            return device
        megabytes = 0 if version < (1, 11) else device.cublas_workspace_mb
        return cls(**{**vars(device), "foreach": False, "cublas_workspace_mb": megabytes})

    def events(self, timeline: Timeline) -> Iterator[Change]:
        for event in super().events(timeline):
            is_first = isinstance(event, Allocate) and event.allocation.phase == "setup"
            is_change = isinstance(event, (Allocate, Free))
            if not is_change or event.allocation.owner != "gradients" or is_first:
                yield event


@contextmanager
def as_in_cudnn_7() -> Iterator[None]:
    """While open, convolutions in float32 take what cuDNN 7 took on cards without TF32."""
    taken = {"workspace_bytes": lambda layout: lambda *args: _bytes_of_transforms(layout, *args)}
    with replaced_functions(([dry_run], taken)):
        yield


def _bytes_of_transforms(
    layout: Any,
    x: torch.Tensor,
    weight: torch.Tensor,
    y: torch.Tensor,
    stride: tuple[int, ...],
    groups: int,
) -> int:
    """The workspace of Fourier's transform or, where that is not used, of Winograd's.

    Fourier's is used if the filter's transforms are smaller than the data's, and offsets in both
    fit into 32 bits; Winograd's for 3 x 3 filters.

    Sources: cuDNN's manual on CUDNN_CONVOLUTION_FWD_ALGO_FFT_TILING, whose tiles are 32 x 32; Lavin
    and Gray, "Fast Algorithms for Convolutional Neural Networks", arXiv:1509.09308. The rule that
    few channels are not transformed is fitted to the figures of Detectron2's zoo: a mask head's 80
    are not, and 1230 of LVIS are.
    """
    if x.dtype.itemsize < 4:
        num_bytes: int = layout(x, weight, y, stride, groups)
        return num_bytes
    if weight.dim() != 4 or set(stride) != {1} or groups != 1:
        return 0
    channels_out, channels_in, *kernel = weight.shape
    num_images, _, *size = y.shape

    def tiles_of(lengths: Iterable[int]) -> int:
        return num_images * math.prod(math.ceil(s / n) for s, n in zip(size, lengths))

    # Real transforms of 32 x 32 tiles: 32 x 17 complex numbers of 8 bytes.
    data = tiles_of(33 - k for k in kernel) * (channels_in + channels_out) * 32 * 17 * 8
    filters = channels_in * channels_out * 32 * 17 * 8
    if filters < data <= 2**31 and min(channels_in, channels_out) >= _MANY_CHANNELS:
        return data + filters
    if kernel != [3, 3]:
        return 0
    # Winograd's tiles of 6 x 6 for each 4 x 4 results.
    channels = tiles_of((4, 4)) * (channels_in + channels_out) + channels_in * channels_out
    return 36 * 4 * channels


@contextmanager
def as_in_pytorch(version: tuple[int, int]) -> Iterator[None]:
    """While open, functions keep what they kept in a release such as (1, 9), until the backward.

    ``relu`` kept its input until 1.10 (pytorch#63027; in place, it keeps its result), and
    ``cross_entropy`` until 1.11 (pytorch#64000, pytorch#65242). These say the same of ``softmax``,
    but runs with 1.10 did not keep it (docs/HOW_ACCURATE.md).
    """
    relu = {"relu": lambda _: _Relu.apply} if version < (1, 10) else {}
    loss = {"cross_entropy": _keeping_its_input} if version < (1, 11) else {}
    with replaced_functions(([torch], relu), ([functional], loss)):
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
