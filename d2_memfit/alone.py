"""Work beside the training itself, such as planning: by one rank, and without a word."""

import logging
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
import torch.distributed as dist

__all__ = ["alone", "no_information", "unchanged_random_state"]


@contextmanager
def alone() -> Iterator[None]:
    """While open, code that asks is told that this process is the only one.

    So Detectron2's loaders and the criteria of models do not wait for ranks that do not take part.
    """
    if not dist.is_available():
        yield
        return
    group, dist.GroupMember.WORLD = dist.GroupMember.WORLD, None
    try:
        yield
    finally:
        dist.GroupMember.WORLD = group


@contextmanager
def no_information(up_to: int = logging.INFO) -> Iterator[None]:
    """While open, nothing below a warning is logged: it would be about another job.

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
def unchanged_random_state() -> Iterator[None]:
    """While open, random numbers can be drawn that the job does not miss."""
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
