# Copyright (c) the d2_memfit developers.
"""The measurements of a device; each function yields its records."""

import platform
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Optional

import torch
from detectron2.engine import SimpleTrainer

from .. import __version__, compat
from ..config import with_settings
from ..engine import AccumulatingTrainer
from ..errors import MemfitError
from ..job import Job, RecoveryOptions, WorstCase
from ..memory import cuda_context_bytes, release_memory
from ..planner.device import calibrate
from ..planner.estimates import DryJob, run_for_real
from ..techniques import get_technique
from .outside import measure_outside
from .peaks import limited, load_kernels, median_seconds, outside_bytes, peaks_of
from .plans import measure_blocks, measure_crowded, measure_plans
from .scale import MASK_RCNN, TINY_MODEL, Record, Scale, attempt, largest_that_fits
from .steps import Steps, allocated_bytes, compared, measured_steps

__all__ = ["JOBS"]

_GB = 2**30

_ZOO = (
    MASK_RCNN,
    "COCO-Detection/faster_rcnn_R_50_FPN_3x",
    "COCO-Detection/retinanet_R_50_FPN_3x",
    "COCO-Keypoints/keypoint_rcnn_R_50_FPN_3x",
    "COCO-PanopticSegmentation/panoptic_fpn_R_50_3x",
    "COCO-Detection/faster_rcnn_R_50_C4_3x",
    "COCO-InstanceSegmentation/mask_rcnn_R_50_DC5_3x",
    "COCO-Detection/rpn_R_50_FPN_1x",
    "COCO-InstanceSegmentation/mask_rcnn_R_101_FPN_3x",
    "COCO-Detection/retinanet_R_101_FPN_3x",
    "COCO-Detection/faster_rcnn_X_101_32x8d_FPN_3x",
    "Misc/cascade_mask_rcnn_R_50_FPN_3x",
)
_PRESETS = (
    f"{MASK_RCNN}_6GB",
    "COCO-Detection/faster_rcnn_R_50_FPN_3x_4GB",
    "COCO-Detection/retinanet_R_50_FPN_3x_6GB",
    f"{MASK_RCNN}_4GB",
    "COCO-InstanceSegmentation/mask_rcnn_R_101_FPN_3x_8GB",
    "COCO-Detection/faster_rcnn_X_101_32x8d_FPN_3x_8GB",
)
_TECHNIQUES = (
    "ActivationCheckpointing",
    "ActivationOffload",
    "MixedPrecision",
    "ChunkedHeads",
    "ChunkedMatching",
    "OptimizerImplementation",
)


