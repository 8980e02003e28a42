# Copyright (c) the d2_memfit developers.
"""A short vector that stands for the gradient of all parameters."""

import math
from collections.abc import Iterable

import torch
from torch import nn

__all__ = ["relative", "sketch_of_gradients"]

_LENGTH = 2**16
_SIGNS = 8  # signs of a row are the product of two of so many


def sketch_of_gradients(parameters: Iterable[nn.Parameter]) -> torch.Tensor:
    """Sum the gradients' elements, with random signs, into 65,536 numbers in float64.

    It is linear, so that sums and differences of gradients can be taken of sketches, and norms are
    kept within a few percent (the count sketch of Charikar, Chen and Farach-Colton, 2002). A model
    with fewer parameters has its gradient itself, with some signs changed.
    """
    sums = torch.zeros(_LENGTH, dtype=torch.float64)
    signs = _signs()
    position = row = 0
    for p in parameters:
        rest = torch.zeros(p.numel()) if p.grad is None else p.grad.detach()
        rest = rest.to_dense().flatten().to("cpu", torch.float64)
        while len(rest):
            part = slice(position, min(position + len(rest), _LENGTH))
            now, rest = rest.split([part.stop - position, len(rest) - part.stop + position])
            sign = signs[0, row % _SIGNS, part] * signs[1, row // _SIGNS % _SIGNS, part]
            sums[part] += now * sign
            position = part.stop % _LENGTH
            row += position == 0
    return sums


def _signs() -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 2, (2, _SIGNS, _LENGTH), generator=generator, dtype=torch.int8) * 2 - 1


def relative(difference: torch.Tensor, gradient: torch.Tensor) -> float:
    """Norm of a difference over that of a gradient; infinite if one is not finite."""
    off, scale = float(difference.norm()), float(gradient.norm())
    if not (math.isfinite(off) and math.isfinite(scale)):
        return math.inf
    return off / scale if scale else (math.inf if off else 0.0)
