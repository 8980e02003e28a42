# Copyright (c) the d2_memfit developers.
"""The software with which published jobs were trained, where it took other memory."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import wraps
from pathlib import Path
from typing import Any, Union

import torch
from torch.autograd import Function
from torch.nn import functional

from d2_memfit.common.patching import replaced_functions
from d2_memfit.planner.device import DeviceModel
from d2_memfit.planner.dry_run import Allocate, Convolution, Free, Timeline

__all__ = ["V100", "OldDevice", "pytorch_before_1_11"]

_MANY_CHANNELS = 128


@dataclass(frozen=True)
class OldDevice(DeviceModel):
    """A GPU with the software of 2022 and before.

    The optimizer updated parameters one by one. cuBLAS took its workspace from the device itself
    until PyTorch 1.11, not from the allocator. ``optimizer.zero_grad()`` filled gradients with
    zeros: they were there in each forward.
    """

    @classmethod
    def load(cls, name: Union[str, Path]) -> DeviceModel:
        """The card of a device file, with old software."""
        return replace(super().load(name), foreach=False, cublas_workspace_mb=0)

    def events(self, timeline: Timeline) -> Iterator[Union[Allocate, Free]]:
        for event in super().events(timeline):
            is_of_setup = event.allocation.phase == "setup" and isinstance(event, Allocate)
            if is_of_setup or event.allocation.owner != "gradients":
                yield event


class V100(OldDevice):
    """The machines that trained Detectron2's model zoo: V100s in 2019 and 2020, with cuDNN 7."""

    def workspace_bytes(self, c: Convolution) -> int:
        """Workspace of cuDNN 7 on cards without tensor cores, which transforms tiles.

        In 16 bits, for which there are tensor cores, it is the workspace of other layouts. Fourier
        transforms are used if the filter's are smaller than the data's and offsets in both fit into
        32 bits. Otherwise a 3 x 3 filter uses Winograd's, and other filters take no workspace.

        Sources: cuDNN's manual on CUDNN_CONVOLUTION_FWD_ALGO_FFT_TILING, whose tiles are 32 x 32;
        Lavin and Gray, "Fast Algorithms for Convolutional Neural Networks", arXiv:1509.09308. The
        rule that few channels are not transformed is fitted to the figures of Detectron2's zoo: a
        mask head's 80 are not, and 1230 of LVIS are.
        """
        if c.dtype.itemsize < 4:
            return super().workspace_bytes(c)
        is_dense = len(c.weight) == 4 and set(c.stride) == {1} and c.groups == 1
        if not is_dense:
            return 0
        channels_out, channels_in, *kernel = c.weight
        num_images, _, *size = c.output
        # Real transforms of 32 x 32 tiles: 32 x 17 complex numbers of 8 bytes.
        tiles = num_images * math.prod(math.ceil(s / (33 - k)) for s, k in zip(size, kernel))
        data = tiles * (channels_in + channels_out) * 32 * 17 * 8
        filters = channels_in * channels_out * 32 * 17 * 8
        if filters < data <= 2**31 and min(channels_in, channels_out) >= _MANY_CHANNELS:
            return data + filters
        if kernel != [3, 3]:
            return 0
        # Tiles of 6 x 6 for each 4 x 4 results.
        tiles = num_images * math.prod(math.ceil(s / 4) for s in size)
        return 36 * 4 * (tiles * (channels_in + channels_out) + channels_in * channels_out)


@contextmanager
def pytorch_before_1_11() -> Iterator[None]:
    """While open, ``relu``, ``softmax`` and ``cross_entropy`` keep their inputs for the backward.

    Sources: pytorch#63027 on ReLU (in-place ReLU keeps its result); pytorch#64000 on softmax and
    log_softmax, whose inputs were kept until pytorch#65242.
    """
    keeping = dict.fromkeys(("softmax", "cross_entropy"), _keeping_its_input)
    with (
        replaced_functions([torch], {"relu": lambda _: _Relu.apply}),
        replaced_functions([functional], keeping),
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
