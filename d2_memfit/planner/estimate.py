# Copyright (c) the d2_memfit developers.
"""The memory of a job: whether it fits a budget, its range, and an estimate of all of it."""

import math
from collections.abc import Iterator
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional, Union

import torch
from detectron2.config import CfgNode
from detectron2.structures import Instances
from omegaconf import DictConfig

from ..common import GB
from ..common.errors import ConfigError
from ..job import (
    EXTREME_SIZES,
    TYPICAL_SIZE,
    Job,
    objects_in,
    padded_area,
    size_of,
    with_objects,
)
from ..techniques.host import loader_bytes
from .device import DeviceUse
from .peaks import FEW, DryRuns, bytes_of
from .probe import measured_uses
from .timeline import Timeline
from .worst_outputs import parts_with_roi_heads

__all__ = ["MOST_OBJECTS", "DryJob", "MemoryEstimate", "estimate_memory"]

_CLOSE = 1.03  # times the budget: expected memory between blocks is not exact
# RoI heads take as many boxes for any number of objects; only overlaps with anchors are larger.
_FEW_OBJECTS = 100
_FEW_PROPOSALS = 0.6  # of the heads of masks and keypoints, which run on proposals on objects
# The most objects in an image that are told apart, and bytes of one that do not count.
MOST_OBJECTS, _LITTLE_BYTES = 1000, 1024
_UNKNOWN_CARD = 0.5  # of the tensors, upwards: cuDNN may choose any algorithm
_FIXED = ("parameters", "buffers", "gradients", "optimizer", "DDP buckets")


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