def describe_machine(device: torch.device, scale: Scale) -> Iterator[Record]:
    """Describe the machine and versions on which the figures depend."""
    record: Record = {
        "card": platform.processor() or platform.machine(),
        "rehearsal": device.type == "cpu",
        "d2_memfit": __version__,
        "detectron2": "main" if compat.SAVES_INNER_TRAINER else "v0.6",
        "pytorch": torch.__version__,
        "python": platform.python_version(),
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        record.update(
            card=properties.name,
            total_gb=properties.total_memory / _GB,
            capability=f"{properties.major}.{properties.minor}",
            cuda=torch.version.cuda,
            cudnn=torch.backends.cudnn.version(),
        )
    yield record


def measure_calibration(device: torch.device, scale: Scale) -> Iterator[Record]:
    """Measure speeds and the memory of libraries: the content of a device file."""
    yield calibrate(device, scale.seconds)


def measure_zoo(device: torch.device, scale: Scale) -> Iterator[Record]:
    """Compare estimates with measurements for configs of the zoo, with two images if they fit."""

    def run(config: str) -> Record:
        def of(num_images: int) -> DryJob:
            return scale.dry_job(scale.cfg(config, device, {"SOLVER.IMS_PER_BATCH": num_images}))

        num_images, dry_job = largest_that_fits(of, (2, 1), device)
        return {"images": num_images, **_compare(dry_job, device)}

    for config in _ZOO[: scale.num_items]:
        yield {"config": config, **attempt(partial(run, config), device)}


def measure_presets(device: torch.device, scale: Scale) -> Iterator[Record]:
    """Compare presets with measurements under the limit of each card size."""

    def run(config: str) -> Record:
        dry_job = scale.dry_job(scale.cfg(config, device))
        job = dry_job.job
        budget_bytes = int((job.budget_gb or 0) * _GB)
        record = {"budget_gb": job.budget_gb, "images": job.geometry.micro_batch_sizes()[0]}
        if device.type == "cpu":
            return {**record, **_compare(dry_job, device)}
        if budget_bytes > torch.cuda.get_device_properties(device).total_memory:
            raise MemfitError("this card is smaller")
        load_kernels(device)
        with limited(device, budget_bytes - cuda_context_bytes(device)):
            return {**record, **_compare(dry_job, device, dry_job.limit_bytes)}

    for config in _PRESETS[: scale.num_items]:
        yield {"config": config, **attempt(partial(run, config), device)}


def _compare(dry_job: DryJob, device: torch.device, limit_bytes: Optional[int] = None) -> Record:
    """A job's estimated and measured memory in training and evaluation."""
    uses = dry_job._uses(limit_bytes)
    record: Record = {"predicted_seconds": dry_job.seconds()}
    phases = (("training", dry_job.training), ("evaluation", dry_job.evaluation))
    with peaks_of(device) as peaks:
        for (phase, timeline), use, _ in zip(phases, uses, run_for_real(dry_job, str(device))):
            allocated, reserved = peaks.take()
            estimated = allocated_bytes(timeline, use, device)
            if device.type == "cuda":
                record[f"{phase}_reserved_gb"] = reserved / _GB
                record[f"{phase}_estimated_reserved_gb"] = use.reserved_bytes / _GB
                record[f"{phase}_device_gb"] = (reserved + outside_bytes(device)) / _GB
                record[f"{phase}_estimated_device_gb"] = use.total_bytes / _GB
            record[f"{phase}_gb"] = allocated / _GB
            record[f"{phase}_estimated_gb"] = estimated / _GB
            record[f"{phase}_error"] = estimated / allocated - 1
    return record


def measure_recovery(device: torch.device, scale: Scale) -> Iterator[Record]:
    """Measure a Mask R-CNN batch that does not fit, and the same with enough memory."""
    cfg = scale.step_cfg(8, device, TINY_MODEL if scale.case else {})
    job = Job.from_cfg(cfg, 1, batch=WorstCase((512, 512), 5))
    images = job.training_batch()

    def run() -> Record:
        peaks = {}
        for num_images in (1, 8):
            with peaks_of(device) as peak:
                steps = Steps(job, device, batch=images[:num_images])
                steps.step()
                peak.take()
                steps.step()
                peaks[num_images] = peak.take()[0]
            del steps
            release_memory(device)
        enough = Steps(job, device, partial(AccumulatingTrainer, micro_batch_size=4), images)
        seconds = median_seconds(enough.step, device, scale.rounds)
        del enough
        release_memory(device)
        with limited(device, (peaks[1] + 3 * peaks[8]) // 4):
            recovering = partial(AccumulatingTrainer, recovery=RecoveryOptions())
            steps = Steps(job, device, recovering, images)
            steps.step()
            under_limit = median_seconds(steps.step, device, scale.rounds)
        return {
            "images": len(images),
            "oom_events": steps.trainer.recovery.oom_events,
            "micro_batch": steps.trainer.recovery.size.images,
            "seconds_with_enough_memory": seconds,
            "seconds_under_the_limit": under_limit,
        }

    yield attempt(run, device)


def measure_techniques(device: torch.device, scale: Scale) -> Iterator[Record]:
    """Measure memory and time of a step with one technique, and without."""

    def of(num_images: int, name: Optional[str] = None) -> DryJob:
        cfg = scale.step_cfg(num_images, device)
        settings = get_technique(name).enabling_settings(cfg) if name else {}
        return scale.dry_job(with_settings(cfg, settings))

    def run(name: Optional[str]) -> Record:
        return measured_steps(of(num_images, name), device, scale.rounds)

    num_images, _ = largest_that_fits(of, (2, 1), device)
    plain: Record = {}
    for name in (None, *_TECHNIQUES[: scale.num_items]):
        record = attempt(partial(run, name), device)
        plain = plain or record
        yield {"technique": name or "none", "images": num_images, **compared(record, plain)}


def measure_plain(device: torch.device, scale: Scale) -> Iterator[Record]:
    """Measure Detectron2's trainer and ours with the same model and images."""

    def run(make: Callable[..., Any], num_images: int) -> Record:
        dry_job = scale.dry_job(scale.step_cfg(num_images, device))
        return measured_steps(dry_job, device, scale.rounds, make)

    one_by_one = partial(AccumulatingTrainer, accumulation_steps=2)
    with_recovery = partial(AccumulatingTrainer, recovery=RecoveryOptions())
    for name, make, num_images in (
        ("Detectron2", SimpleTrainer, 2),
        ("d2_memfit", AccumulatingTrainer, 2),
        ("d2_memfit, with recovery", with_recovery, 2),
        ("d2_memfit, one image at a time", one_by_one, 1),
    ):
        yield {"trainer": name, **attempt(partial(run, make, num_images), device)}


# By name, in the order of measurement: the first describes the card, then the most informative.
JOBS: dict[str, Callable[[torch.device, Scale], Iterator[Record]]] = {
    "machine": describe_machine,
    "calibration": measure_calibration,
    "outside": measure_outside,
    "zoo": measure_zoo,
    "plans": measure_plans,
    "blocks": measure_blocks,
    "crowded": measure_crowded,
    "presets": measure_presets,
    "recovery": measure_recovery,
    "techniques": measure_techniques,
    "plain": measure_plain,
}
