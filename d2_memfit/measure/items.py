# Copyright (c) the d2_memfit developers.
"""Items to measure, the job of each, and the memory and time that are expected of it."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Optional

import torch
from detectron2.config import LazyConfig

from ..common.units import GB
from ..config import load_cfg, with_settings
from ..errors import MemfitError
from ..job import Job, WorstCase
from ..model_zoo import list_configs
from ..planner.device import DeviceModel
from ..planner.estimates import DryJob
from ..planner.search import plan_memory
from ..techniques import get_technique

__all__ = ["ITEMS", "Item", "Record", "Scale", "expected", "items_of"]

Record = dict[str, Any]

_PROJECTS = Path(__file__).resolve().parents[2] / "projects"
_MASK_RCNN = "COCO-InstanceSegmentation/mask_rcnn_R_50_FPN_3x"
_X101 = "COCO-Detection/faster_rcnn_X_101_32x8d_FPN_3x"
_AMP: dict[str, Any] = {"SOLVER.AMP.ENABLED": True}
# Random weights then keep activations small, also in float16.
_SMALL_ACTIVATIONS: dict[str, Any] = {"MODEL.PIXEL_STD": [300.0] * 3}
# A rehearsal's Mask R-CNN, whose weights take little in addition to its activations.
_SMALL_MODEL: dict[str, Any] = {
    "MODEL.BACKBONE.FREEZE_AT": 0,
    "MODEL.RESNETS.STEM_OUT_CHANNELS": 8,
    "MODEL.RESNETS.WIDTH_PER_GROUP": 4,
    "MODEL.RESNETS.RES2_OUT_CHANNELS": 16,
    "MODEL.FPN.OUT_CHANNELS": 16,
    "MODEL.ROI_BOX_HEAD.FC_DIM": 32,
    "MODEL.ROI_MASK_HEAD.CONV_DIM": 16,
    "MODEL.ROI_HEADS.BATCH_SIZE_PER_IMAGE": 16,
    "MODEL.RPN.POST_NMS_TOPK_TRAIN": 50,
    "MODEL.RPN.POST_NMS_TOPK_TEST": 20,
    "TEST.DETECTIONS_PER_IMAGE": 5,
}
_VIT_B = (  # at 1024 pixels, as in Detectron2's projects/ViTDet, with the heads of our project
    *("net.img_size=1024", "square_pad=1024", "net.embed_dim=768", "net.num_heads=12"),
    "net.window_size=14",
)


@dataclass(frozen=True)
class Scale:
    """The extent of measurements: everything at full size, or a small rehearsal."""

    rounds: tuple[int, int]  # of steps that are timed: at least, and at most
    seconds: float  # duration of each calibration measurement
    case: Optional[WorstCase]  # None for the config's
    settings: Mapping[str, Any]  # config keys of all jobs

    @classmethod
    def for_device(cls, device: torch.device) -> "Scale":
        if device.type == "cuda":
            return cls((2, 5), 1.0, None, {})
        return cls((1, 1), 0.02, WorstCase((128, 160), 5), _SMALL_MODEL)


@dataclass(frozen=True)
class Item:
    """One measurement.

    Attributes:
        group: group of the items in one table.
        name: unique in its group.
        config: config of Detectron2's zoo, of d2_memfit or of a project.
        settings: config keys of its job.
        project: folder in projects/, or "" without one.
        technique: name of a technique that is on.
        is_planned: whether a plan chooses settings for the job's budget.
        evaluates: whether an evaluation is measured, too.
    """

    group: str
    name: str
    config: str = _MASK_RCNN
    settings: Mapping[str, Any] = field(default_factory=dict)
    project: str = ""
    technique: str = ""
    is_planned: bool = False
    evaluates: bool = False

    @property
    def key(self) -> str:
        return f"{self.group}/{self.name}"

    @property
    def has_estimate(self) -> bool:
        others = ("machine", "calibration", "outside", "recovery", "fragments")
        return self.group not in others

    def job(self, device: torch.device, scale: Scale) -> Job:
        """Make the job, with settings for random weights.

        Raises:
            MemfitError: a project or its library is missing.
        """
        settings = {"MODEL.DEVICE": str(device), **self.settings}
        if not self.evaluates:
            settings["DATASETS.TEST"] = ()
        if self.project:
            return self._project_job(settings, scale)
        settings = {**settings, **_SMALL_ACTIVATIONS, **scale.settings}
        cfg = with_settings(load_cfg(self.config), settings)
        if self.technique:
            cfg = with_settings(cfg, get_technique(self.technique).enabling_settings(cfg))
        return Job.from_cfg(cfg, 1, batch=scale.case)

    def _project_job(self, settings: dict[str, Any], scale: Scale) -> Job:
        file = _PROJECTS / self.project / "configs" / self.config
        if not file.is_file():
            raise MemfitError(f"a project is measured in a checkout: there is no {file}")
        if file.suffix == ".py":
            cfg = LazyConfig.load(str(file))
            if settings.pop("DATASETS.TEST", None) is not None:
                cfg.dataloader.test = None
            case = scale.case
            if case is None:
                overrides = [f"model.backbone.{override}" for override in _VIT_B]
                cfg = LazyConfig.apply_overrides(cfg, overrides)
                case = WorstCase((1024, 1024), 20)
            return Job.from_lazy(cfg, 1, batch=case).with_settings(settings)
        sys.path.insert(0, str(_PROJECTS / self.project))
        from d2_transformers import Trainer, add_transformers_config

        cfg = with_settings(load_cfg(str(file), (), [add_transformers_config]), settings)
        return Job.from_trainer(Trainer, cfg, 1, batch=scale.case)


def _all_items() -> tuple[Item, ...]:
    two = {"SOLVER.IMS_PER_BATCH": 2}
    single = {**two, "SOLVER.ACCUMULATION_STEPS": 1}
    zoo = (
        _MASK_RCNN,
        "COCO-Detection/faster_rcnn_R_50_FPN_3x",
        "COCO-Detection/retinanet_R_50_FPN_3x",
        "COCO-Keypoints/keypoint_rcnn_R_50_FPN_3x",
        "COCO-PanopticSegmentation/panoptic_fpn_R_50_3x",
        "COCO-Detection/faster_rcnn_R_50_C4_3x",
        "COCO-InstanceSegmentation/mask_rcnn_R_50_DC5_3x",
        "COCO-Detection/rpn_R_50_FPN_1x",
        "COCO-InstanceSegmentation/mask_rcnn_R_101_FPN_3x",
        "COCO-Detection/retinanet_R_101_FPN_3x",
        _X101,
        "Misc/cascade_mask_rcnn_R_50_FPN_3x",
    )
    projects = {
        "ViTDet-B": ("ViTDet", "mask_rcnn_vitdet_coins.py"),
        "Deformable DETR R50": ("Transformers", "deformable_detr_r50.yaml"),
        "RT-DETR R18": ("Transformers", "rt_detr_v2_r18.yaml"),
    }
    techniques = (
        "ActivationCheckpointing",
        "ActivationOffload",
        "MixedPrecision",
        "ChunkedHeads",
        "ChunkedMatching",
        "EightBitOptimizerStates",
    )
    sizes = (4, 6, 8, 12, 16, 24)
    there = {config.removesuffix(".yaml") for config in list_configs()}
    planned = {"SOLVER.IMS_PER_BATCH": 16}
    fragments = {"SOLVER.IMS_PER_BATCH": 4}
    offloaded = {**fragments, "MEMFIT.OFFLOAD.MODULES": ["backbone.bottom_up"]}
    trainers = ("Detectron2", "d2_memfit", "d2_memfit, with recovery")

    def presets(model: str) -> list[Item]:
        configs = [f"{model}_{size}GB" for size in sizes]
        return [Item("presets", c, c, evaluates=True) for c in configs if c in there]

    def alone(number: int) -> list[Item]:
        group, images = f"techniques x{number}", {"SOLVER.IMS_PER_BATCH": number}
        names = ("", *techniques)
        return [Item(group, t or "none", settings=images, technique=t) for t in names]

    return (  # those that tell most come first, if the time is not enough for all
        *(Item(group, "") for group in ("machine", "calibration", "outside")),
        *(Item("zoo", config, config, two, evaluates=True) for config in zoo),
        *(
            Item("plans", f"{size}GB", settings=planned | _preset(size), is_planned=True)
            for size in sizes
        ),
        Item("recovery", ""),
        *(Item("trainers", name, settings=two) for name in trainers),
        *(Item("zoo amp", config, config, two | _AMP, evaluates=True) for config in zoo),
        *alone(2),
        *(
            Item("transformers", f"{name}{suffix}", config, single | formats, project)
            for name, (project, config) in projects.items()
            for suffix, formats in (("", {"SOLVER.AMP.ENABLED": False}), (" amp", _AMP))
        ),
        *presets(_MASK_RCNN),
        *alone(8),
        *(
            Item("fragments", f"{name}{size}GB", settings=settings | _preset(size))
            for name, settings in (("", fragments), ("offload ", offloaded))
            for size in (24, 6, 4)
        ),
        *presets(_X101),
    )


def _preset(size: int) -> dict[str, Any]:
    return {"MEMFIT.PRESET": f"{size}GB"}


ITEMS = _all_items()


def items_of(device: torch.device) -> list[Item]:
    """All items of a GPU; the first of each group for a rehearsal."""
    if device.type == "cuda":
        return [*ITEMS]
    return [*{item.group: item for item in reversed(ITEMS) if not item.project}.values()][::-1]


def expected(item: Item, device: torch.device, model: DeviceModel, scale: Scale) -> Record:
    """Memory and time that are expected of an item, and the settings that a plan chooses.

    Raises:
        MemfitError: no plan fits, or a project is missing.
    """
    job = item.job(device, scale)
    settings: dict[str, Any] = {}
    record: Record = {}
    if item.is_planned:
        assert job.budget_gb is not None
        plan = plan_memory(job, job.budget_gb, allow=["exact"], device=model, evaluates=False)
        if not plan.fits:
            raise MemfitError(f"no plan fits; {plan.smallest_budget_gb:.2f} GB are needed")
        settings = {**plan.settings, "MEMFIT.PLAN.ENABLED": False}
        record["steps"] = [step.name for step in plan.steps]
        job = job.with_settings(settings)
    dry_job = DryJob(job, model, evaluates=item.evaluates)
    uses = dry_job.uses(dry_job.limit_bytes)
    timelines = (dry_job.training, dry_job.evaluation)
    for prefix, timeline, use in zip(("", "evaluation_"), timelines, uses):
        assert timeline is not None
        # On a CPU, only tensors are measured, without those that the loader makes.
        alive = timeline.alive_at_peak()
        tensors = [a for a in alive if (a.owner, a.phase) != ("inputs", "setup")]
        allocated = use.allocated_bytes if model.is_gpu else sum(a.num_bytes for a in tensors)
        record[f"{prefix}allocated_gb"] = allocated / GB
        record[f"{prefix}reserved_gb"] = use.reserved_bytes / GB
        record[f"{prefix}device_gb"] = use.total_bytes / GB
    return {**record, "seconds": dry_job.seconds(), "settings": settings}
