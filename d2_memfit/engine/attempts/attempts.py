# Copyright (c) the d2_memfit developers.
"""The loop that runs images, and runs them again after an out-of-memory error."""

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Optional, TypeVar

import torch
from torch import nn

from ...errors import OutOfMemoryError
from ...memory import error_line, is_out_of_memory, release_memory
from ..state import StateCopy
from ..window import Cutter, MicroBatch, Window

__all__ = ["Retries", "run_all", "run_to_count"]

_Piece = TypeVar("_Piece")


def run_all(
    take: Callable[[], Optional[_Piece]],
    run: Callable[[_Piece], Any],
    retries: Optional["Retries"] = None,
) -> None:
    """Run images in pieces until all are through.

    A piece that runs out of memory is undone, and its images run again with less memory.

    Args:
        take: the next piece; None after the last one.
        run: runs a piece.
        retries: how images run again; None lets errors pass, and copies nothing.

    Raises:
        OutOfMemoryError: images do not fit in any way, or there is no memory to undo a piece.
    """
    while (piece := take()) is not None:
        if retries is None:
            run(piece)
            continue
        before = failure = None
        try:
            before = retries.copy()
            with retries.around(piece):
                run(piece)
        except Exception as e:
            if not is_out_of_memory(e):
                raise
            failure = retries.describe(e, piece)
        if failure is not None:
            # No exception is being handled here, so nothing holds the tensors of the attempt.
            message = retries.react(failure, piece)
            retries.undo(before, piece)
            if message:
                raise OutOfMemoryError(message)


class Retries(ABC):
    """How the images of pieces that ran out of memory run again."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._num_undone = 0

    def copy(self) -> Optional[StateCopy]:
        """A copy of what the next piece may change; None if nothing is to be restored."""
        return None

    def around(self, piece: Any) -> AbstractContextManager[Any]:
        """A context in which a piece runs."""
        return nullcontext()

    def describe(self, error: Exception, piece: Any) -> Any:
        """A description of an error, which holds no reference to it."""
        return error_line(error)

    @abstractmethod
    def react(self, failure: Any, piece: Any) -> str:
        """Record a failure, and decide how its images run again.

        Args:
            failure: from :meth:`describe`.

        Returns:
            str: the message of the final error if they cannot; "" otherwise.
        """

    def undo(self, before: Optional[StateCopy], piece: Any) -> None:
        """Free what an attempt left, and restore the state before it, if it could be copied."""
        self._num_undone += 1
        # From Python 3.12 on, frames of the attempt hold each other, and its tensors, if leaving a
        # ``with`` failed in it as well. So a collection comes first.
        release_memory(self._device, thorough=self._num_undone > 1)
        if before is not None:
            before.restore()


def run_to_count(
    model: nn.Module,
    window: Window,
    cutter: Cutter,
    forward: Callable[[MicroBatch], Any],
    may_recover: bool,
) -> None:
    """Run the forwards of a window for its counts, and put all its images back.

    If memory runs out, they run in smaller pieces, and so does training at first; the limit that
    ``cutter`` has learned does not change. An image that does not fit alone is left out: training
    handles it with stronger means. The caller restores the state that forwards change.
    """
    cutter = copy.copy(cutter)
    retries = _Smaller(next(model.parameters()).device, window, cutter)
    run_all(lambda: cutter.take(window), forward, retries if may_recover else None)
    window.put_all_back()


class _Smaller(Retries):
    """Halves pieces, and leaves out an image that failed twice."""

    def __init__(self, device: torch.device, window: Window, cutter: Cutter) -> None:
        super().__init__(device)
        self._window = window
        self._cutter = cutter
        self._failed_alone: Any = None

    def react(self, failure: str, piece: MicroBatch) -> str:
        if not piece.can_be_split and piece.image is self._failed_alone:
            return ""
        self._failed_alone = piece.image
        self._window.put_back()
        if piece.can_be_split:
            self._cutter.lower(piece)
        return ""
