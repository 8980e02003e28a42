# Copyright (c) the d2_memfit developers.
"""Observers that see the memory at the moment when it runs out."""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from ..memory import is_out_of_memory

__all__ = ["observed"]

logger = logging.getLogger(__name__)


@contextmanager
def observed(observers: Sequence[Callable[[], None]]) -> Iterator[None]:
    """While open, call the observers when memory runs out, before anything is freed."""
    try:
        yield
    except Exception as e:
        if is_out_of_memory(e):
            _call(observers)
        raise


def _call(observers: Sequence[Callable[[], None]]) -> None:
    for observe in observers:
        try:
            observe()
        except Exception as e:  # the run may still continue
            logger.warning("What was to be seen of the memory is lost: %s", e)
