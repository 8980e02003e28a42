# Copyright (c) the d2_memfit developers.
"""Options of PyTorch's CUDA allocator for segments that grow."""

import os
import sys
from typing import Optional

import torch

__all__ = ["segments_expand", "use_expandable_segments"]

_NAME = "PYTORCH_CUDA_ALLOC_CONF"
_NEW_NAME = "PYTORCH_ALLOC_CONF"
# The first PyTorch that also reads CUDA's options by the new name; 2.9 has the name and ignores the
# options (pytorch#183387).
_READS_NEW_NAME = (2, 11)
_OPTION = "expandable_segments:True"


def use_expandable_segments() -> None:
    """Let PyTorch's CUDA allocator grow its segments, against fragmentation.

    It works only before CUDA is started, when PyTorch reads the option. Options set by the user do
    not change.
    """
    if not torch.cuda.is_initialized() and _options() is None:
        os.environ[_NAME] = _options_under_budget()


def segments_expand(under_budget: bool = True) -> bool:
    """Whether segments grow in this process.

    PyTorch supports this on Linux only.

    Args:
        under_budget: whether :func:`use_expandable_segments` has been or will be called.
    """
    options = _options()
    if options is None and under_budget and not torch.cuda.is_initialized():
        options = _options_under_budget()
    return sys.platform == "linux" and _OPTION in (options or "").replace(" ", "")


def _options() -> Optional[str]:
    """The options that this PyTorch reads: the first that are set."""
    names = [_NAME]
    if torch.version.hip:
        names.append("PYTORCH_HIP_ALLOC_CONF")
    if tuple(map(int, torch.__version__.split(".")[:2])) >= _READS_NEW_NAME:
        names.append(_NEW_NAME)
    return next(filter(None, map(os.environ.get, names)), None)


def _options_under_budget() -> str:
    """The user's options under a name that this PyTorch does not read, or ours."""
    return os.environ.get(_NEW_NAME) or _OPTION
