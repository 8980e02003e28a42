"""PyTorch's CUDA allocator: whether its segments grow."""

import os
import sys

import torch

__all__ = ["segments_expand", "use_expandable_segments"]

_NAMES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
_OPTION = "expandable_segments:True"


def use_expandable_segments() -> None:
    """Let PyTorch's CUDA allocator grow its segments, against fragmentation.

    Only before CUDA is started, which is when PyTorch reads the option. Options that the user has
    set stay as they are.
    """
    if not torch.cuda.is_initialized() and not _options():
        os.environ["PYTORCH_CUDA_ALLOC_CONF"] = _OPTION


def segments_expand() -> bool:
    """Whether segments grow in this process: by an option, or by :func:`use_expandable_segments`,
    if that can still be called.

    PyTorch has such segments on Linux only.
    """
    if sys.platform != "linux":
        return False
    if _options():
        return any(_OPTION in options.replace(" ", "") for options in _options())
    return not torch.cuda.is_initialized()


def _options() -> list[str]:
    return [os.environ[name] for name in _NAMES if os.environ.get(name)]
