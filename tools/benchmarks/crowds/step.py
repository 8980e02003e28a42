# Copyright (c) the d2_memfit developers.
"""One training step for an image with many objects: the project's own code and the technique.

For DETR-likes it is the losses of one decoder layer and their backward, with random predictions.
For Mask R-CNN it is all but the backbone, with random features.
"""

import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, Optional

import torch
from detectron2.modeling import Backbone, build_model
from detectron2.structures import BitMasks, Boxes, Instances
from detectron2.utils.events import EventStorage
from torch import Tensor, nn
from torchvision.ops import box_convert

from d2_memfit.config.load import load_cfg
from d2_memfit.memory import (
    TensorMeter,
    auto_budget_gb,
    enforce_budget,
    is_out_of_memory,
    release_memory,
)
from d2_memfit.techniques.registry import apply_techniques

from ..common import CONFIG, machine

OBJECTS = (20, 100, 500, 1000, 2000)
NUM_CLASSES = 80
NUM_POINTS = 12544  # at which masks are compared, in Mask2Former and its descendants
LONG_S = 20.0  # after this time there is no further round
PACKED = ["MEMFIT.MASKS.PACKED", True]
FOR_MASK_RCNN = [
    *PACKED,
    *("MEMFIT.HEADS.CHUNK_SIZE", 32),
    *("MEMFIT.MATCHING.CHUNK_SIZE", 4096),
]


class Job(NamedTuple):
    """A step that is measured.

    Attributes:
        make: makes the model or criterion, with the same weights each time.
        losses: called with that module; returns its losses for the crowded image.
        inputs: predictions or features, whose gradients are compared.
    """

    make: Callable[[], nn.Module]
    losses: Callable[[Any], dict[str, Tensor]]
    inputs: Sequence[Tensor]


class Crowd(NamedTuple):
    """The objects of an image: labels [N], masks [N, size, size], boxes [N, 4] in pixels."""

    labels: Tensor
    masks: Tensor
    boxes: Tensor

    @property
    def relative_boxes(self) -> Tensor:
        """Boxes as shares of the image: center, width and height."""
        return box_convert(self.boxes / self.masks.shape[-1], "xyxy", "cxcywh")


