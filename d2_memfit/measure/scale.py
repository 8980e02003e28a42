# Copyright (c) the d2_memfit developers.
"""The extent of the measurements on a device."""

from dataclasses import dataclass
from typing import Any, Optional

import torch
from detectron2.config import CfgNode

from ..config import load_cfg
from ..job import Job, WorstCase
from ..planner.device import DeviceModel
from ..planner.estimates import DryJob

__all__ = ["MASK_RCNN", "TINY_MODEL", "Record", "Scale"]

Record = dict[str, Any]

MASK_RCNN = "COCO-InstanceSegmentation/mask_rcnn_R_50_FPN_3x"
# KEY VALUE pairs of a Mask R-CNN whose weights take little beside its activations.
TINY_MODEL = (
    "MODEL.BACKBONE.FREEZE_AT",
    0,
    "MODEL.RESNETS.STEM_OUT_CHANNELS",
    8,
    "MODEL.RESNETS.WIDTH_PER_GROUP",
    4,
    "MODEL.RESNETS.RES2_OUT_CHANNELS",
    16,
    "MODEL.FPN.OUT_CHANNELS",
    16,
    "MODEL.ROI_BOX_HEAD.FC_DIM",
    32,
    "MODEL.ROI_MASK_HEAD.CONV_DIM",
    16,
)


@dataclass(frozen=True)
class Scale:
    """The extent of measurements: everything at full size, or a small rehearsal."""

    num_items: Optional[int]  # items of each list; None is all
    rounds: int  # repetitions of each timing
    seconds: float  # duration of each calibration measurement
    case: Optional[WorstCase]  # None is the config's
    opts: tuple[Any, ...]  # KEY VALUE pairs for all configs

    @classmethod
    def of(cls, device: torch.device) -> "Scale":
        if device.type == "cuda":
            return cls(None, 7, 1.0, None, ())
        small = WorstCase((128, 160), 5)
        few = ["MODEL.ROI_HEADS.BATCH_SIZE_PER_IMAGE", 16, "MODEL.RPN.POST_NMS_TOPK_TRAIN", 50]
        few += ["MODEL.RPN.POST_NMS_TOPK_TEST", 20, "TEST.DETECTIONS_PER_IMAGE", 5]
        return cls(1, 1, 0.02, small, tuple(few))

    def cfg(self, config: str, device: torch.device, *opts: Any) -> CfgNode:
        return load_cfg(config, [*self.opts, "MODEL.DEVICE", str(device), *opts])

    def dry_job(self, cfg: CfgNode) -> DryJob:
        device = torch.device(cfg.MODEL.DEVICE)
        job = Job.from_cfg(cfg, 1, batch=self.case)
        return DryJob(job, DeviceModel.choose(None, str(device)))
