# Copyright (c) the d2_memfit developers.
"""Recovery: undo a micro-batch that does not fit, and run its images with less memory."""

import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Callable, Optional

import torch
from detectron2.utils import comm
from detectron2.utils.events import get_event_storage
from torch import nn

from ...errors import OutOfMemoryError
from ...memory import is_out_of_memory, release_memory
from ...settings import RecoveryOptions
from ...techniques import checkpointed, resize_image
from ..losses import Communication
from ..state import Snapshot
from ..window import (
    ByteCut,
    MicroBatch,
    MicroBatchSize,
    SizeLimit,
    Window,
    WindowStorage,
    is_list_of_images,
)
from .oom_record import RAISE, OomEvent, OomRecord

__all__ = ["Recovery", "RecoveryReport", "low_memory_step"]

logger = logging.getLogger(__name__)

# The steps for one image that does not fit alone, from harmless to last resort.
_AGAIN = "caches are freed and it is run again"
_LOW_MEMORY = "it is run again with checkpointed activations, kept on the host"
_RESIZE = "it is run again at 0.7 of its size, {:.2f} of the original"
_SKIP = "it is skipped"

_MOST_RISES = 3  # one may be chance, thrashing before the error continues
_RESIZE_FACTOR = 0.7
_MAX_RESIZES = 3


@dataclass
class RecoveryReport:
    """One rank's report about the memory of its window."""

    micro_batch: int = 0  # images in the largest one
    oom_events: int = 0
    retried_images: int = 0
    seen_images: int = 0  # including skipped images
    skipped_images: int = 0
    final_error: str = ""
    size: dict[str, Any] = field(default_factory=dict)  # state of the MicroBatchSize


