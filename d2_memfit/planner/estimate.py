# Copyright (c) the d2_memfit developers.
"""The memory of a job: dry runs of few images, and lines through them for more."""

import math
from collections import Counter
from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Optional, Union

from detectron2.config import CfgNode
from omegaconf import DictConfig

from ..common import GB
from ..job import (
    EXTREME_SIZES,
    TYPICAL_SIZE,
    GivenBatches,
    Job,
    objects_per_image,
    padded_area,
    size_of,
    with_objects,
)
from ..memory import segments_expand
from ..techniques.host import loader_bytes
from .device import DeviceModel, DeviceUse
from .errors import one_line_errors
from .from_run import as_in_run
from .probe import check_probe, measured_uses
from .steps import Session
from .timeline import Allocate, Timeline
from .worst_outputs import parts_with_roi_heads

__all__ = ["DryJob", "MemoryEstimate", "estimate_memory"]


_FEW = 3  # images: above, memory is on lines through the runs of 2 and of 3
_CLOSE = 1.03  # times the budget: expected memory between blocks is not exact
_FEW_PROPOSALS = 0.6  # of the heads of masks and keypoints, which run on proposals on objects
# The most objects in an image that are told apart, and bytes of one that do not count.
MOST_OBJECTS, _LITTLE_BYTES = 1000, 1024
_UNKNOWN_CARD = 0.5  # of the tensors, upwards: cuDNN may choose any algorithm
_FIXED = ("parameters", "buffers", "gradients", "optimizer", "DDP buckets")

_Place = tuple[str, str, str]  # phase, module, and operator with the number of dimensions
_Places = dict[_Place, Counter[str]]


@dataclass(frozen=True)
class MemoryEstimate:
    """Memory of each GPU in a job's largest iteration, in GB of 2^30 bytes.

    Attributes:
        device: description of the device.
        from_run: a line about the earlier run that corrects the estimate; "" without one.
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
        peak_reserved_gb: ``torch.cuda.max_memory_reserved`` after training.
        device_total_gb: device memory of the process, including the context, in training and in
            the evaluations between.
        evaluation_gb: peak allocated in evaluation; None without evaluation.
        evaluation_host_gb: the RAM that results in evaluation take at the size of the image file,
            with MEMFIT.EVALUATION.ON_HOST on a GPU; otherwise 0.
        typical_gb: ``peak_allocated_gb`` with photographs of a typical shape, if theirs is not
            known, and a mean number of objects; None if neither is known to matter.
        range_gb: interval of ``peak_allocated_gb``.
        device_range_gb: interval of ``device_total_gb``.
        wider: a line for each thing that makes the range wider than that of other software.
        breakdown: ``peak_allocated_gb`` by owner, the largest first.
        outside: the process's other memory in training, by owner: context, loaded kernels, NCCL,
            and memory between the allocator's blocks.
        expandable_segments: whether PyTorch's allocator grows its segments; None for a CPU.
        num_workers: loader workers on each rank.
        host_gb: approximate RAM of each rank and its workers, without the dataset.
        offloaded_gb: the part of it that is page-locked, for activations.
        objects_that_fit: the most objects in each image with which the job fits its budget, at most
            10,000; None without a budget, or if the number of objects does not matter.
    """

    device: str
    from_run: str
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
    range_gb: tuple[float, float]
    device_range_gb: tuple[float, float]
    wider: tuple[str, ...]
    breakdown: dict[str, float]
    outside: dict[str, float]
    expandable_segments: Optional[bool]
    num_workers: int
    host_gb: float
    offloaded_gb: float
    objects_that_fit: Optional[int] = None


