# Copyright (c) the d2_memfit developers.
"""Contexts for work that is not training, such as planning: on one rank, and without logging."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
import torch.distributed as dist

from ..compat.pytorch import default_group_replaced
from .random_state import RandomState

__all__ = ["alone", "no_information", "unchanged_random_state"]

_CPU = torch.device("cpu")


@contextmanager
def alone() -> Iterator[None]:
    """While open, code that asks for ranks is told that this process is the only one.

    So Detectron2's loaders and the criteria of models do not wait for other ranks.
    """
    with default_group_replaced(None) if dist.is_available() else nullcontext():
        yield


@contextmanager
def no_information(up_to: int = logging.INFO) -> Iterator[None]:
    """While open, log only warnings and errors, because other messages concern another job.

    Args:
        up_to: the highest level that is not logged.
    """
    level = logging.root.manager.disable
    logging.disable(max(level, up_to))
    try:
        yield
    finally:
        logging.disable(level)


@contextmanager
def unchanged_random_state(device: torch.device = _CPU) -> Iterator[None]:
    """While open, random numbers can be drawn without an effect on the job.

    Args:
        device: a device whose generator is included, if it has one.
    """
    state = RandomState(device)
    try:
        yield
    finally:
        state.restore()
