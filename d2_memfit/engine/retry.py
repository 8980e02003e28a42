# Copyright (c) the d2_memfit developers.
"""Images that run out of memory are undone, and run again with less: halves, then single images."""

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Optional, TypeVar

import torch
from detectron2.utils.events import get_event_storage
from torch import nn

from ..common.errors import OutOfMemoryError
from ..common.snapshot import Snapshot, weights_that_may_change
from ..config.settings import RecoveryOptions
from ..job import resize_image
from ..memory import is_out_of_memory, release_memory
from ..techniques.checkpointing import checkpointed
from .oom_log import RAISE, OomLog
from .window import MicroBatch, Window, WindowStorage

logger = logging.getLogger(__name__)

# Iterations without an out-of-memory error after which a limit that was lowered is no longer used.
GROW_AFTER = 1000
# Share of all images seen that may be skipped, rounded up to a whole image.
MAX_SKIPPED = 0.001

SKIP = "it is skipped"
_RESIZE_FACTOR = 0.7
_MOST_RESIZES = 3

_Piece = TypeVar("_Piece")


def run_all(
    take: Callable[[], Optional[_Piece]], run: Callable[[_Piece], Any], retries: Any = None
) -> None:
    """Run images in pieces until all are through.

    Args:
        take: the next piece; None after the last one.
        run: runs a piece.
        retries: how images run again, such as :class:`WindowRetries`; None lets errors pass, and
            copies nothing. ``snapshot()`` is the state before a piece, ``around(piece)`` a context
            in which it runs, and ``describe(error, piece)`` holds no reference to the error.
            ``react(description, piece, snapshot)`` undoes the piece, decides how its images run
            again, and returns the message of the final error if they cannot.

    Raises:
        OutOfMemoryError: images do not fit in any way, or there is no memory to undo a piece.
    """
    while (piece := take()) is not None:
        if retries is None:
            run(piece)
            continue
        before = failure = None
        try:
            before = retries.snapshot()
            with retries.around(piece):
                run(piece)
        except Exception as e:
            if not is_out_of_memory(e):
                raise
            failure = retries.describe(e, piece)
        # No exception is being handled here, so nothing holds the tensors of the attempt.
        if failure is not None and (message := retries.react(failure, piece, before)):
            raise OutOfMemoryError(message)


def free_and_restore(model: nn.Module, before: Optional[Snapshot]) -> None:
    """Free what an attempt left, and put the state before it back, if it could be saved."""
    release_memory(next(model.parameters()).device)
    if before is not None:
        before.restore()


class Cutter:
    """Cuts windows into micro-batches within a limit, and learns the limit from what does not fit.

    The limit is a number of images. It is halved when memory runs out. After a while without errors
    it is again what is configured.

    Args:
        configured: images per micro-batch; None for the loader's batch.

    Attributes:
        images: the current limit; None for the loader's batch.
        is_configured: whether micro-batches have a limit before anything fails.
    """

    def __init__(self, configured: Optional[int]) -> None:
        self.is_configured = configured is not None
        self.images = self._configured = configured
        self._clean_iterations = 0

    def take(self, window: Window) -> Optional[MicroBatch]:
        """Take a window's next micro-batch; None at its end.

        A learned limit does not put images of several batches together.
        """
        return window.take(self.images, across_batches=self.is_configured)

    def lower(self, largest: MicroBatch) -> str:
        """Halve the limit, so that a micro-batch that can be split is not taken whole again.

        Returns:
            str: what was done, for the log.
        """
        self._clean_iterations = 0
        self.images = largest.num_images // 2
        return f"the micro-batch is halved to {self.images}"

    def end_iteration(self, clean: bool) -> bool:
        """Count an iteration, which had enough memory (``clean``) or not.

        Returns:
            bool: whether the limit has grown.
        """
        self._clean_iterations = self._clean_iterations + 1 if clean else 0
        if self._clean_iterations < GROW_AFTER or self.images == self._configured:
            return False
        self._clean_iterations, self.images = 0, self._configured
        return True

    def state_dict(self) -> dict[str, Any]:
        # A configured limit was not learned; the config may differ when this is loaded.
        learned = None if self.images == self._configured else self.images
        return {"images": learned, "clean": self._clean_iterations}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what was learned, up to what is configured now."""
        self.images = min(filter(None, (state["images"], self._configured)), default=None)
        self._clean_iterations = state["clean"]


@dataclass
class RecoveryReport:
    """One rank's report about the memory of its window."""

    micro_batch: int = 0  # images in the largest one
    oom_events: int = 0
    retried_images: int = 0
    seen_images: int = 0  # including skipped images
    skipped_images: int = 0


