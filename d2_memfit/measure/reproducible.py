# Copyright (c) the d2_memfit developers.
"""PyTorch's settings under which two runs can be compared."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["deterministic", "deterministic_convolutions", "in_full_float32"]


@contextmanager
def deterministic() -> Iterator[None]:
    """While open, operators compute the same every time, as far as PyTorch has such."""
    algorithms = torch.are_deterministic_algorithms_enabled()
    with warnings.catch_warnings(), deterministic_convolutions():
        warnings.simplefilter("ignore")  # of operators that have no such algorithm
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(algorithms)


@contextmanager
def deterministic_convolutions() -> Iterator[None]:
    """While open, cuDNN computes the same every time. ROIAlign's backward does not, of which
    torchvision's deterministic one needs a compiler.
    """
    before = torch.backends.cudnn.deterministic
    torch.backends.cudnn.deterministic = True
    try:
        yield
    finally:
        torch.backends.cudnn.deterministic = before


@contextmanager
def in_full_float32() -> Iterator[None]:
    """While open, cuDNN has no TF32, which rounds one shape of a batch more than another."""
    allowed = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32 = allowed
