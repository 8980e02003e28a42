# Copyright (c) the d2_memfit developers.
"""Release of the memory that a failed attempt leaves behind."""

import gc
from collections.abc import Callable
from typing import TypeVar

import torch

from .oom import is_out_of_memory

__all__ = ["release_memory", "with_room"]

_Made = TypeVar("_Made")


def with_room(make: Callable[[], _Made], device: torch.device) -> _Made:
    """Make something small; if memory runs out, once more after unreferenced memory was freed."""
    try:
        return make()
    except Exception as e:
        if not is_out_of_memory(e):
            raise
    release_memory(device)
    return make()


def release_memory(device: torch.device, thorough: bool = True) -> None:
    """Free unreferenced memory, on the device and on the host.

    Call it outside the ``except`` block: the traceback of a handled error keeps the tensors of its
    frames alive (pytorch/pytorch#18853).

    Args:
        thorough: whether to look for cycles among all objects, which takes some tenths of a second,
            or only among young ones.
    """
    gc.collect(2 if thorough else 1)
    # A backward that failed leaves tasks in the queue of its thread, with the graph and gradients
    # that belong to them. The next backward of the thread throws them away.
    torch.ones((), requires_grad=True).backward()
    if device.type != "cpu":
        torch.get_device_module(device).empty_cache()