class Recovery:
    """What a run has learned from out-of-memory errors, and their totals for the log.

    Args:
        options: what recovery may do.
        model: without DDP around it.
        cutter: its limit is lowered when memory runs out.
        mixed_precision: whether it is on, for the advice in the final error.

    Attributes:
        learned: the cutter's state after the last window that ran to its end on all ranks.
        oom_log: where errors are recorded and explained.
        weights: those that forwards change, such as a teacher's; until the first forward, all that
            may.
        totals: sums of the reports of all ranks and iterations.
    """

    def __init__(
        self, options: RecoveryOptions, model: nn.Module, cutter: Cutter, mixed_precision: bool
    ) -> None:
        self.options = options
        self.cutter = cutter
        self.learned = cutter.state_dict()
        self.oom_log = OomLog(options, model, mixed_precision)
        self.weights = weights_that_may_change(model)
        self.knows_weights = not self.weights
        self.totals = RecoveryReport()

    def end_iteration(self, reports: Sequence[RecoveryReport]) -> None:
        """Count the events of all ranks, and log them.

        Raises:
            OutOfMemoryError: on every rank, if too many images were skipped.
        """
        self.learned = self.cutter.state_dict()
        totals = self.totals
        for name in ("oom_events", "retried_images", "seen_images", "skipped_images"):
            of_all = getattr(totals, name) + sum(getattr(r, name) for r in reports)
            setattr(totals, name, of_all)
        values = {f"memfit/{n}": getattr(totals, n) for n in ("oom_events", "retried_images")}
        values["memfit/micro_batch"] = min(r.micro_batch for r in reports)
        get_event_storage().put_scalars(smoothing_hint=False, **values)
        if totals.skipped_images > math.ceil(MAX_SKIPPED * totals.seen_images):
            raise OutOfMemoryError(
                f"{totals.skipped_images} of {totals.seen_images} images were skipped, more than a "
                f"share of {MAX_SKIPPED}. Lower INPUT.MAX_SIZE_TRAIN, or set "
                "MEMFIT.OOM.LAST_RESORT resize"
            )

    def load(self, totals: dict[str, Any], learned: Optional[dict[str, Any]]) -> None:
        """Continue from a checkpoint; ``learned`` is None if this rank's is not known."""
        self.totals = RecoveryReport(**totals)
        if learned is not None:
            self.cutter.load_state_dict(learned)
            self.learned = self.cutter.state_dict()


@dataclass
class _HardImage:
    """An image that does not fit alone, and the steps that were taken for it."""

    original: Any  # a dataset dict, a row of a batch in columns, or a batch that cannot be split
    failures: int = 0


@dataclass
class WindowRetries:
    """How micro-batches of a window run again.

    A forward does not change gradients. After an error in it, only its micro-batch runs again.
    After an error in a backward, the window starts over. No image is lost or counted twice.

    Args:
        recovery: decides how large micro-batches are.
        model: without DDP around it.
        start: the state before the window.

    Attributes:
        start: the same; another one if loading the window has changed it.
        report: of this window.
    """

    recovery: Recovery
    model: nn.Module
    window: Window
    storage: WindowStorage
    start: Snapshot
    report: RecoveryReport = field(default_factory=RecoveryReport)
    _entries: int = 0  # of the storage, before the piece
    _hard: dict[int, _HardImage] = field(default_factory=dict)  # by the id of the image that is run

    def snapshot(self) -> Snapshot:
        self._entries = self.storage.num_entries()
        if len(self.window.micro_batches) == 1:  # the piece to come, which is taken already
            return self.start
        if not self.recovery.knows_weights:  # a forward has ended
            self.recovery.weights = self.start.changed_weights()
            self.recovery.knows_weights = True
        return Snapshot(self.model, self.recovery.weights)

    def around(self, piece: MicroBatch) -> AbstractContextManager[Any]:
        hard = self._hard.get(id(piece.image))
        return _low_memory(self.model) if hard and hard.failures > 1 else nullcontext()

    def end_window(self) -> None:
        """Complete the report of a window, and let the micro-batch grow after a while."""
        recovery, report, window = self.recovery, self.report, self.window
        report.seen_images = window.num_images + report.skipped_images
        report.micro_batch = max((m.num_images for m in window.micro_batches), default=0)
        if recovery.cutter.end_iteration(clean=not report.oom_events):
            text = "Iteration %d: memory was enough for a while, the micro-batch grows to %s"
            size = recovery.cutter.images or "the loader's batch"
            logger.info(text, get_event_storage().iter, size)

    def describe(self, error: Exception, piece: MicroBatch) -> Any:
        return self.recovery.oom_log.event(error, piece.phase, piece.data)

    def react(self, failure: Any, piece: MicroBatch, before: Optional[Snapshot]) -> str:
        recovery, report = self.recovery, self.report
        report.oom_events += 1
        if piece.phase == "forward":
            report.retried_images += piece.num_images
            self.window.put_back()
        else:
            report.retried_images += self.window.num_images
            self.window.put_all_back()
            self.model.zero_grad(set_to_none=True)
            before, self._entries = self.start, 0
        if piece.can_be_split:
            action = f"{recovery.cutter.lower(piece)} and its images are run again"
        else:
            action = self._escalate(piece)
        report.skipped_images += piece.num_images if action == SKIP else 0
        recovery.oom_log.log(failure, action)
        with recovery.oom_log.explained("restoration", lambda: piece.data):
            self.storage.rewind(self._entries)
            free_and_restore(self.model, before)
        return recovery.oom_log.final_message(failure) if action == RAISE else ""

    def _escalate(self, piece: MicroBatch) -> str:
        """Take the next step for one image that was put back, from harmless to last resort.

        Returns:
            str: the step.
        """
        options, image = self.recovery.options, piece.image
        hard = self._hard.setdefault(id(image), _HardImage(image))
        hard.failures += 1
        if hard.failures == 1:
            return "caches are freed and it is run again"
        if hard.failures == 2:
            return "it is run again with checkpointed activations, kept on the host"
        has_pixels = isinstance(image, dict) and isinstance(image.get("image"), torch.Tensor)
        if options.last_resort == "resize" and hard.failures <= 2 + _MOST_RESIZES and has_pixels:
            factor = _RESIZE_FACTOR ** (hard.failures - 2)
            smaller = resize_image(hard.original, factor)
            self._hard[id(smaller)] = self._hard.pop(id(image))
            self.window.replace(image, smaller)
            return f"it is run again at 0.7 of its size, {factor:.2f} of the original"
        if options.last_resort == "skip":
            self.window.replace(image, None)
            return SKIP
        return RAISE


@contextmanager
def _low_memory(model: nn.Module) -> Iterator[None]:
    """Run forward and backward with less device memory: slower, with the same gradients."""
    with checkpointed(model), torch.autograd.graph.save_on_cpu():
        yield
