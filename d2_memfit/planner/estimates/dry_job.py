# Copyright (c) the d2_memfit developers.
"""A job with dry runs of its training and evaluation."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Optional

from ...common.units import GB
from ...job import EXTREME_SIZES, TYPICAL_SIZE, Batches, Job, padded_area, size_of
from ...memory import segments_expand
from ...techniques import loader_bytes
from ..device import DeviceModel, DeviceUse, DoesNotFit
from ..dry_run import Timeline, one_line_errors
from . import steps
from .ranges import OF_TENSORS, Others, chance_of_need, margin_of, range_of, widths_of
from .times import Range, factor_range, seconds_range

__all__ = ["DryJob", "MemoryEstimate", "MostObjects", "ObjectsThatFit"]

_RESOLUTION = 2**24


@dataclass(frozen=True)
class MostObjects:
    """The most objects with which a job fits, by dry runs with as many in each image.

    Attributes:
        fits: objects per image; 0 if the job does not fit with 1.
        does_not_fit: a larger number of objects per image that does not fit. Numbers between were
            not tried. None if no number that was tried is too large.
    """

    fits: int
    does_not_fit: Optional[int]


@dataclass(frozen=True)
class ObjectsThatFit:
    """The most objects with which a job fits its budget.

    Attributes:
        as_it_is: with the job's own settings.
        with_techniques: with ``settings``; None if they do not help, or objects do not decide.
        settings: config keys and values of the techniques that bound memory by objects.
    """

    as_it_is: MostObjects
    with_techniques: Optional[MostObjects]
    settings: dict[str, Any]


@dataclass(frozen=True)
class MemoryEstimate:
    """Memory of each GPU in a job's largest iteration, in GB of 2^30 bytes.

    Attributes:
        device: description of the device.
        from_run: a line about the earlier run that measured the device's values; "" without one.
        times: text about predicted times; "" if they were tried on this generation of cards.
        num_gpus: ranks that train together.
        images_per_gpu: images in a batch of the loader, SOLVER.IMS_PER_BATCH / num_gpus.
        micro_batch_size: images in one forward.
        accumulation_steps: batches of the loader in one iteration.
        image_size: height and width in pixels to which the largest micro-batch is padded.
        num_instances: annotated objects in the most crowded image. With label images alone, the
            classes in it. None if a given batch has no field for them.
        assumptions: one line for each thing that is not known, with the value assumed for it.
        at_least: parts of the job whose largest size is not known. If there are any, the job may
            need more memory than this estimate.
        peak_allocated_gb: ``torch.cuda.max_memory_allocated`` after training.
        peak_reserved_gb: ``torch.cuda.max_memory_reserved`` after training. If the job has a budget
            and fits, it is the memory of the allocator within the budget less its margin.
        device_total_gb: device memory of the process, including the context, in training and in
            the evaluations between.
        evaluation_gb: peak allocated in evaluation; None without evaluation.
        evaluation_host_gb: the RAM that results in evaluation take at the size of the image file,
            with MEMFIT.EVALUATION.ON_HOST on a GPU; otherwise 0.
        typical_gb: ``peak_allocated_gb`` with a typical shape of images, if theirs is not known,
            and the mean number of objects in each; None if neither is different, or not asked for.
        typical_size: height and width in pixels to which a typical micro-batch is padded.
        typical_instances: the mean number of objects; None if it is not known.
        range_gb: interval of ``peak_allocated_gb``.
        device_range_gb: interval of ``device_total_gb``.
        widths: how far both ends of ``device_range_gb`` are from the value, in GB, by source.
        breakdown: ``peak_allocated_gb`` by owner, the largest first.
        outside: the process's other memory in training, by owner: context, loaded kernels, NCCL,
            and memory between the allocator's blocks.
        seconds_per_iteration: predicted, with the largest images.
        seconds_range: range of ``seconds_per_iteration``; for published times, 90% are inside.
        expandable_segments: whether PyTorch's allocator grows its segments; None for a CPU.
        other_segments_gb: ``device_total_gb`` without a limit, with the other kind of segments;
            None for a CPU, and for a job that was measured.
        num_workers: loader workers on each rank.
        host_gb: approximate RAM of each rank and its workers, without the dataset.
        offloaded_gb: the part of it that is page-locked, for activations.
        objects_that_fit: the most objects with which the job fits its budget; None without a
            budget, if the images have no objects, or if not asked for.
    """

    device: str
    from_run: str
    times: str
    num_gpus: int
    images_per_gpu: int
    micro_batch_size: int
    accumulation_steps: int
    image_size: tuple[int, int]
    num_instances: Optional[int]
    assumptions: tuple[str, ...]
    at_least: tuple[str, ...]
    peak_allocated_gb: float
    peak_reserved_gb: float
    device_total_gb: float
    evaluation_gb: Optional[float]
    evaluation_host_gb: float
    typical_gb: Optional[float]
    typical_size: tuple[int, int]
    typical_instances: Optional[int]
    range_gb: tuple[float, float]
    device_range_gb: tuple[float, float]
    widths: dict[str, tuple[float, float]]
    breakdown: dict[str, float]
    outside: dict[str, float]
    seconds_per_iteration: float
    seconds_range: Range
    expandable_segments: Optional[bool]
    other_segments_gb: Optional[float]
    num_workers: int
    host_gb: float
    offloaded_gb: float
    objects_that_fit: Optional[ObjectsThatFit] = None

    def chance_within(self, gb: float) -> float:
        """The chance that the job needs no more than some GB of the device."""
        outside = sum(gb for owner, gb in self.outside.items() if owner != "between blocks")
        worst, typical = self.peak_allocated_gb, self.typical_gb
        typical = worst if typical is None else typical
        return chance_of_need(gb, worst + outside, typical + outside, self.widths)


class DryJob:
    """Dry runs of a job on a device, and the memory that they need.

    Args:
        job: the job.
        device: the device to predict for.
        evaluation: its timeline, if it is known.
        evaluates: whether to include evaluation, or training alone.
        batch: micro-batch in place of the job's largest one.

    Attributes:
        training: timeline of the largest micro-batch and an optimizer step. If an iteration has
            more micro-batches, it includes the gradients of earlier ones.
        evaluation: timeline of one image, or None.
        assumptions: one line for each thing that is not known, with the value assumed for it.
        at_least: one line per part whose largest size is not known.
        limit_bytes: MEMFIT.BUDGET_GB less the margin, or None.
        expandable_segments: whether the allocator of a GPU grows its segments, as under a budget.
    """

    def __init__(
        self,
        job: Job,
        device: DeviceModel,
        evaluation: Optional[Timeline] = None,
        evaluates: bool = True,
        batch: Any = None,
    ) -> None:
        self.job = job
        self.device = device
        budget_gb = job.budget_gb
        margin = margin_of(job, device)
        self.limit_bytes = None if budget_gb is None else margin.limit_bytes(budget_gb * GB)
        self.expandable_segments = segments_expand(under_budget=budget_gb is not None)
        self._known: dict[Optional[int], Optional[list[DeviceUse]]] = {}  # by limit
        self._like = device.is_gpu, device.foreach
        batches = job.batches
        with one_line_errors(lambda: job.assumptions):
            batch = job.training_batch() if batch is None else batch
            self.image_size = size_of(batch)
            self.num_instances = batches.num_instances
            self.training = self._train(batch)
        self.evaluation = evaluation
        if evaluation is None and evaluates and job.evaluates:
            with one_line_errors(lambda: batches.evaluation_assumptions, in_evaluation=True):
                self.evaluation = steps.evaluate(job, job.evaluation_batch(), *self._like)
        timelines = [t for t in (self.training, self.evaluation) if t is not None]
        notes = [note for timeline in timelines for note in timeline.notes]
        assumed = [*job.assumptions]
        if self.evaluation is not None:
            assumed += batches.evaluation_assumptions
        self.assumptions = tuple(dict.fromkeys(assumed))
        self.at_least = tuple(dict.fromkeys([*batches.at_least, *notes]))

    @cached_property
    def trace(self) -> tuple[list[int], ...]:
        """Sizes of allocations and frees, equal for jobs that do the same."""
        return tuple(t.changes_bytes() for t in (self.training, self.evaluation) if t is not None)

    def with_batch(self, batch: Any, settings: Mapping[str, Any]) -> "DryJob":
        """The job with another micro-batch, and with settings that do not concern evaluation."""
        job = self.job.with_settings(settings)
        return type(self)(job, self.device, self.evaluation, False, batch)

    def fits(self, limit_bytes: int) -> bool:
        """Whether the job runs within a limit of the process, context included."""
        return self._uses_within(limit_bytes) is not None

    def least_bytes(self) -> int:
        """The smallest limit in which the job fits, to 16 MiB."""
        low, high = self.training_bytes(), self.total_bytes()
        while high - low > _RESOLUTION:
            middle = (low + high) // 2
            low, high = (low, middle) if self.fits(middle) else (middle, high)
        return high

    def training_bytes(self) -> int:
        """Bytes that the process needs in training, including the context.

        Memory that the allocator cannot use is not included.
        """
        use = self.uses()[0]
        return use.total_bytes - use.reserved_bytes + use.allocated_bytes

    def total_bytes(self, limit_bytes: Optional[int] = None) -> int:
        """Bytes of the process in training and in the evaluations between, including the context.

        With a limit, they are within the limit if possible.
        """
        return max(use.total_bytes for use in self.uses(limit_bytes))

    @cached_property
    def offloaded_bytes(self) -> int:
        """Page-locked RAM of a rank for offloaded activations.

        PyTorch allocates powers of two, and keeps them (ATen/core/CachingHostAllocator.h).
        """
        copies = self.training.work["forward"].copies
        return sum(1 << (copy.num_bytes - 1).bit_length() for copy in copies)

    @property
    def host_bytes(self) -> float:
        """Approximate RAM of a rank and its workers, without the dataset."""
        of_loader = loader_bytes(self.job.cfg, self.job.ranks)
        return of_loader + self.offloaded_bytes + self.evaluation_host_bytes

    @property
    def evaluation_host_bytes(self) -> int:
        """RAM of a rank for the results in evaluation that are made on the host."""
        return 0 if self.evaluation is None else self.evaluation.host_bytes

    def training_use(self, limit_bytes: Optional[int] = None) -> DeviceUse:
        """Device memory of training; within the limit if possible."""
        return self.uses(limit_bytes)[0]

    def evaluation_decides(self, limit_bytes: Optional[int] = None) -> bool:
        """Whether evaluation takes more device memory than training."""
        uses = self.uses(limit_bytes)
        return len(uses) > 1 and uses[1].allocated_bytes > uses[0].allocated_bytes

    def seconds(self) -> float:
        """Predicted seconds per iteration, of the largest images."""
        sizes = self.job.geometry.micro_batch_sizes()
        work = self.training.work
        of_largest = self.device.seconds_with_copies(work["forward"], work["backward"])
        in_addition = len(sizes) * self.device.seconds_per_micro_batch
        of_all = of_largest * sum(sizes) / sizes[0] + in_addition
        of_step = self.device.seconds(work["optimizer"])
        if self.job.cfg.MEMFIT.OPTIMIZER.ZERO:  # each rank sends what it stepped to all others
            of_step += self.training.bytes_of("parameters") / self.device.copied_bytes_per_s
        return of_all + of_step

    def time_range(self, before: "DryJob") -> Range:
        """Range of the seconds per iteration over those of the job with other settings."""
        formats = [job.job.precision("cpu").dtype for job in (self, before)]
        return factor_range(self.seconds() / before.seconds(), formats[0] != formats[1])

    def estimate(
        self, limit_bytes: Optional[int] = None, with_range: bool = False
    ) -> MemoryEstimate:
        """Describe the memory.

        Args:
            limit_bytes: limit of the process, within which the memory stays if possible.
            with_range: whether to make the dry runs of other cases, whose memory is the range's.
        """
        others, typical_size = self._others() if with_range else (Others(), self.image_size)
        typical = self.job.batches.typical if with_range else None
        uses = self.uses(limit_bytes)
        geometry = self.job.geometry
        widths = widths_of(uses[0], self.device, others, self.job.batches.is_guess)
        return MemoryEstimate(
            device=self.device.description,
            from_run=self.device.from_run,
            times=self.device.times,
            num_gpus=geometry.ranks,
            images_per_gpu=geometry.images_per_batch,
            micro_batch_size=geometry.largest_micro_batch,
            accumulation_steps=geometry.accumulation_steps,
            image_size=self.image_size,
            num_instances=self.num_instances,
            assumptions=self.assumptions,
            at_least=self.at_least,
            peak_allocated_gb=uses[0].allocated_bytes / GB,
            peak_reserved_gb=uses[0].reserved_bytes / GB,
            device_total_gb=self.total_bytes(limit_bytes) / GB,
            evaluation_gb=uses[1].allocated_bytes / GB if uses[1:] else None,
            evaluation_host_gb=self.evaluation_host_bytes / GB,
            typical_gb=None if others.typical is None else others.typical / GB,
            typical_size=typical_size,
            typical_instances=None if typical is None else typical.num_instances,
            range_gb=_in_gb(range_of(uses[0].allocated_bytes, widths, OF_TENSORS)),
            device_range_gb=_in_gb(range_of(self.total_bytes(limit_bytes), widths, widths)),
            widths={source: (low / GB, high / GB) for source, (low, high) in widths.items()},
            breakdown={
                owner: num_bytes / GB for owner, num_bytes in uses[0].breakdown.most_common()
            },
            outside={owner: num_bytes / GB for owner, num_bytes in uses[0].outside.most_common()},
            seconds_per_iteration=self.seconds(),
            seconds_range=seconds_range(self.seconds()),
            expandable_segments=self.expandable_segments if self.device.is_gpu else None,
            other_segments_gb=self._other_segments_gb(),
            num_workers=self.job.cfg.DATALOADER.NUM_WORKERS,
            host_gb=self.host_bytes / GB,
            offloaded_gb=self.offloaded_bytes / GB,
        )

    def _others(self) -> tuple[Others, tuple[int, int]]:
        """The memory of other cases, and the size of a typical micro-batch."""
        batches: Any = self.job.batches
        size, smallest = self.image_size, None
        if batches.has_any_shape:
            usual = batches.in_shape(TYPICAL_SIZE)
            typical_batch = self.job.training_batch(batches=usual.typical or usual)
            size = size_of(typical_batch)
        has_other_shapes = size != self.image_size  # else a crop decides
        if has_other_shapes:
            shapes = [batches.in_shape(shape) for shape in EXTREME_SIZES]
            batches = min(
                shapes, key=lambda b: padded_area(size_of(self.job.training_batch(batches=b)))
            )
            smallest = self._peak(self._train_on(batches))
        least = batches.typical or batches
        timeline = self._train_on(least)
        mean = typical = self._peak(timeline)
        if has_other_shapes:
            typical = self._peak(self._train(typical_batch))
        if self.training.has_roi_heads:
            timeline = self._train_on(least, few_on_objects=True)
        few = none = self._peak(timeline)
        most = gradients = None
        if self.device.is_gpu:
            none = self._peak(timeline, convolution_workspace="none")
            most = self._peak(self.training, convolution_workspace="most")
        if not self.device.release_is_known:
            gradients = self._peak(self.training) + self.training.bytes_of("gradients")
        return Others(typical, smallest, mean, few, none, most, gradients), size

    def _train_on(self, batches: Batches, few_on_objects: bool = False) -> Timeline:
        return self._train(self.job.training_batch(batches=batches), few_on_objects)

    def _peak(self, timeline: Timeline, **values: Any) -> int:
        """Peak allocated on the device, with other values of it."""
        device = replace(self.device, **values)
        return device.use(timeline, None, self.expandable_segments).allocated_bytes

    def _train(self, batch: Any, few_on_objects: bool = False) -> Timeline:
        accumulates = len(self.job.geometry.micro_batch_sizes()) > 1
        with one_line_errors():
            return steps.train(self.job, [batch], *self._like, accumulates, few_on_objects)

    def uses(self, limit_bytes: Optional[int] = None) -> list[DeviceUse]:
        """Device memory of training and evaluation; without the limit if that is too low."""
        uses = self._uses_within(limit_bytes) or self._uses_within(None)
        assert uses is not None  # without a limit, everything fits
        return uses

    def _uses_within(self, limit_bytes: Optional[int]) -> Optional[list[DeviceUse]]:
        """Device memory of training and evaluation; None if they do not fit."""
        if limit_bytes not in self._known:
            try:
                self._known[limit_bytes] = self._find_uses(limit_bytes)
            except DoesNotFit:
                self._known[limit_bytes] = None
        return self._known[limit_bytes]

    def _find_uses(self, limit_bytes: Optional[int]) -> list[DeviceUse]:
        return self._uses_of_device(limit_bytes, self.expandable_segments)

    def _uses_of_device(self, limit_bytes: Optional[int], expands: bool) -> list[DeviceUse]:
        timelines = [t for t in (self.training, self.evaluation) if t is not None]
        return [self.device.use(t, limit_bytes, expands, self.job.ranks) for t in timelines]

    def _other_segments_gb(self) -> Optional[float]:
        if not self.device.is_gpu:
            return None
        uses = self._uses_of_device(None, not self.expandable_segments)
        return max(use.total_bytes for use in uses) / GB


def _in_gb(ends: tuple[float, float]) -> tuple[float, float]:
    low, high = ends
    return low / GB, high / GB