def crowd(num_objects: int, size: int) -> Crowd:
    """Random rectangles of up to a third of an image with ``size`` x ``size`` pixels."""
    generator = torch.Generator().manual_seed(0)
    extent = torch.randint(size // 50 + 1, size // 3, (num_objects, 2), generator=generator)
    corner = (torch.rand(num_objects, 2, generator=generator) * (size - extent)).long()
    masks = torch.zeros(num_objects, size, size, dtype=torch.bool)
    for mask, (x, y), (width, height) in zip(masks, corner.tolist(), extent.tolist()):
        mask[y : y + height, x : x + width] = 1
    labels = torch.randint(0, NUM_CLASSES, (num_objects,), generator=generator)
    return Crowd(labels, masks, torch.cat([corner, corner + extent], 1).float())


def predictions(num_queries: int, num_classes: int, size: int) -> dict[str, Tensor]:
    """Random classes, masks and boxes of one decoder layer."""
    generator = torch.Generator().manual_seed(1)
    made = {
        "pred_logits": torch.randn(1, num_queries, num_classes, generator=generator),
        "pred_masks": torch.randn(1, num_queries, size, size, generator=generator),
        "pred_boxes": torch.rand(1, num_queries, 4, generator=generator) * 0.5 + 0.2,
    }
    return {name: value.requires_grad_() for name, value in made.items()}


class OfBits(nn.Module):
    """A criterion behind a model that makes numbers of masks, as projects/Transformers does."""

    def __init__(self, criterion: nn.Module) -> None:
        super().__init__()
        self.criterion = criterion

    def forward(
        self, queries: Tensor, logits: Tensor, masks: list[Tensor], labels: list[Tensor]
    ) -> Any:
        return self.criterion(queries, logits, [m.float() for m in masks], labels)


def mask_transformer(
    make: Callable[[], nn.Module],
    num_objects: int,
    size: int,
    num_queries: int = 100,
) -> Job:
    """A criterion of the transformers library that takes lists of masks and of classes."""
    made = predictions(num_queries, NUM_CLASSES + 1, size // 4)
    masks, logits = made["pred_masks"], made["pred_logits"]
    objects = crowd(num_objects, size)
    return Job(
        lambda: OfBits(make()),
        lambda c: c(masks, logits, [objects.masks], [objects.labels]),
        [masks, logits],
    )


def mask2former(num_objects: int, size: Optional[int], projects: Optional[Path]) -> Job:
    from transformers import AutoConfig
    from transformers.models.mask2former.modeling_mask2former import Mask2FormerLoss

    config: Any = AutoConfig.for_model("mask2former", num_labels=NUM_CLASSES)
    return mask_transformer(partial(Mask2FormerLoss, config, {}), num_objects, size or 1024)


def maskformer(num_objects: int, size: Optional[int], projects: Optional[Path]) -> Job:
    from transformers.models.maskformer.modeling_maskformer import (
        MaskFormerHungarianMatcher,
        MaskFormerLoss,
    )

    def make() -> nn.Module:
        return MaskFormerLoss(NUM_CLASSES, MaskFormerHungarianMatcher(1.0, 20.0, 1.0), {}, 0.1)

    return mask_transformer(make, num_objects, size or 512)


def eomt(num_objects: int, size: Optional[int], projects: Optional[Path]) -> Job:
    from transformers import AutoConfig
    from transformers.models.eomt.modeling_eomt import EomtLoss

    config: Any = AutoConfig.for_model("eomt", num_labels=NUM_CLASSES)
    make = partial(EomtLoss, config, {})
    return mask_transformer(make, num_objects, size or 640, num_queries=200)


def rf_detr(num_objects: int, size: Optional[int], projects: Optional[Path]) -> Job:
    from transformers import RfDetrConfig
    from transformers.loss.loss_rf_detr import RfDetrHungarianMatcher, RfDetrImageLoss

    config = RfDetrConfig()
    names = ["labels", "boxes", "masks"]

    def make() -> nn.Module:
        matcher = RfDetrHungarianMatcher(
            config.class_cost,
            config.bbox_cost,
            config.giou_cost,
            config.mask_point_sample_ratio,
            config.mask_class_loss_coefficient,
            config.mask_dice_loss_coefficient,
        )
        return RfDetrImageLoss(
            matcher,
            NUM_CLASSES,
            config.focal_alpha,
            names,
            config.group_detr,
            config.mask_point_sample_ratio,
        )

    size = size or 384
    made = predictions(100 * config.group_detr, NUM_CLASSES, size // 4)
    outputs = {"logits": made["pred_logits"], **made}
    objects = crowd(num_objects, size)
    target = {
        "class_labels": objects.labels,
        "boxes": objects.relative_boxes,
        "masks": objects.masks,
    }
    return Job(make, lambda criterion: criterion(outputs, [target]), list(made.values()))


def checkout(
    package: str,
    options: dict[str, Any],
    matcher_options: dict[str, Any],
    num_queries: int,
    num_objects: int,
    size: int,
    projects: Optional[Path],
) -> Job:
    """The criterion of a public checkout for Detectron2.

    Args:
        package: its Python package.
        options: of the criterion's class.
        matcher_options: of the matcher's class.
        projects: folder with the project's tree.
    """
    assert projects is not None
    matcher = import_file(projects, package, "modeling.matcher").HungarianMatcher
    criterion = import_file(projects, package, "modeling.criterion").SetCriterion

    def make() -> nn.Module:
        return criterion(
            NUM_CLASSES,
            matcher=matcher(cost_class=2.0, cost_mask=5.0, cost_dice=5.0, **matcher_options),
            weight_dict={},
            eos_coef=0.1,
            **options,
        )

    num_logits = NUM_CLASSES + ("boxes" not in options["losses"])
    made = predictions(num_queries, num_logits, size // 4)
    objects = crowd(num_objects, size)
    target = {"labels": objects.labels, "masks": objects.masks, "boxes": objects.relative_boxes}
    return Job(make, lambda criterion: criterion(made, [target]), list(made.values()))


def import_file(folder: Path, package: str, name: str) -> ModuleType:
    """Import a file of a project without its packages' own imports, which need CUDA code."""
    for bare in (package, f"{package}.modeling"):
        module = sys.modules.setdefault(bare, ModuleType(bare))
        module.__path__ = [str(folder / bare.replace(".", "/"))]
    return import_module(f"{package}.{name}")


POINTS = {"num_points": NUM_POINTS, "oversample_ratio": 3.0, "importance_sample_ratio": 0.75}


def mask2former_d2(num_objects: int, size: Optional[int], projects: Optional[Path]) -> Job:
    options = {"losses": ["labels", "masks"], **POINTS}
    points = {"num_points": NUM_POINTS}
    tree = projects and projects / "Mask2Former"
    return checkout("mask2former", options, points, 100, num_objects, size or 1024, tree)


def mask_dino_d2(num_objects: int, size: Optional[int], projects: Optional[Path]) -> Job:
    options = {"losses": ["labels", "masks", "boxes"], **POINTS}
    of_matcher = {"num_points": NUM_POINTS, "cost_box": 5.0, "cost_giou": 2.0}
    tree = projects and projects / "MaskDINO"
    return checkout("maskdino", options, of_matcher, 300, num_objects, size or 1024, tree)


def maskformer_d2(num_objects: int, size: Optional[int], projects: Optional[Path]) -> Job:
    tree = projects and projects / "MaskFormer"
    options = {"losses": ["labels", "masks"]}
    return checkout("mask_former", options, {}, 100, num_objects, size or 512, tree)


class Features(Backbone):
    """A backbone whose features are given."""

    def __init__(self, features: dict[str, Tensor]) -> None:
        super().__init__()
        self.features = features

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        return self.features


def mask_rcnn(num_objects: int, size: Optional[int], projects: Optional[Path]) -> Job:
    size = size or 1024
    objects = crowd(num_objects, size)
    instances = Instances((size, size))
    instances.gt_boxes = Boxes(objects.boxes)
    instances.gt_masks = BitMasks(objects.masks)
    instances.gt_classes = objects.labels
    batch = [{"image": torch.zeros(3, size, size, dtype=torch.uint8), "instances": instances}]
    generator = torch.Generator().manual_seed(1)
    features = {
        f"p{level}": torch.randn(1, 256, size >> level, size >> level, generator=generator)
        for level in range(2, 7)
    }
    for feature in features.values():
        feature.requires_grad_()

    def make() -> nn.Module:
        torch.manual_seed(0)
        cfg = load_cfg(CONFIG, ["MODEL.DEVICE", "cpu", "INPUT.MASK_FORMAT", "bitmask"])
        model = build_model(cfg)
        model.backbone = Features(features)
        return model

    def losses(model: nn.Module) -> dict[str, Tensor]:
        with EventStorage():
            return model(batch)

    return Job(make, losses, list(features.values()))


OF_LIBRARY: dict[str, Callable[..., Job]] = {
    "Mask2Former (transformers)": mask2former,
    "MaskFormer (transformers)": maskformer,
    "EoMT (transformers)": eomt,
    "RF-DETR with masks (transformers)": rf_detr,
    "Mask R-CNN, bit masks": mask_rcnn,
}
OF_CHECKOUTS: dict[str, Callable[..., Job]] = {
    "Mask2Former": mask2former_d2,
    "MaskDINO": mask_dino_d2,
    "MaskFormer": maskformer_d2,
}
JOBS = {**OF_LIBRARY, **OF_CHECKOUTS}


def settings(name: str) -> list[Any]:
    """Keys and values of the technique for a model."""
    return FOR_MASK_RCNN if JOBS[name] is mask_rcnn else PACKED


class Side:
    """One side of the comparison.

    Attributes:
        peak_bytes: of all tensors of a step, without its inputs; None if memory ran out.
        seconds: CPU time of each further step.
    """

    def __init__(self, job: Job, opts: Sequence[Any]) -> None:
        self._job = job
        self._model = apply_techniques("model", job.make(), load_cfg(CONFIG, opts), announce=False)
        self.peak_bytes: Optional[int] = None
        self.seconds: list[float] = []
        self.results: list[Tensor] = []

    def first_step(self) -> None:
        """Measure the peak, and keep losses and gradients."""
        try:
            with TensorMeter() as meter:
                losses = self._step()
        except Exception as e:
            if not is_out_of_memory(e):
                raise
            release_memory(torch.device("cpu"))
            return
        self.peak_bytes = meter.peak_bytes
        given = [*self._job.inputs, *self._model.parameters()]
        gradients = [x.grad.clone() for x in given if x.grad is not None]
        self.results = [*(loss.detach() for loss in losses.values()), *gradients]

    def round(self) -> None:
        if self.peak_bytes is not None:
            start = time.process_time()
            self._step()
            self.seconds.append(time.process_time() - start)

    def _step(self) -> dict[str, Tensor]:
        torch.manual_seed(2)
        for value in [*self._job.inputs, *self._model.parameters()]:
            value.grad = None
        losses = self._job.losses(self._model)
        torch.stack([loss for loss in losses.values() if loss.requires_grad]).sum().backward()
        return losses

    def figures(self) -> dict[str, Any]:
        median = statistics.median(self.seconds) if self.seconds else None
        return {"peak_bytes": self.peak_bytes, "seconds": median}


def largest_difference(results: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Largest difference of two lists of tensors, each relative to its largest number."""
    pairs = list(zip(results, expected))
    assert len(results) == len(expected)
    return max(float((a - b).abs().max() / b.abs().max().clamp(min=1e-12)) for a, b in pairs)


def measure(
    name: str,
    num_objects: int,
    rounds: int,
    size: Optional[int] = None,
    projects: Optional[str] = None,
    memory_gb: Optional[float] = None,
) -> dict[str, Any]:
    """Measure both sides in turn.

    Args:
        size: height and width of the masks; None is the model's usual size.
        memory_gb: limit of this process; None is what is free.
    """
    enforce_budget(memory_gb or auto_budget_gb("cpu"), "cpu")
    job = JOBS[name](num_objects, size, projects and Path(projects))
    sides = {"plain": Side(job, []), "technique": Side(job, settings(name))}
    for side in sides.values():
        side.first_step()
    start = time.perf_counter()
    for _ in range(rounds):
        for side in sides.values():
            side.round()
        if time.perf_counter() - start > LONG_S:
            break
    plain, technique = sides.values()
    both = plain.results and technique.results
    return {
        "model": name,
        "objects": num_objects,
        "machine": machine(),
        **{name: side.figures() for name, side in sides.items()},
        "difference": largest_difference(technique.results, plain.results) if both else None,
    }


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps(measure(**json.loads(sys.argv[2]))))
