# Copyright (c) the d2_memfit developers.
"""The dry runs of a job on a device: of few images, and lines through their peaks for more."""

from collections import Counter
from collections.abc import Callable
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Optional, Union

from ..job import GivenBatches, Job
from ..memory import segments_expand
from .device import DeviceModel, DeviceUse
from .errors import one_line_errors
from .from_run import as_in_run
from .steps import Session
from .timeline import Allocate, Timeline

__all__ = ["FEW", "DryRuns", "bytes_of"]

FEW = 3  # images: above, memory is on lines through the runs of 2 and of 3

# By phase, module, and operator with the number of dimensions.
_Places = dict[tuple[str, str, str], Counter[str]]


class DryRuns:
    """A job on a device, and its dry runs, each of which is made when it is needed.

    Args:
        job: the job.
        device: the device to predict for, also by its name, as for :meth:`DeviceModel.choose`.
        evaluates: whether to include evaluation, or training alone.
        progress: called with a line before each dry run.
        run: OUTPUT_DIR of an earlier run, whose peaks correct the device.
        like: a job whose evaluation needs the same memory.

    Attributes:
        session: makes the dry runs.
        runs: their timelines of training, by images, and whether gradients exist before.
        expandable_segments: whether the allocator of a GPU grows its segments, as under a budget.
    """

    def __init__(
        self,
        job: Job,
        device: Union[DeviceModel, str, None] = None,
        evaluates: bool = True,
        progress: Callable[[str], Any] = str,
        run: Optional[Union[str, Path]] = None,
        like: Optional["DryRuns"] = None,
    ) -> None:
        if not isinstance(device, DeviceModel):
            device = DeviceModel.choose(device, job.cfg.MODEL.DEVICE)
        if run is not None:
            device = as_in_run(device, job, run)
        self.job, self.device = job, device
        self.evaluates = evaluates and bool(job.cfg.DATASETS.TEST)
        self.progress, self._like = progress, like
        self.runs: dict[tuple[int, bool], Timeline] = {}
        self._known: dict[Any, Any] = {}  # what is computed from them
        self.expandable_segments = segments_expand(under_budget=job.budget_gb is not None)
        self.measured: list[DeviceUse] = []  # by a probe: training, and evaluation
        self.notes: tuple[str, ...] = ()

    @property
    def num_images(self) -> int:
        """Images in the largest micro-batch."""
        return self.job.largest_micro_batch

    @cached_property
    def session(self) -> Session:
        with one_line_errors(lambda: self.job.batches.assumptions):
            return Session(self.job, self.device.is_gpu, self.device.foreach)

    def run(self, num_images: int, accumulates: bool = False) -> Timeline:
        """The dry run of a training step of some of the largest images.

        Args:
            accumulates: whether gradients of earlier micro-batches exist.
        """
        key = num_images, accumulates
        if key not in self.runs:
            self.runs[key] = self._step(num_images, accumulates)
        return self.runs[key]

    def _step(self, num_images: int, accumulates: bool = False, batch: Any = None) -> Timeline:
        self.progress(f"Dry run: {num_images} image{'s' * (num_images > 1)}")
        with one_line_errors(lambda: self.job.batches.assumptions):
            images = self.job.training_batch(num_images) if batch is None else batch
            return self.session.train(images, accumulates=accumulates)

    def whole(self, num_images: Optional[int] = None) -> Timeline:
        """The dry run of a micro-batch with as many images, the largest by default."""
        n = self.num_images if num_images is None else num_images
        return self.run(n, n < self.job.window)

    @cached_property
    def evaluation(self) -> Optional[Timeline]:
        """The dry run of an image's evaluation; None without one."""
        if not self.evaluates:
            return None
        if self._like is not None:
            return self._like.evaluation
        self.progress("Dry run: evaluation")
        with one_line_errors(lambda: self.job.batches.evaluation_assumptions, in_evaluation=True):
            return self.session.evaluate(self.job.batches.evaluation())

    def use(self, num_images: Optional[int] = None) -> DeviceUse:
        """Device memory of training with some images in a micro-batch, the largest by default.

        It is that of a dry run of all of them, if there is one or if they are few. Otherwise it is
        on lines through the runs of 2 and of 3.
        """
        n = self.num_images if num_images is None else num_images
        was_run = (n, n < self.job.window) in self.runs
        return self._use(self.whole(n)) if n <= FEW or was_run else self.expected_use(n)

    def _use(self, timeline: Timeline) -> DeviceUse:
        use = partial(self.device.use, timeline, self.expandable_segments, self.job.ranks)
        return self._once(("use", timeline), use)

    def _once(self, key: Any, make: Callable[[], Any]) -> Any:
        if key not in self._known:
            self._known[key] = make()
        return self._known[key]

    def expected_use(self, num_images: int) -> DeviceUse:
        """What :meth:`use` is likely to be for 2 images or more, without a dry run of so many.

        Each operator of each module has a peak, which is on a line above few images.
        Images that a user gives may differ, so all of them are run.
        """
        if isinstance(self.job.batches, GivenBatches):
            return self._use(self.whole(num_images))
        return self._once(("line", num_images), lambda: self._on_lines(num_images))

    def _on_lines(self, num_images: int) -> DeviceUse:
        of_three = self._use(self.run(FEW))
        on_lines = max(self._places_of(num_images).values(), key=bytes_of)
        at_peak = +on_lines
        # Owners below 0 count against the largest, so that the sum stays on the line.
        at_peak[at_peak.most_common(1)[0][0]] -= bytes_of(at_peak) - bytes_of(on_lines)
        # The allocator rounds sizes up, and keeps memory between blocks.
        most = max(map(bytes_of, self._places_in(self.run(FEW)).values()))
        at_peak["rounding"] = max(of_three.allocated_bytes - most, 0)
        outside, factor = of_three.outside.copy(), bytes_of(at_peak) / of_three.allocated_bytes
        outside["between blocks"] = round(factor * outside["between blocks"])
        return DeviceUse(at_peak, +outside)

    def _places_of(self, num_images: int) -> _Places:
        """The peaks of :func:`_places_in` for more images, on lines."""
        two, three = (self._places_in(self.run(n)) for n in (2, FEW))
        places = {}
        for at, last in three.items():
            before, more = two.get(at, last), num_images - FEW
            places[at] = Counter({k: v + more * (v - before[k]) for k, v in last.items()})
            if num_images < self.job.window:
                places[at]["gradients"] = self.session.gradient_bytes
        return places

    def _places_in(self, timeline: Timeline) -> _Places:
        return self._once(("places", timeline), lambda: _places_in(self.device, timeline))


def bytes_of(owners: Counter[str]) -> int:
    return sum(owners.values())


def _places_in(device: DeviceModel, timeline: Timeline) -> _Places:
    """Bytes by owner at the peak of each operator in each phase of each module."""
    live: Counter[str] = Counter()
    places: _Places = {}
    most: Counter[Any] = Counter()
    num_bytes = 0
    event: Any
    for event in device.events(timeline):
        a = event.allocation
        live[a.owner] += event.num_bytes
        num_bytes += event.num_bytes
        at = a.phase, a.module, f"{a.operator}{len(a.shape)}"
        if isinstance(event, Allocate) and num_bytes > most[at]:
            most[at], places[at] = num_bytes, live.copy()
    return places
