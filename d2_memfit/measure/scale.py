# Copyright (c) the d2_memfit developers.
"""The extent of the measurements on a device, and their jobs."""

import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Optional

import torch
from detectron2.config import CfgNode

from ..config import load_cfg, with_settings
from ..errors import MemfitError
from ..job import Job, WorstCase
from ..memory import release_memory
from ..planner.device import DeviceModel
from ..planner.estimates import DryJob

__all__ = ["MASK_RCNN", "TINY_MODEL", "Record", "Scale", "attempt", "largest_that_fits"]

Record = dict[str, Any]

MASK_RCNN = "COCO-InstanceSegmentation/mask_rcnn_R_50_FPN_3x"
# Of a Mask R-CNN whose weights take little in addition to its activations.
TINY_MODEL: dict[str, Any] = {
    "MODEL.BACKBONE.FREEZE_AT": 0,
    "MODEL.RESNETS.STEM_OUT_CHANNELS": 8,
    "MODEL.RESNETS.WIDTH_PER_GROUP": 4,
    "MODEL.RESNETS.RES2_OUT_CHANNELS": 16,
    "MODEL.FPN.OUT_CHANNELS": 16,
    "MODEL.ROI_BOX_HEAD.FC_DIM": 32,
    "MODEL.ROI_MASK_HEAD.CONV_DIM": 16,
}
_FEW_PROPOSALS: dict[str, Any] = {
    "MODEL.ROI_HEADS.BATCH_SIZE_PER_IMAGE": 16,
    "MODEL.RPN.POST_NMS_TOPK_TRAIN": 50,
    "MODEL.RPN.POST_NMS_TOPK_TEST": 20,
    "TEST.DETECTIONS_PER_IMAGE": 5,
}
_GB = 2**30
_SHARE = 0.85  # of the free memory, for jobs that must fit


@dataclass(frozen=True)
class Scale:
    """The extent of measurements: everything at full size, or a small rehearsal."""

    num_items: Optional[int]  # items of each list; None is all
    rounds: int  # repetitions of each timing
    seconds: float  # duration of each calibration measurement
    case: Optional[WorstCase]  # None is the config's
    settings: Mapping[str, Any]  # config keys of all jobs

    @classmethod
    def of(cls, device: torch.device) -> "Scale":
        if device.type == "cuda":
            return cls(None, 7, 1.0, None, {})
        return cls(1, 1, 0.02, WorstCase((128, 160), 5), _FEW_PROPOSALS)

    def cfg(
        self, config: str, device: torch.device, settings: Mapping[str, Any] = MappingProxyType({})
    ) -> CfgNode:
        cfg = load_cfg(config, ["MODEL.DEVICE", str(device)])
        return with_settings(cfg, {**self.settings, **settings})

    def step_cfg(
        self,
        num_images: int,
        device: torch.device,
        settings: Mapping[str, Any] = MappingProxyType({}),
    ) -> CfgNode:
        """The config of Mask R-CNN for steps with random weights, without evaluation."""
        for_steps = {
            "SOLVER.IMS_PER_BATCH": num_images,
            "DATASETS.TEST": (),
            "MODEL.PIXEL_STD": [300.0] * 3,  # so that activations stay small
        }
        return self.cfg(MASK_RCNN, device, {**for_steps, **settings})

    def dry_job(self, cfg: CfgNode) -> DryJob:
        device = torch.device(cfg.MODEL.DEVICE)
        job = Job.from_cfg(cfg, 1, batch=self.case)
        return DryJob(job, DeviceModel.choose(None, str(device)))


def largest_that_fits(
    dry_job_of: Callable[[int], DryJob], sizes: Sequence[int], device: torch.device
) -> tuple[int, DryJob]:
    """Choose a number of images, the larger the better: a GPU then does not wait for the CPU.

    Args:
        sizes: numbers of images, the largest first.

    Raises:
        MemfitError: none fits.
    """
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 2**50
    for num_images in sizes:
        dry_job = dry_job_of(num_images)
        if dry_job.total_bytes() < _SHARE * free:
            return num_images, dry_job
    needs = dry_job.total_bytes()
    raise MemfitError(f"{needs / _GB:.2f} GB are needed, and {free / _GB:.2f} GB are free")


def attempt(measure: Callable[[], Record], device: torch.device) -> Record:
    """Return the record of a measurement, or a record of its error, and release its memory."""
    record: Record = {}
    try:
        record = measure()
    except Exception as e:
        text = " ".join(str(e).split())[:500]
        last = traceback.extract_tb(e.__traceback__)[-1]
        where = f"{Path(last.filename).name}:{last.lineno}"
        record = {"error": f"{type(e).__name__}: {text} ({where})"}
    with suppress(RuntimeError):  # after some errors nothing works on a GPU
        release_memory(device)
    return record
