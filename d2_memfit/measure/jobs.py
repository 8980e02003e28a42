# Copyright (c) the d2_memfit developers.
"""The measurements of a device; each function yields its records."""

import platform
from collections.abc import Callable, Iterator
from functools import partial

import torch
from detectron2.engine import SimpleTrainer

from .. import __version__, compat
from ..engine import AccumulatingTrainer
from ..job import RecoveryOptions
from ..planner.device import calibrate
from .attempt import attempt
from .blocks import measure_blocks
from .compare import compare_preset, compare_zoo
from .crowded import measure_crowded
from .outside import measure_outside
from .plans import measure_plans
from .scale import MASK_RCNN, Record, Scale
from .timed_steps import recover, step_of, train

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
    """Compare estimates with measurements for configs of the zoo, with as few images as fit."""
    for config in _ZOO[: scale.num_items]:
        yield {"config": config, **attempt(partial(compare_zoo, config, device, scale), device)}


def measure_presets(device: torch.device, scale: Scale) -> Iterator[Record]:
    """Compare presets with measurements under the limit of each card size."""
    for config in _PRESETS[: scale.num_items]:
        record = attempt(partial(compare_preset, config, device, scale), device)
        yield {"config": config, **record}


def measure_recovery(device: torch.device, scale: Scale) -> Iterator[Record]:
    """Measure a Mask R-CNN batch that does not fit, and the same with enough memory."""
    yield attempt(partial(recover, device, scale), device)


def measure_techniques(device: torch.device, scale: Scale) -> Iterator[Record]:
    """Measure memory and time of a step with one technique, and without."""
    for num_images in (2, 1):
        without = attempt(partial(step_of, None, num_images, device, scale), device)
        if "error" not in without:
            break
    yield {"technique": None, **without}
    for name in _TECHNIQUES[: scale.num_items]:
        record = attempt(partial(step_of, name, num_images, device, scale), device)
        if "seconds" in record and "seconds" in without:
            record["time_factor"] = record["seconds"] / without["seconds"]
            predicted = record["predicted_seconds"] / without["predicted_seconds"]
            record["predicted_time_factor"] = predicted
        yield {"technique": name, **record}


def measure_plain(device: torch.device, scale: Scale) -> Iterator[Record]:
    """Measure Detectron2's trainer and ours with the same model and images."""
    one_by_one = partial(AccumulatingTrainer, accumulation_steps=2)
    with_recovery = partial(AccumulatingTrainer, recovery=RecoveryOptions())
    for name, make, num_images in (
        ("Detectron2", SimpleTrainer, 2),
        ("d2_memfit", AccumulatingTrainer, 2),
        ("d2_memfit, with recovery", with_recovery, 2),
        ("d2_memfit, one image at a time", one_by_one, 1),
    ):
        record = attempt(partial(train, make, num_images, device, scale), device)
        yield {"trainer": name, **record}


# By name, in the order of measurement: the most informative first.
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