class DryJob:
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
        expandable_segments: whether the allocator of a GPU grows its segments, as under a budget.
    """

    def __init__(
        self,
        job: Job,
        device: Union[DeviceModel, str, None] = None,
        evaluates: bool = True,
        progress: Callable[[str], Any] = str,
        run: Optional[Union[str, Path]] = None,
        like: Optional["DryJob"] = None,
    ) -> None:
        if not isinstance(device, DeviceModel):
            device = DeviceModel.choose(device, job.cfg.MODEL.DEVICE)
        if run is not None:
            device = as_in_run(device, job, run)
        self.job, self.device = job, device
        self.evaluates = evaluates and job.evaluates
        self._progress, self._like = progress, like
        self._runs: dict[tuple[int, bool], Timeline] = {}  # by images, and whether it accumulates
        self._known: dict[Any, Any] = {}  # what is computed from them
        self.expandable_segments = segments_expand(under_budget=job.budget_gb is not None)
        self.measured: list[DeviceUse] = []  # by a probe: training, and evaluation
        self.notes: tuple[str, ...] = ()

    def with_images(self, num_images: int) -> "DryJob":
        """The same job in micro-batches of another size, with the same dry runs."""
        other = copy(self)
        other.job = self.job.with_settings({"MEMFIT.MICRO_BATCH": num_images})
        return other

    def probe(self) -> None:
        """Measure the largest batch on this machine's GPU; :meth:`uses` then has what it took.

        Raises:
            ConfigError: there is no GPU.
        """
        check_probe(self.device)
        self.measured = measured_uses(self.job, self.evaluates, self.use().breakdown)
        if not self.measured:
            self.notes = ("The GPU cannot hold the largest batch: estimated by a dry run",)

    @property
    def num_images(self) -> int:
        """Images in the largest micro-batch."""
        return self.job.geometry.largest_micro_batch

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
        if key not in self._runs:
            self._runs[key] = self._step(num_images, accumulates)
        return self._runs[key]

    def _step(self, num_images: int, accumulates: bool = False, batch: Any = None) -> Timeline:
        self._progress(f"Dry run: {num_images} image{'s' * (num_images > 1)}")
        with one_line_errors(lambda: self.job.batches.assumptions):
            images = self.job.training_batch(num_images) if batch is None else batch
            return self.session.train(images, accumulates=accumulates)

    def whole(self, num_images: Optional[int] = None) -> Timeline:
        """The dry run of a micro-batch with as many images, the largest by default."""
        n = self.num_images if num_images is None else num_images
        return self.run(n, n < self.job.geometry.window)

    @cached_property
    def evaluation(self) -> Optional[Timeline]:
        """The dry run of an image's evaluation; None without one."""
        if not self.evaluates:
            return None
        if self._like is not None:
            return self._like.evaluation
        self._progress("Dry run: evaluation")
        batches = self.job.batches
        with one_line_errors(lambda: batches.evaluation_assumptions, in_evaluation=True):
            return self.session.evaluate(self.job.evaluation_batch())

    def use(self, num_images: Optional[int] = None) -> DeviceUse:
        """Device memory of training with some images in a micro-batch, the largest by default.

        It is that of a dry run of all of them, if there is one or if they are few. Otherwise it is
        on lines through the runs of 2 and of 3.
        """
        n = self.num_images if num_images is None else num_images
        was_run = (n, n < self.job.geometry.window) in self._runs
        return self._use(self.whole(n)) if n <= _FEW or was_run else self.expected_use(n)

    def _use(self, timeline: Timeline) -> DeviceUse:
        use = partial(self.device.use, timeline, self.expandable_segments, self.job.ranks)
        return self._once(("use", id(timeline)), use)

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
        of_three = self._use(self.run(_FEW))
        at_peak = max(self._places_of(num_images).values(), key=_sum)
        # The allocator rounds sizes up, and keeps memory between blocks.
        rounding = of_three.allocated_bytes - max(
            map(_sum, self._places_in(self.run(_FEW)).values())
        )
        at_peak["rounding"] = max(rounding, 0)
        allocated = _sum(at_peak)
        reserved = round(allocated * of_three.reserved_bytes / of_three.allocated_bytes)
        outside = of_three.outside.copy()
        outside["between blocks"] = reserved - allocated
        total = of_three.total_bytes - of_three.reserved_bytes + reserved
        return DeviceUse(allocated, reserved, total, +at_peak, +outside)

    def _places_of(self, num_images: int) -> _Places:
        """The peaks of :func:`_places_in` for more images, on lines."""
        two, three = (self._places_in(self.run(n)) for n in (2, _FEW))
        places = {}
        for at, last in three.items():
            before, more = two.get(at, last), num_images - _FEW
            places[at] = Counter({k: v + more * (v - before[k]) for k, v in last.items()})
            if num_images < self.job.geometry.window:
                places[at]["gradients"] = self.session.gradient_bytes
        return places

    def _places_in(self, timeline: Timeline) -> _Places:
        return self._once(("places", id(timeline)), lambda: _places_in(self.device, timeline))

    def uses(self, num_images: Optional[int] = None) -> Iterator[DeviceUse]:
        """Device memory of training, and of evaluation if there is one."""
        if self.measured and num_images in (None, self.num_images):
            yield from self.measured
            return
        yield self.use(num_images)
        if self.evaluation is not None:
            yield self._use(self.evaluation)

    def total_bytes(self, num_images: Optional[int] = None) -> int:
        """Bytes of the process in training and in the evaluations between, context included."""
        return max(use.total_bytes for use in self.uses(num_images))

    def budget_bytes(self, use: DeviceUse) -> float:
        """The smallest budget with headroom in which the allocator never returns what it keeps.

        It would do so in each iteration, and recovery would then halve the micro-batches.
        """
        outside, headroom = use.total_bytes - use.reserved_bytes, self.headroom_bytes(use)
        return max(use.allocated_bytes + headroom, use.reserved_bytes) + outside

    def headroom_bytes(self, use: DeviceUse) -> float:
        """What other software and another context may take in addition."""
        of_tensors, of_context = self.device.margin
        return of_tensors * use.allocated_bytes + of_context

    @property
    def least_bytes(self) -> float:
        """A bound of the smallest budget, from what exists in each optimizer step. No dry run."""
        outside = sum(self.device.outside_bytes(self.job.ranks).values())
        of_tensors, of_context = self.device.margin
        return self.session.fixed_bytes * (1 + of_tensors) + of_context + outside

    def fits(self, budget_gb: float, num_images: Optional[int] = None) -> bool:
        """Whether a micro-batch fits a budget, and evaluation does, by dry runs."""
        n = self.num_images if num_images is None else num_images
        budget = budget_gb * GB
        if n > _FEW and self.budget_bytes(self.expected_use(n)) > _CLOSE * budget:
            return False
        self.whole(n)
        return all(self.budget_bytes(use) <= budget for use in self.uses(n))

    def flops(self) -> float:
        """Floating-point operations of an image in a forward and a backward."""
        self.use()
        (num_images, _), timeline = next(iter(self._runs.items()))
        return (timeline.flops["forward"] + timeline.flops["backward"]) / num_images

    @property
    def offloaded_bytes(self) -> int:
        """Page-locked RAM of a rank for offloaded activations.

        PyTorch allocates powers of two, and keeps them (ATen/core/CachingHostAllocator.h).
        """
        self.use()
        (num_images, _), timeline = max(self._runs.items(), key=lambda run: run[0])
        num_bytes = sum(1 << (copied - 1).bit_length() for copied in timeline.offloaded)
        return num_bytes * -(-self.num_images // num_images)

    @property
    def evaluation_host_bytes(self) -> int:
        """RAM of a rank for the results in evaluation that are made on the host."""
        return 0 if self.evaluation is None else self.evaluation.host_bytes

    @property
    def host_bytes(self) -> float:
        """Approximate RAM of a rank and its workers, without the dataset."""
        of_loader = loader_bytes(self.job.cfg, self.job.ranks)
        return of_loader + self.offloaded_bytes + self.evaluation_host_bytes

    @property
    def assumptions(self) -> tuple[str, ...]:
        """One line for each thing that is not known, with the value assumed for it."""
        batches = self.job.batches
        of_evaluation = batches.evaluation_assumptions if self.evaluates else ()
        return tuple(dict.fromkeys([*self.job.batches.assumptions, *of_evaluation, *self.notes]))

    @property
    def at_least(self) -> tuple[str, ...]:
        """One line for each part whose largest size is not known."""
        timelines = [*self._runs.values(), *([self.evaluation] if self.evaluation else [])]
        notes = [note for timeline in timelines for note in timeline.notes]
        return tuple(dict.fromkeys([*self.job.batches.at_least, *notes]))

    def objects_that_fit(self, budget_gb: float) -> Optional[int]:
        """The most objects in each image with which the job fits, on lines of two more runs.

        They have one image with 2 and with 4 times the job's own objects. In each module, memory is
        on a line in objects, and more images need as much more. None if the images have no objects.
        At most ``MOST_OBJECTS``.
        """
        batch = self.job.training_batch(1)
        numbers = objects_per_image(batch)
        if not numbers:
            return None
        own, n = max(numbers), self.num_images
        twice, four_times = (
            self._places_in(
                self._step(1, n < self.job.geometry.window, with_objects(batch, k * own))
            )
            for k in (2, 4)
        )
        run = self._runs.get((n, n < self.job.geometry.window))
        places = self._places_in(run) if run else self._places_of(n)
        use = self.use()
        left = budget_gb * GB - self.budget_bytes(use)
        room = use.allocated_bytes + left * use.allocated_bytes / use.reserved_bytes
        most = float(MOST_OBJECTS)
        for at in places.keys() & twice.keys() & four_times.keys():
            of_object = n * (_sum(four_times[at]) - _sum(twice[at])) / (2 * own)
            if of_object > _LITTLE_BYTES:
                most = min(most, own + (room - _sum(places[at])) // of_object)
        return max(int(most), 0)

    def estimate(self, with_range: bool = True) -> MemoryEstimate:
        """Describe the memory.

        Args:
            with_range: whether to make the dry run of a typical batch, where that is another one.
        """
        use, *of_evaluation = [*self.uses()]
        total = self.total_bytes()
        geometry = self.job.geometry
        (low, high), typical, wider = self._range(use, with_range)
        outside, (_, of_context) = total - use.allocated_bytes, self.device.margin
        return MemoryEstimate(
            device=self.device.description,
            from_run=self.device.from_run,
            num_gpus=geometry.ranks,
            images_per_gpu=geometry.images_per_batch,
            micro_batch_size=geometry.largest_micro_batch,
            accumulation_steps=geometry.accumulation_steps,
            image_size=size_of(self.job.training_batch()),
            num_instances=self.job.batches.num_instances,
            assumptions=self.assumptions,
            at_least=self.at_least,
            peak_allocated_gb=use.allocated_bytes / GB,
            peak_reserved_gb=use.reserved_bytes / GB,
            device_total_gb=total / GB,
            evaluation_gb=of_evaluation[0].allocated_bytes / GB if of_evaluation else None,
            evaluation_host_gb=self.evaluation_host_bytes / GB,
            typical_gb=None if typical is None else typical / GB,
            range_gb=(low / GB, high / GB),
            device_range_gb=((low + outside) / GB, (high + outside + of_context) / GB),
            wider=tuple(wider),
            breakdown={owner: n / GB for owner, n in use.breakdown.most_common()},
            outside={owner: n / GB for owner, n in use.outside.most_common()},
            expandable_segments=self.expandable_segments if self.device.is_gpu else None,
            num_workers=self.job.cfg.DATALOADER.NUM_WORKERS,
            host_gb=self.host_bytes / GB,
            offloaded_gb=self.offloaded_bytes / GB,
        )

    def _range(
        self, use: DeviceUse, with_typical: bool
    ) -> tuple[tuple[float, float], Optional[float], list[str]]:
        """Range and typical bytes of the tensors, and what makes the range wider."""
        batches: Any = self.job.batches
        worst, device = use.allocated_bytes, self.device
        wider: list[str] = []
        typical: Optional[float] = None
        timeline = self._runs[max(self._runs)]
        scale = worst / self._use(timeline).allocated_bytes
        fixed = sum(use.breakdown[owner] for owner in _FIXED)
        least = (worst - fixed) * 1.0
        if batches.has_any_shape:
            pixels = padded_area(size_of(self.job.training_batch()))
            shapes = [batches.in_shape(size) for size in (*EXTREME_SIZES, TYPICAL_SIZE)]
            areas = [padded_area(size_of(self.job.training_batch(batches=s))) for s in shapes]
            if min(areas) < pixels:  # else a crop decides
                wider.append("the shape of the images is not known (--coco, or --image-size)")
                of_largest = _peak_with_pixels(timeline, 1)
                usual = _peak_with_pixels(timeline, min(areas[-1] / pixels, 1)) / of_largest
                typical = fixed + least * usual
                least *= _peak_with_pixels(timeline, min(areas) / pixels) / of_largest
        of_software = device.margin[0] * worst
        most, less, algorithms = [of_software], [of_software], 0.0
        if of_heads := _bytes_of_heads(timeline):
            wider.append("few proposals may be on objects")
            less.append(least * _FEW_PROPOSALS * scale * of_heads / worst)
        has_roi_heads = bool(parts_with_roi_heads(self.session.model))
        if with_typical and batches.typical is not None and not has_roi_heads:
            few, accumulates = max(run for run in self._runs if run[0] <= _FEW)
            images = self.job.training_batch(few, batches.typical)
            steps = self._step(few, accumulates, images), self.run(few, accumulates)
            of_mean, of_most = (self._use(step).allocated_bytes for step in steps)
            change = of_mean / of_most - 1
            if abs(change) > 0.01:
                wider.append("most images have fewer objects")
                typical = (typical or worst) * (1 + change)
                least *= min(1 + change, 1)
                most.append(abs(change) * worst * (change > 0 or batches.is_guess))
        if more := timeline.more_with_other_algorithms():
            wider.append("other algorithms of convolutions may take more")
            algorithms = more * scale  # a choice, not an error: all of it may come
        if not device.card_is_known:
            wider.append("the card is not known")
            most.append(_UNKNOWN_CARD * worst)
        if not device.release_is_known:
            wider.append("PyTorch's release is not known")
            most.append(self.session.gradient_bytes)
        high = worst + algorithms + math.hypot(*most)
        return (fixed + least - math.hypot(*less), high), typical, wider


def _sum(places: Counter[str]) -> int:
    return sum(places.values())


def _places_in(device: DeviceModel, timeline: Timeline) -> _Places:
    """Bytes by owner at the peak of each operator in each phase of each module."""
    live: Counter[str] = Counter()
    places: _Places = {}
    most: dict[_Place, int] = {}
    num_bytes = 0
    event: Any
    for event in device.events(timeline):
        a = event.allocation
        live[a.owner] += event.num_bytes
        num_bytes += event.num_bytes
        at = a.phase, a.module, f"{a.operator}{len(a.shape)}"
        if isinstance(event, Allocate) and num_bytes > most.get(at, 0):
            most[at], places[at] = num_bytes, live.copy()
    return places


def _peak_with_pixels(timeline: Timeline, share: float) -> float:
    """Peak without parameters and the like, if images have a share of their pixels.

    Attention between all pixels has the square of their number.
    """
    live = peak = 0.0
    for event in timeline.changes():
        a = event.allocation
        if a.owner not in _FIXED:
            is_of_pairs = len(a.shape) == 3 and a.shape[1] == a.shape[2] and a.operator != "input"
            live += event.num_bytes * (share**2 if is_of_pairs else share)
            peak = max(peak, live)
    return peak


def _bytes_of_heads(timeline: Timeline) -> int:
    """Bytes at the peak of heads that run on the proposals on objects alone."""
    return sum(
        a.num_bytes
        for a in timeline.alive_at_peak()
        if "mask_head" in a.module or "keypoint_head" in a.module
    )


def estimate_memory(
    cfg: Union[CfgNode, DictConfig, Job],
    num_gpus: Optional[int] = None,
    device: Optional[str] = None,
    probe: bool = False,
    *,
    evaluates: bool = True,
    run: Optional[Union[str, Path]] = None,
    **given: Any,
) -> MemoryEstimate:
    """Estimate the memory of a job without a GPU, by a dry run of its largest iteration.

    Args:
        cfg: a config of yacs, a LazyConfig, or a :class:`~d2_memfit.Job`, which has ``num_gpus``
            and what is ``given`` already.
        num_gpus: ranks that train together; SOLVER.IMS_PER_BATCH is for all of them. None is the
            world size of this process.
        device: as for :meth:`DeviceModel.choose`. None is the CPU with MODEL.DEVICE cpu, else this
            machine's GPU, else a current CUDA card.
        probe: run the iteration on this machine's GPU, and measure it.
        evaluates: whether to include evaluation, or training alone.
        run: OUTPUT_DIR of an earlier run of this model on this machine. Its peaks correct the
            estimate.
        given: ``trainer=`` the class that trains, with the ``build_*`` methods of
            ``DefaultTrainer``; and, in place of what the job's own mapper makes from the largest
            images of its datasets, ``batch=``, ``image_size=`` or ``num_instances=``, as for
            :meth:`Job.from_cfg`.

    Raises:
        ConfigError: a value in the config cannot work, its model cannot be built, there is no GPU
            to probe, or ``run`` says nothing about the job.
    """
    job = Job.from_any(cfg, ranks=num_gpus, **given)
    dry_job = DryJob(job, device, evaluates, run=run)
    if probe:
        dry_job.probe()
    return dry_job.estimate()