class Recovery:
    """Runs windows to their end, whatever fits. Make one per trainer.

    Args:
        options: what recovery may do.
        model: without DDP around it.
        micro_batch_size: as for the trainer.
        mixed_precision: whether it is on, for the advice in the final error.
        communication: the model's communication in its forward.
        byte_cut: cuts windows by bytes; None cuts by number of images.

    Attributes:
        size: the current limit of a micro-batch, in images or bytes.
        largest: the last window's micro-batch with the most images, until the next window runs.
        record: where errors are recorded and explained.
        oom_events, retried_images, skipped_images: totals over all ranks and iterations.
    """

    def __init__(
        self,
        options: RecoveryOptions,
        model: nn.Module,
        micro_batch_size: Optional[int],
        mixed_precision: bool,
        communication: Communication,
        byte_cut: Optional[ByteCut] = None,
    ) -> None:
        self.size: SizeLimit = byte_cut or MicroBatchSize(micro_batch_size, options.grow_after)
        self.largest: Optional[MicroBatch] = None
        self.oom_events = 0
        self.retried_images = 0
        self.skipped_images = 0
        self._seen_images = 0
        self._options = options
        self._communication = communication
        self._model = model
        self._device = next(model.parameters()).device
        self.record = OomRecord(options, model, mixed_precision)
        self._micro_batch_size = micro_batch_size
        self._sizes = [self.size.state_dict()]  # one of each rank
        self._allocator_retries = 0
        self._rises = 0  # iterations in a row in which the allocator retried
        self._escalation = _Escalation(options)
        self._report = RecoveryReport()
        self._window: Optional[Window] = None
        self._is_counted = False  # its iteration, after its first run

    def run(
        self,
        window: Window,
        storage: WindowStorage,
        forward: Callable[[MicroBatch], torch.Tensor],
        backward: Callable[[torch.Tensor, MicroBatch], None],
        begin_anew: Callable[[], None],
    ) -> RecoveryReport:
        """Accumulate the gradients of a window.

        After an error in a forward, which has touched no gradient, only its micro-batch runs again.
        After an error in a backward, which may have, the window starts over. No image is lost or
        counted twice.

        Raises:
            OutOfMemoryError: at once, if ranks communicate in the forward. In all other cases the
                ranks must agree first, see :meth:`end_iteration`.
        """
        if window is not self._window:  # if all ranks run it again, what it has learned is kept
            self._report = RecoveryReport()
            self._escalation = _Escalation(self._options)
            self._is_counted = False
            self.largest = None
        self._window = window
        at_start: Optional[Snapshot] = None
        while micro_batch := window.take(self.micro_batch_size, self._micro_batch_size is not None):
            storage.next_micro_batch(micro_batch.num_images)
            before, event = self._attempt(micro_batch, storage, forward, backward)
            at_start = at_start or before
            if event is None:
                continue
            # No exception is being handled here, so nothing holds the tensors of the attempt.
            if event.phase == "forward":  # it has touched no gradient
                self._report.retried_images += micro_batch.num_images
                window.put_back()
            else:
                self._report.retried_images += window.num_images
                window.start_over()
                before = at_start
            self._react(event, micro_batch, window)  # which records it first
            self._undo(before, event, micro_batch)
            if self._report.final_error:
                self._model.zero_grad(set_to_none=True)
                if not self._communication.may_recover:
                    raise OutOfMemoryError(self._report.final_error)
                break
            begin_anew()
        self._end_window(window)
        return self._report

    def _end_window(self, window: Window) -> None:
        """Complete the report of a window, and let the micro-batch grow after a while."""
        self._report.seen_images = window.num_images + self._report.skipped_images
        self.largest = max(window.micro_batches, key=lambda m: m.num_images, default=None)
        self._report.micro_batch = self.largest.num_images if self.largest else 0
        if not self._is_counted:
            self._is_counted = True
            self._count_iteration()
        self._report.size = self.size.state_dict()  # as it is after the vote

    def _count_iteration(self) -> None:
        """Count an iteration once. A later error in another run of it starts the wait anew."""
        self._watch_allocator()
        if self.size.end_iteration(clean=not self._report.oom_events):
            logger.info(
                "Iteration %d: memory was enough for a while, the micro-batch grows to %s",
                get_event_storage().iter,
                self.size.described(),
            )

    @property
    def micro_batch_size(self) -> Optional[int]:
        """Current number of images per micro-batch; None is the loader's batch."""
        return self.size.images if self._communication.may_recover else self._micro_batch_size

    def end_iteration(self, reports: Sequence[RecoveryReport]) -> None:
        """Count the events of all ranks, and log them.

        Raises:
            OutOfMemoryError: on every rank, if an image of any rank does not fit at all, or too
                many were skipped.
        """
        errors = [r.final_error for r in reports if r.final_error]
        if errors:
            raise OutOfMemoryError("\n".join(errors))
        self._window = None
        self._sizes = [r.size for r in reports]
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
        if self.skipped_images > math.ceil(self._options.max_skipped * self._seen_images):
            raise OutOfMemoryError(
                f"{self.skipped_images} of {self._seen_images} images did not fit and were "
                f"skipped, more than MEMFIT.OOM.MAX_SKIPPED {self._options.max_skipped} allows"
            )

    def state_dict(self) -> dict[str, Any]:
        return {
            "sizes": self._sizes,
            "oom_events": self.oom_events,
            "retried_images": self.retried_images,
            "skipped_images": self.skipped_images,
            "seen_images": self._seen_images,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        sizes = state["sizes"]
        rank = comm.get_rank()
        same_ranks = len(sizes) == comm.get_world_size()
        own = sizes[rank] if same_ranks else min(sizes, key=lambda s: s["images"] or math.inf)
        self.size.load_state_dict(own)
        self._sizes = sizes if same_ranks else [own] * comm.get_world_size()
        self.oom_events = state["oom_events"]
        self.retried_images = state["retried_images"]
        self.skipped_images = state["skipped_images"]
        self._seen_images = state["seen_images"]

    def _attempt(
        self,
        micro_batch: MicroBatch,
        storage: WindowStorage,
        forward: Callable[[MicroBatch], torch.Tensor],
        backward: Callable[[torch.Tensor, MicroBatch], None],
    ) -> tuple[Optional[Snapshot], Optional[OomEvent]]:
        """The state before a micro-batch (None if there was no memory for it), and its error."""
        low_memory = self._escalation.needs_low_memory(micro_batch.data)
        before = None
        phase = "forward"
        try:
            before = Snapshot(self._model, storage)
            with low_memory_step(self._model) if low_memory else nullcontext():
                loss = forward(micro_batch)
                phase = "backward"
                backward(loss, micro_batch)
        except Exception as e:
            if not is_out_of_memory(e):
                raise
            return before, self.record.event(e, phase, micro_batch.data)
        return before, None

    def _react(self, event: OomEvent, micro_batch: MicroBatch, window: Window) -> None:
        """Decide how the images run again, and log it."""
        if not self._communication.may_recover:
            action = RAISE
        elif micro_batch.can_be_split:
            action = f"{self.size.lower(micro_batch, window)} and its images are run again"
        else:
            action = self._escalation.next_action(micro_batch.data, window)
        self._report.oom_events += 1
        self.record.log(event, action)
        if action == _SKIP:
            self._report.skipped_images += micro_batch.num_images
        elif action == RAISE:
            self._report.final_error = self.record.final_error(event)

    def _undo(self, before: Optional[Snapshot], event: OomEvent, micro_batch: MicroBatch) -> None:
        """Free memory, and restore a state if it could be saved.

        If memory runs out here too, that is the window's final error, on all ranks.
        """
        is_thorough = self._report.oom_events > 1
        try:
            with self.record.explained("restoration", lambda: micro_batch.data):
                if event.phase != "forward":
                    self._model.zero_grad(set_to_none=True)
                # From Python 3.12 on, frames of the attempt hold each other, and its tensors, if
                # leaving a ``with`` failed in it as well. So a collection comes first.
                release_memory(self._device, thorough=is_thorough)
                if before is not None:
                    before.restore()
        except OutOfMemoryError as e:
            self._report.final_error = str(e)

    def _watch_allocator(self) -> None:
        """Halve the size before a crash: an allocator that retries again and again is near it.

        It counts how often it had to free its cache. Each retry synchronises the device.
        """
        if self._device.type != "cuda" or not self._communication.may_recover:
            return
        retries = torch.cuda.memory_stats(self._device)["num_alloc_retries"]
        has_retried = retries > self._allocator_retries
        self._allocator_retries = retries
        self._rises = self._rises % _MOST_RISES + 1 if has_retried else 0
        largest = self.largest
        if self._rises < _MOST_RISES or largest is None or not largest.can_be_split:
            return
        error = torch.OutOfMemoryError(f"num_alloc_retries rises again and again, to {retries}")
        event = self.record.event(error, "allocator", largest.data)
        self._report.oom_events += 1
        self.record.log(event, f"{self.size.lower(largest)} before it fails")


@dataclass
class _HardImage:
    original: Any  # a dataset dict, a row of a batch in columns, or a batch that cannot be split
    failures: int = 0
    num_resizes: int = 0


class _Escalation:
    """Remembers the steps taken for each image of a window. Make one object per window."""

    def __init__(self, options: RecoveryOptions) -> None:
        self._options = options
        self._hard: dict[int, _HardImage] = {}  # by the id of the image that is run for it

    def needs_low_memory(self, data: Any) -> bool:
        """Whether this micro-batch is an image that failed even with freed caches."""
        hard = self._hard.get(id(_image(data)))
        return hard is not None and hard.failures >= 2

    def next_action(self, data: Any, window: Window) -> str:
        """Take the next step for a micro-batch of one image, which was put back.

        Returns:
            str: the step, one of this file's texts.
        """
        image = _image(data)
        hard = self._hard.setdefault(id(image), _HardImage(image))
        hard.failures += 1
        if hard.failures == 1:
            return _AGAIN
        if hard.failures == 2:
            return _LOW_MEMORY
        if self._options.allow_resize and hard.num_resizes < _MAX_RESIZES and _has_pixels(image):
            hard.num_resizes += 1
            factor = _RESIZE_FACTOR**hard.num_resizes
            smaller = resize_image(hard.original, factor)
            self._hard[id(smaller)] = self._hard.pop(id(image))
            window.replace(image, smaller)
            return _RESIZE.format(factor)
        if self._options.last_resort == "skip":
            window.replace(image, None)
            return _SKIP
        return RAISE


@contextmanager
def low_memory_step(model: nn.Module) -> Iterator[None]:
    """Run forward and backward with less device memory: slower, with the same gradients."""
    with checkpointed(model), torch.autograd.graph.save_on_cpu():
        yield


def _image(data: Any) -> Any:
    """The key for :meth:`Window.replace`: one image, or a batch that is not a list of images."""
    return data[0] if is_list_of_images(data) and len(data) == 1 else data


def _has_pixels(image: Any) -> bool:
    return isinstance(image, dict) and isinstance(image.get("image"), torch.Tensor)
