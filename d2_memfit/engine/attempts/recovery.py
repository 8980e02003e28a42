# Copyright (c) the d2_memfit developers.
"""Recovery in training: the learned limit of micro-batches, and the retries of a window."""

import logging
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Optional

import torch
from detectron2.utils import comm
from detectron2.utils.events import get_event_storage
from torch import nn

from ...errors import OutOfMemoryError
from ...settings import RecoveryOptions
from ..state import StateCopy
from ..window import Cutter, MicroBatch, Window, WindowStorage
from .attempts import Retries
from .escalation import SKIP, Escalation, low_memory_step
from .oom_log import RAISE, OomEvent, OomLog

__all__ = ["Recovery", "RecoveryReport", "WindowRetries"]

logger = logging.getLogger(__name__)

_MOST_RISES = 3  # in a row; a single one may be chance
# Share of all images seen that may be skipped, rounded up to a whole image.
MAX_SKIPPED = 0.001


@dataclass
class RecoveryReport:
    """One rank's report about the memory of its window."""

    micro_batch: int = 0  # images in the largest one
    oom_events: int = 0
    retried_images: int = 0
    seen_images: int = 0  # including skipped images
    skipped_images: int = 0


class Recovery:
    """The learned limit of micro-batches, and totals of out-of-memory errors for the log.

    Args:
        options: what recovery may do.
        model: without DDP around it.
        cutter: its limit is lowered when memory runs out.
        mixed_precision: whether it is on, for the advice in the final error.
        may_recover: whether a rank may run its images again, without the other ranks.

    Attributes:
        learned: the cutter's state after the last window that ran to its end on all ranks.
        largest: the last window's micro-batch with the most images, until the next window runs.
        oom_log: where errors are recorded and explained.
        oom_events, retried_images, skipped_images: totals over all ranks and iterations.
    """

    def __init__(
        self,
        options: RecoveryOptions,
        model: nn.Module,
        cutter: Cutter,
        mixed_precision: bool,
        may_recover: Callable[[], bool],
    ) -> None:
        self.options = options
        self.may_recover = may_recover
        self.cutter = cutter
        self.learned = cutter.state_dict()
        self.largest: Optional[MicroBatch] = None
        self.oom_events = 0
        self.retried_images = 0
        self.skipped_images = 0
        self._seen_images = 0
        self._device = next(model.parameters()).device
        self.oom_log = OomLog(options, model, mixed_precision)
        self._allocator_retries = 0
        self._rises = 0  # iterations in a row in which the allocator retried

    def end_window(self, window: Window, report: RecoveryReport) -> None:
        """Complete the report of a window, and let the micro-batch grow after a while."""
        report.seen_images = window.num_images + report.skipped_images
        self.largest = max(window.micro_batches, key=lambda m: m.num_images, default=None)
        report.micro_batch = self.largest.num_images if self.largest else 0
        self._watch_allocator(report)
        if self.cutter.end_iteration(clean=not report.oom_events):
            logger.info(
                "Iteration %d: memory was enough for a while, the micro-batch grows to %s",
                get_event_storage().iter,
                self.cutter.described(),
            )

    def end_iteration(self, reports: Sequence[RecoveryReport]) -> None:
        """Count the events of all ranks, and log them.

        Raises:
            OutOfMemoryError: on every rank, if too many images were skipped.
        """
        self.learned = self.cutter.state_dict()
        self.oom_events += sum(r.oom_events for r in reports)
        self.retried_images += sum(r.retried_images for r in reports)
        self.skipped_images += sum(r.skipped_images for r in reports)
        self._seen_images += sum(r.seen_images for r in reports)
        get_event_storage().put_scalars(
            smoothing_hint=False,
            **{
                "memfit/micro_batch": min(r.micro_batch for r in reports),
                "memfit/oom_events": self.oom_events,
                "memfit/retried_images": self.retried_images,
            },
        )
        if self.skipped_images > math.ceil(MAX_SKIPPED * self._seen_images):
            raise OutOfMemoryError(
                f"{self.skipped_images} of {self._seen_images} images did not fit and were "
                f"skipped, more than the allowed share of {MAX_SKIPPED}. Lower "
                "INPUT.MAX_SIZE_TRAIN, or set MEMFIT.OOM.ALLOW_RESIZE True"
            )

    def state_dict(self, learned: Sequence[Optional[dict[str, Any]]] = (None,)) -> dict[str, Any]:
        """The state.

        Args:
            learned: the states of the cutters of all ranks; None for that of this rank.
        """
        return {
            "cutters": [of_rank or self.learned for of_rank in learned],
            "oom_events": self.oom_events,
            "retried_images": self.retried_images,
            "skipped_images": self.skipped_images,
            "seen_images": self._seen_images,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        cutters = state["cutters"]
        same_ranks = len(cutters) == comm.get_world_size()
        smallest = min(cutters, key=lambda cutter: cutter["images"] or math.inf)
        own = cutters[comm.get_rank()] if same_ranks else smallest
        self.cutter.load_state_dict(own)
        self.learned = self.cutter.state_dict()
        self.oom_events = state["oom_events"]
        self.retried_images = state["retried_images"]
        self.skipped_images = state["skipped_images"]
        self._seen_images = state["seen_images"]

    def _watch_allocator(self, report: RecoveryReport) -> None:
        """Halve micro-batches before a crash: an allocator that retries again and again is near it.

        ``num_alloc_retries`` is the number of times that it had to free its cache. Each retry
        synchronises the device.
        """
        if self._device.type != "cuda" or not self.may_recover():
            return
        retries = torch.cuda.memory_stats(self._device)["num_alloc_retries"]
        has_retried = retries > self._allocator_retries
        self._allocator_retries = retries
        self._rises = self._rises % _MOST_RISES + 1 if has_retried else 0
        largest = self.largest
        if self._rises < _MOST_RISES or largest is None or not largest.can_be_split:
            return
        error = torch.OutOfMemoryError(f"num_alloc_retries rises again and again, to {retries}")
        event = self.oom_log.event(error, "allocator", largest.data)
        report.oom_events += 1
        self.oom_log.log(event, f"{self.cutter.lower(largest)} before it fails")


class WindowRetries(Retries):
    """How micro-batches of a window run again.

    A forward does not change gradients. After an error in it, only its micro-batch runs again.
    After an error in a backward, the window starts over. No image is lost or counted twice.

    Args:
        recovery: decides how large micro-batches are.
        model: without DDP around it.
        last: an earlier copy of the model's state.

    Attributes:
        report: of this window.
    """

    def __init__(
        self,
        recovery: Recovery,
        model: nn.Module,
        window: Window,
        storage: WindowStorage,
        last: Optional[StateCopy],
    ) -> None:
        super().__init__(next(model.parameters()).device)
        self.report = RecoveryReport()
        self._recovery = recovery
        self._model = model
        self._window = window
        self._storage = storage
        self._at_start: Optional[StateCopy] = None
        self._last = last
        self._escalation = Escalation(recovery.options)

    def end(self) -> RecoveryReport:
        """Learn from the window after its last backward, and complete its report."""
        self._recovery.end_window(self._window, self.report)
        return self.report

    def copy(self) -> StateCopy:
        self._last = StateCopy(self._model, self._storage, last=self._last)
        self._at_start = self._at_start or self._last
        return self._last

    def around(self, piece: MicroBatch) -> AbstractContextManager[Any]:
        needs_low_memory = self._escalation.needs_low_memory(piece)
        return low_memory_step(self._model) if needs_low_memory else nullcontext()

    def describe(self, error: Exception, piece: MicroBatch) -> OomEvent:
        return self._recovery.oom_log.event(error, piece.phase, piece.data)

    def react(self, failure: OomEvent, piece: MicroBatch) -> str:
        report = self.report
        if piece.phase == "forward":
            report.retried_images += piece.num_images
            self._window.put_back()
        else:
            report.retried_images += self._window.num_images
            self._window.put_all_back()
        if not self._recovery.may_recover():
            action = RAISE
        elif piece.can_be_split:
            action = f"{self._recovery.cutter.lower(piece)} and its images are run again"
        else:
            action = self._escalation.next_action(piece, self._window)
        report.oom_events += 1
        report.skipped_images += piece.num_images if action == SKIP else 0
        self._recovery.oom_log.log(failure, action)
        return self._recovery.oom_log.final_message(failure) if action == RAISE else ""

    def undo(self, before: Optional[StateCopy], piece: MicroBatch) -> None:
        with self._recovery.oom_log.explained("restoration", lambda: piece.data):
            if piece.phase == "backward":
                self._model.zero_grad(set_to_none=True)
                before = self._at_start
            super().undo(before, piece)
