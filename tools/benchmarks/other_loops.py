# Copyright (c) the d2_memfit developers.
"""Distance of other trainers' accumulated gradients from those of the images together.

Each trainer runs its own code on a small model with random weights, without dropout,
in float64 (transformers' DETR: float32).
Four images of 10, 3, 1 and 5 objects are one batch, two batches of two, or four of one. The
gradient is taken where the trainer would step:

    distance  norm(accumulated - together) / norm(together)
    length    norm(accumulated) / norm(together)

Trainers whose packages are missing are left out, with a line that says so.
"""

import argparse
import logging
import sys
import tempfile
import warnings
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from importlib.metadata import version
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from .common import machine, markdown_table

OBJECTS = (10, 3, 1, 5)
SIDE = 128
SIZES = (4, 2, 1)  # images of a batch
CLASSES = 3

Gradient = torch.Tensor
Batches = list[list[tuple[torch.Tensor, dict[str, torch.Tensor]]]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--sam3", help="a folder with the source of facebookresearch/sam3")


def run(args: argparse.Namespace) -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    if args.sam3:
        sys.path.insert(0, args.sam3)
    rows = []
    for name, (reason, gradients) in LOOPS.items():
        try:
            together, *cut = [gradients(batches(size)) for size in SIZES]
        except ImportError as e:
            print(f"{name}: left out ({e})")
            continue
        cells = []
        for gradient in cut:
            distance = float((gradient - together).norm() / together.norm())
            length = float(gradient.norm() / together.norm())
            cells += [f"{distance:.1e}", f"{length:.2f}"]
        rows.append([name, *cells, reason])
    print(f"{machine()}; {versions()}\n")
    header = ["", "2 x 2: distance", "length", "4 x 1: distance", "length", "why"]
    print(markdown_table(header, rows))


def versions() -> str:
    found = []
    for package in ("transformers", "rfdetr", "pytorch_lightning", "torchvision"):
        try:
            found.append(f"{package} {version(package)}")
        except ImportError:
            continue
    return ", ".join(found)


def batches(size: int) -> Batches:
    """The images, with their boxes in pixels and their labels, in batches of a size."""
    images = []
    for i, objects in enumerate(OBJECTS):
        generator = torch.Generator().manual_seed(i)
        corners = torch.rand(objects, 2, generator=generator).double() * 0.6
        extents = 0.1 + torch.rand(objects, 2, generator=generator).double() * 0.3
        target = {
            "boxes": torch.cat([corners, corners + extents], 1) * SIDE,
            "labels": torch.randint(CLASSES, (objects,), generator=generator),
        }
        pixels = torch.rand(3, SIDE, SIDE, generator=generator).double() * (1 + i)
        images.append((pixels, target))
    return [images[i : i + size] for i in range(0, len(images), size)]


def centred(boxes: torch.Tensor) -> torch.Tensor:
    """Centres and sizes, as shares of the image."""
    lowest, highest = boxes[:, :2] / SIDE, boxes[:, 2:] / SIDE
    return torch.cat([(lowest + highest) / 2, highest - lowest], 1)


def gradient_of(model: nn.Module) -> Gradient:
    return torch.cat([p.grad.flatten().clone() for p in model.parameters() if p.grad is not None])


# transformers


def transformers_trainer(
    kind: str, options: dict[str, Any], dtype: torch.dtype = torch.float64
) -> Callable[[Batches], Gradient]:
    """Its Trainer, with ``gradient_accumulation_steps``."""

    def gradients(parts: Batches) -> Gradient:
        from transformers import (
            AutoConfig,
            AutoModelForObjectDetection,
            Trainer,
            TrainerCallback,
            TrainingArguments,
        )

        torch.manual_seed(0)
        config = AutoConfig.for_model(kind, num_labels=CLASSES, num_queries=14, **options)
        model = AutoModelForObjectDetection.from_config(config).to(dtype)
        items = [
            {
                "pixel_values": pixels.to(dtype),
                "labels": {"class_labels": t["labels"], "boxes": centred(t["boxes"]).to(dtype)},
            }
            for part in parts
            for pixels, t in part
        ]

        def collate(chosen: Sequence[Any]) -> dict[str, Any]:
            pixels = torch.stack([item["pixel_values"] for item in chosen])
            return {"pixel_values": pixels, "labels": [item["labels"] for item in chosen]}

        found = []

        class Catch(TrainerCallback):
            def on_pre_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
                found.append(gradient_of(model))

        class InOrder(Trainer):
            def _get_train_sampler(self, *args: Any) -> Any:
                return torch.utils.data.SequentialSampler(items)

        with tempfile.TemporaryDirectory() as folder:
            arguments = TrainingArguments(
                output_dir=folder,
                per_device_train_batch_size=len(parts[0]),
                gradient_accumulation_steps=len(parts),
                max_steps=1,
                max_grad_norm=0.0,
                use_cpu=True,
                report_to=[],
                save_strategy="no",
                remove_unused_columns=False,
                disable_tqdm=True,
            )
            trainer = InOrder(model, arguments, collate, train_dataset=items, callbacks=[Catch()])
            trainer.train()
        (gradient,) = found
        return gradient

    return gradients


RESNET = {
    "model_type": "resnet",
    "layer_type": "basic",
    "depths": [1, 1, 1, 1],
    "embedding_size": 16,
    "hidden_sizes": [16, 32, 48, 64],
    "out_features": ["stage2", "stage3", "stage4"],
}
DEFORMABLE_DETR = {
    "backbone_config": RESNET,
    "d_model": 32,
    "encoder_layers": 1,
    "decoder_layers": 2,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "dropout": 0.0,
}
DETR = {
    **DEFORMABLE_DETR,
    "backbone_config": {**RESNET, "out_features": ["stage4"]},
}


# rfdetr


def rfdetr_module(parts: Batches) -> Gradient:
    """Its Lightning module, with Lightning's ``accumulate_grad_batches``."""
    import pytorch_lightning
    from rfdetr.config import MultiScale, RFDETRNanoConfig, TrainConfig
    from rfdetr.training import RFDETRModelModule
    from rfdetr.utilities.tensors import collate_fn

    torch.manual_seed(0)
    patches = SIDE // RFDETRNanoConfig.model_fields["patch_size"].default
    model_config = RFDETRNanoConfig(
        pretrain_weights=None,
        num_classes=CLASSES,
        resolution=SIDE,
        positional_encoding_size=patches,
        num_queries=30,
        num_select=30,
        group_detr=2,
        device="cpu",
    )
    train_config = TrainConfig(
        dataset_dir="none",
        amp_dtype=None,
        batch_size=len(parts[0]),
        grad_accum_steps=len(parts),
        multi_scale=MultiScale.OFF,
        warmup_epochs=0,
        seed=None,
        use_ema=False,
    )
    found = []

    class Catch(pytorch_lightning.Callback):
        def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
            found.append(gradient_of(module.model))

    loader: Any = []  # its batches are made
    for part in parts:
        images, targets = collate_fn(
            [(p, {"boxes": centred(t["boxes"]), "labels": t["labels"]}) for p, t in part]
        )
        images.tensors = images.tensors.double()
        loader.append((images, targets))
    module = RFDETRModelModule(model_config, train_config).double()
    trainer = pytorch_lightning.Trainer(
        accelerator="cpu",
        precision="64-true",
        max_epochs=1,
        accumulate_grad_batches=len(parts),
        callbacks=[Catch()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, torch.utils.data.DataLoader(loader, batch_size=None))
    (gradient,) = found
    return gradient


# torchvision


def torchvision_loop(kind: str) -> Callable[[Batches], Gradient]:
    """The loop of its reference, which has no accumulation, as users add it: losses / batches."""

    def gradients(parts: Batches) -> Gradient:
        torch.manual_seed(0)
        model = torchvision_model(kind).double().train()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        optimizer.zero_grad()
        for part in parts:
            images = [pixels for pixels, _ in part]
            losses = model(images, [{**t, "labels": t["labels"] + 1} for _, t in part])
            (sum(losses.values()) / len(parts)).backward()
        return gradient_of(model)

    return gradients


class Backbone(nn.Sequential):
    out_channels = 32  # FCOS has 32 groups

    def __init__(self) -> None:
        super().__init__(nn.Conv2d(3, 32, 3, 4, 1), nn.GELU(), nn.Conv2d(32, 32, 3, 2, 1))


def torchvision_model(kind: str) -> nn.Module:
    from torchvision.models import detection
    from torchvision.models.detection.anchor_utils import AnchorGenerator
    from torchvision.ops import MultiScaleRoIAlign

    size = {"min_size": SIDE, "max_size": SIDE, "num_classes": CLASSES + 1}
    one = AnchorGenerator(((16,),), ((1.0,),))
    several = AnchorGenerator(((8, 16, 32),), ((0.5, 1.0, 2.0),))
    if kind == "FCOS":
        return detection.FCOS(Backbone(), anchor_generator=one, **size)
    if kind == "RetinaNet":
        return detection.RetinaNet(Backbone(), anchor_generator=several, **size)
    return detection.FasterRCNN(
        Backbone(),
        rpn_anchor_generator=several,
        box_roi_pool=MultiScaleRoIAlign(["0"], 4, 2),
        rpn_batch_size_per_image=10**6,  # all of them: no random numbers
        box_batch_size_per_image=10**6,
        **size,
    )


# SAM 3


def sam3_step(loss_of: Callable[[nn.Module, Any], torch.Tensor]) -> Callable[[Batches], Gradient]:
    """``Trainer._run_step`` of SAM 3, with ``gradient_accumulation_steps``."""

    def gradients(parts: Batches) -> Gradient:
        from sam3.train.trainer import Trainer

        torch.manual_seed(0)
        model = SmallDetector().double()
        vars(model)["no_sync"] = nullcontext
        meter = SimpleNamespace(update=lambda *_: None)
        stand_in = SimpleNamespace(
            model=model,
            optim=torch.optim.SGD(model.parameters(), lr=0.0),
            gradient_accumulation_steps=len(parts),
            optim_conf=SimpleNamespace(amp=SimpleNamespace(enabled=False, amp_dtype="bfloat16")),
            scaler=torch.amp.GradScaler("cpu", enabled=False),
            _step=lambda part, own, phase: ({"core_loss": loss_of(own, part)}, len(part), {}),
        )
        batch = parts if len(parts) > 1 else parts[0]
        Trainer._run_step(stand_in, batch, "train", OrderedDict(core_loss=meter), {})
        return gradient_of(model)

    return gradients


class SmallDetector(nn.Module):
    """An L1 loss of boxes at each object's place."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = Backbone()
        self.boxes = nn.Linear(Backbone.out_channels, 4)

    def forward(self, images: list[torch.Tensor]) -> torch.Tensor:
        return self.boxes(self.backbone(torch.stack(images)).mean((2, 3)))


def mean_over_images(model: nn.Module, part: Any) -> torch.Tensor:
    made = model([pixels for pixels, _ in part])
    wanted = torch.stack([centred(t["boxes"]).mean(0) for _, t in part])
    return (made - wanted).pow(2).sum(1).mean()


def mean_over_objects(model: nn.Module, part: Any) -> torch.Tensor:
    made = model([pixels for pixels, _ in part])
    total = sum((box - centred(t["boxes"])).pow(2).sum() for box, (_, t) in zip(made, part))
    return torch.as_tensor(total) / sum(len(t["labels"]) for _, t in part)


OWN_COUNTS = "a mean of means: each batch has its own count of objects"
LOOPS: dict[str, tuple[str, Callable[[Batches], Gradient]]] = {
    "transformers `Trainer`, Deformable DETR": (
        OWN_COUNTS,
        transformers_trainer("deformable_detr", DEFORMABLE_DETR),
    ),
    "transformers `Trainer`, DETR": (
        OWN_COUNTS + ", and its own sum of class weights",
        transformers_trainer("detr", DETR, torch.float32),  # as its class weights
    ),
    "rfdetr, Lightning": (OWN_COUNTS, rfdetr_module),
    "torchvision's reference, FCOS": (
        "a mean of means: each batch has its own count of positive places",
        torchvision_loop("FCOS"),
    ),
    "torchvision's reference, Faster R-CNN": (
        "means over sampled anchors and proposals, of which images have about as many",
        torchvision_loop("Faster R-CNN"),
    ),
    "torchvision's reference, RetinaNet": (
        "a mean over images: equal",
        torchvision_loop("RetinaNet"),
    ),
    "SAM 3's `Trainer`, a mean over images": (
        "a sum over batches, without a division",
        sam3_step(mean_over_images),
    ),
    "SAM 3's `Trainer`, a mean over objects": (
        "the same, and each batch has its own count of objects",
        sam3_step(mean_over_objects),
    ),
}