class DryJob(DryRuns):
    """A job on a device, what it needs there, and whether that fits."""

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
        if not (self.device.is_gpu and torch.cuda.is_available()):
            raise ConfigError("--probe runs the largest batch on a GPU, and no GPU is visible")
        self.measured = measured_uses(self.job, self.evaluates, self.use().breakdown)
        if not self.measured:
            self.notes = ("The GPU cannot hold the largest batch: estimated by a dry run",)

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
        if n > FEW and self.budget_bytes(self.expected_use(n)) > _CLOSE * budget:
            return False
        self.whole(n)
        return all(self.budget_bytes(use) <= budget for use in self.uses(n))

    def _largest(self) -> tuple[int, Timeline]:
        """Images and timeline of the dry run with the most of them."""
        self.use()
        (num_images, _), timeline = max(self.runs.items(), key=lambda run: run[0])
        return num_images, timeline

    def flops(self) -> float:
        """Floating-point operations of an image in a forward and a backward."""
        num_images, timeline = self._largest()
        return (timeline.flops["forward"] + timeline.flops["backward"]) / num_images

    def _offloaded_bytes(self) -> int:
        """Page-locked RAM of a rank for offloaded activations.

        PyTorch allocates powers of two, and keeps them (ATen/core/CachingHostAllocator.h).
        """
        num_images, timeline = self._largest()
        num_bytes = sum(1 << (copied - 1).bit_length() for copied in timeline.offloaded)
        return num_bytes * -(-self.num_images // num_images)

    def objects_that_fit(self, budget_gb: float) -> Optional[int]:
        """The most objects in each image with which the job fits, on lines of two more runs.

        They have one image with 2 and with 4 times the job's own objects. In each module, memory is
        on a line in objects, and more images need as much more. None if the images have no objects.
        At most ``MOST_OBJECTS``.
        """
        (image, *_), n = self.job.training_batch(1), self.num_images
        own = objects_in(image)
        if not own or not isinstance(image.get("instances"), Instances):
            return None
        is_part = n < self.job.window
        more = (self._step(1, is_part, [with_objects(image, k * own)]) for k in (2, 4))
        twice, four_times = map(self._places_in, more)
        run = self.runs.get((n, is_part))
        places = self._places_in(run) if run else self._places_of(n)
        use = self.use()
        left = budget_gb * GB - self.budget_bytes(use)
        room = use.allocated_bytes + left * use.allocated_bytes / use.reserved_bytes
        most = float(MOST_OBJECTS)
        for at in places.keys() & twice.keys() & four_times.keys():
            of_object = n * (bytes_of(four_times[at]) - bytes_of(twice[at])) / (2 * own)
            if of_object > _LITTLE_BYTES:
                most = min(most, own + (room - bytes_of(places[at])) // of_object)
        return max(int(most), 0)

    def estimate(self, with_range: bool = True) -> MemoryEstimate:
        """Describe the memory.

        Args:
            with_range: whether to make the dry run of a typical batch, where that is another one.
        """
        use, *of_evaluation = [*self.uses()]
        total, offloaded = self.total_bytes(), self._offloaded_bytes()
        job, batches, evaluation = self.job, self.job.batches, self.evaluation
        assumed = *batches.assumptions, *(batches.evaluation_assumptions if self.evaluates else ())
        notes = [note for run in [*self.runs.values(), evaluation] if run for note in run.notes]
        host = loader_bytes(self.job.cfg, self.job.ranks) + offloaded
        of_results = evaluation.host_bytes if evaluation else 0
        (low, high), typical, wider = self._range(use, with_range)
        outside, (_, of_context) = total - use.allocated_bytes, self.device.margin
        return MemoryEstimate(
            device=self.device.description,
            from_run=self.device.from_run,
            num_gpus=job.ranks,
            images_per_gpu=job.images_per_batch,
            micro_batch_size=job.largest_micro_batch,
            accumulation_steps=job.cfg.SOLVER.ACCUMULATION_STEPS,
            image_size=size_of(self.job.training_batch()),
            num_instances=batches.num_instances,
            assumptions=tuple(dict.fromkeys([*assumed, *self.notes])),
            at_least=tuple(dict.fromkeys([*batches.at_least, *notes])),
            peak_allocated_gb=use.allocated_bytes / GB,
            peak_reserved_gb=use.reserved_bytes / GB,
            device_total_gb=total / GB,
            evaluation_gb=of_evaluation[0].allocated_bytes / GB if of_evaluation else None,
            evaluation_host_gb=of_results / GB,
            typical_gb=None if typical is None else typical / GB,
            range_gb=(low / GB, high / GB),
            device_range_gb=((low + outside) / GB, (high + outside + of_context) / GB),
            wider=tuple(wider),
            breakdown={owner: n / GB for owner, n in use.breakdown.most_common()},
            outside={owner: n / GB for owner, n in use.outside.most_common()},
            expandable_segments=self.expandable_segments if self.device.is_gpu else None,
            num_workers=self.job.cfg.DATALOADER.NUM_WORKERS,
            host_gb=(host + of_results) / GB,
            offloaded_gb=offloaded / GB,
        )

    def _range(
        self, use: DeviceUse, with_typical: bool
    ) -> tuple[tuple[float, float], Optional[float], list[str]]:
        """Range and typical bytes of the tensors, and what makes the range wider.

        What an unknown card adds is cuDNN's choice of algorithms: it does not count twice.
        """
        batches: Any = self.job.batches
        worst, device = use.allocated_bytes, self.device
        wider: list[str] = []
        typical: Optional[float] = None
        _, timeline = self._largest()
        scale = worst / self._use(timeline).allocated_bytes
        fixed = sum(use.breakdown[owner] for owner in _FIXED)
        least = (worst - fixed) * 1.0
        if batches.has_any_shape:
            pixels = padded_area(size_of(self.job.training_batch()))
            shapes = [batches.in_shape(size) for size in (*EXTREME_SIZES, TYPICAL_SIZE)]
            areas = [padded_area(size_of(self.job.training_batch(batches=s))) for s in shapes]
            if min(areas) < pixels:  # else a crop decides
                wider.append("the shape of the images is not known (--coco, or --image-size)")
                shares = 1, min(areas[-1] / pixels, 1), min(areas) / pixels
                largest, usual, smallest = (_peak_with_pixels(timeline, s) for s in shares)
                typical = fixed + least * usual / largest
                least *= smallest / largest
        of_software = device.margin[0] * worst
        most, less, algorithms = [of_software], [of_software], 0.0
        at_peak = timeline.alive_at_peak()
        heads = (a for a in at_peak if "mask_head" in a.module or "keypoint_head" in a.module)
        if of_heads := sum(a.num_bytes for a in heads):  # they run on proposals on objects
            wider.append("few proposals may be on objects")
            less.append(least * _FEW_PROPOSALS * scale * of_heads / worst)
        no_rois = not parts_with_roi_heads(self.session.model)
        if with_typical and batches.typical and (no_rois or batches.num_instances > _FEW_OBJECTS):
            few, accumulates = max([run for run in self.runs if run[0] <= FEW] or self.runs)
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
            most.append(max(_UNKNOWN_CARD * worst, algorithms))
            algorithms = 0.0
        if not device.release_is_known:
            wider.append("PyTorch's release is not known")
            most.append(self.session.gradient_bytes)
        high = worst + algorithms + math.hypot(*most)
        return (fixed + least - math.hypot(*less), high), typical, wider


def _peak_with_pixels(timeline: Timeline, share: float) -> float:
    """Peak without parameters and the like, if images have a share of their pixels.

    Attention between all pixels has the square of their number.
    """
    live = peak = 0.0
    for event in timeline.changes():
        a = event.allocation
        if a.owner not in _FIXED:
            is_of_pairs = len(a.shape) == 3 and a.shape[1] == a.shape[2]
            live += event.num_bytes * (share**2 if is_of_pairs else share)
            peak = max(peak, live)
    return peak


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
