# Copyright (c) the d2_memfit developers.
"""Workspaces of convolutions: memory besides input, weight and result."""

import math
from typing import Callable

from .timeline import Convolution

__all__ = ["WORKSPACES"]

_MANY_CHANNELS = 128


def _none(c: Convolution) -> int:
    return 0


def _layout(c: Convolution) -> int:
    """Bytes of copies of input, weight and result in another memory layout.

    Kernels for tensor cores and oneDNN need channels-last or blocked layouts.
    """
    sizes = sum(math.prod(shape) for shape in (c.input, c.weight, c.output))
    return sizes * c.dtype.itemsize


def _fft_or_winograd(c: Convolution) -> int:
    """Workspace of cuDNN 7 on cards without tensor cores, which transforms tiles.

    In 16 bits, for which there are tensor cores, it is the workspace of other layouts. Fourier
    transforms are used if the filter's are smaller than the data's and offsets in both fit into 32
    bits. Otherwise a 3 x 3 filter uses Winograd's, and other filters take no workspace.

    Sources: cuDNN's manual on CUDNN_CONVOLUTION_FWD_ALGO_FFT_TILING, whose tiles are 32 x 32; Lavin
    and Gray, "Fast Algorithms for Convolutional Neural Networks", arXiv:1509.09308. The rule that
    few channels are not transformed is fitted to the figures of Detectron2's zoo: a mask head's 80
    are not, and 1230 of LVIS are.
    """
    if c.dtype.itemsize < 4:
        return _layout(c)
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


# By the name in a device's file.
WORKSPACES: dict[str, Callable[[Convolution], int]] = {
    "none": _none,
    "layout": _layout,
    "fft_or_winograd": _fft_or_winograd,
}
