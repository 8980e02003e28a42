# Copyright (c) the d2_memfit developers.
"""Distance of an accumulated window's gradient from that of the full batch.

Each model is the small one of projects/Coins, or made from it, and is first trained on photographs
of coins for a while. Then 8 images of one size run as one batch, and cut into micro-batches, with
the same sampled anchors and proposals. The figure covers all parameters, in float32:

    norm(accumulated - full) / norm(full)

About 1e-6 is float32 rounding. Larger values come from losses that are not means over images. The
mask loss is a mean over foreground proposals. RetinaNet divides by a running mean of the number of
positive anchors in a batch. It starts at 100 and follows the micro-batches.
"""

import argparse
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from detectron2.config import CfgNode
from detectron2.modeling import build_model
from detectron2.solver import build_optimizer
from detectron2.utils.events import EventStorage
from pages import markdown_table
from torch import nn

from d2_memfit import AccumulatingTrainer
from d2_memfit.config.load import load_cfg
from d2_memfit.config.settings import NormalizerOptions

from .common import coins, machine
from .detr_like import add_detr_config

CONFIG = Path(__file__).resolve().parents[2] / "projects/Coins/configs/mask_rcnn_coins.yaml"
NUM_IMAGES = 8
CUTS = {"8 x 1": (1,) * 8, "4 x 2": (2,) * 4, "2 x 4": (4,) * 2, "3 + 3 + 2": (3, 3, 2)}
# As many proposals as in Detectron2's zoo, so that few images fill the foreground quota.
ROIS = "MODEL.ROI_HEADS.BATCH_SIZE_PER_IMAGE 512 MODEL.RPN.POST_NMS_TOPK_TRAIN 1000"
FAMILIES = {
    # More anchors than there are, and a weight that makes up for the division by their number.
    "RPN, every anchor sampled": "MODEL.META_ARCHITECTURE ProposalNetwork "
    "MODEL.RPN.BATCH_SIZE_PER_IMAGE 16384 MODEL.RPN.LOSS_WEIGHT 10.0",
    "Faster R-CNN": f"MODEL.MASK_ON False {ROIS}",
    "Mask R-CNN": f"MODEL.MASK_ON True {ROIS}",
    "RetinaNet": "MODEL.META_ARCHITECTURE RetinaNet MODEL.RETINANET.NUM_CLASSES 1 "
    "MODEL.BACKBONE.NAME build_retinanet_resnet_fpn_backbone MODEL.RETINANET.NUM_CONVS 2 "
    "MODEL.RESNETS.OUT_FEATURES ['res3','res4','res5'] SOLVER.BASE_LR 0.005 "
    "MODEL.FPN.IN_FEATURES ['res3','res4','res5']",
    # The criterion of DETR and its descendants, with masks.
    "DETR-like": "MODEL.META_ARCHITECTURE SmallDetr MODEL.DETR.NUM_POINTS 0 "
    "INPUT.MASK_FORMAT bitmask SOLVER.BASE_LR 0.01",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "families", nargs="*", metavar="FAMILY", help="a family of models (default: all)"
    )
    parser.add_argument("--train", type=int, default=60, help="iterations before the measurement")
    parser.add_argument("--size", type=int, nargs=2, default=[160, 224], help="height, width")


def run(args: argparse.Namespace) -> None:
    with coins(*args.size) as (dicts, mapper):
        images = [mapper(d) for d in dicts]
    rows = []
    for name in args.families or FAMILIES:
        model = train(family(name), images, args.train)
        rows.append([name, *gaps(model, images)])
        if "MASK_ON" in FAMILIES[name]:
            exact = gaps(model, images, policy="exact")
            rows.append([f"{name}, `NORMALIZERS.POLICY exact`", *exact])
        if hasattr(model, "loss_normalizer"):
            rows.append([f"{name}, its normaliser at 100", *gaps(model, images, at_start=True)])
    print(f"{machine()}. Norm of the gradient's difference by that of the full batch's.\n")
    print(markdown_table(["", *CUTS], rows))


def family(name: str) -> CfgNode:
    """Load the config of one of FAMILIES."""
    return load_cfg(str(CONFIG), FAMILIES[name].split(), [add_detr_config])


def train(cfg: CfgNode, images: list[dict[str, Any]], num_iterations: int) -> nn.Module:
    torch.manual_seed(0)
    if not torch.cuda.is_available():
        cfg.MODEL.DEVICE = "cpu"
    model = build_model(cfg)
    optimizer = build_optimizer(cfg, model)
    loader = ([images[i] for i in torch.randperm(len(images))[:4]] for _ in range(10**9))
    trainer = AccumulatingTrainer(model, loader, optimizer, accumulation_steps=2)
    with EventStorage():
        for _ in range(num_iterations):
            trainer.run_step()
    return model


def gaps(
    model: nn.Module, images: list[dict[str, Any]], at_start: bool = False, policy: str = "window"
) -> list[str]:
    """Relative difference of the gradient to the full batch's, for each of CUTS."""
    samples = Samples(model)
    full = gradient(model, images, (NUM_IMAGES,), at_start)
    result = []
    for sizes in CUTS.values():
        cut = gradient(model, images, sizes, at_start, policy)
        result.append(f"{((cut - full).norm() / full.norm()).item():.1e}")
    samples.stop()
    return result


def gradient(
    model: nn.Module,
    images: list[dict[str, Any]],
    sizes: tuple[int, ...],
    at_start: bool,
    policy: str = "window",
) -> torch.Tensor:
    """Gradient of one iteration as one vector.

    Args:
        sizes: images in each micro-batch.
        at_start: whether RetinaNet's normaliser has its start value; otherwise it has the value it
            settles on, the number of positive anchors in all images.
        policy: MEMFIT.NORMALIZERS.POLICY.
    """
    if at_start:
        vars(model)["loss_normalizer"] = 100.0
    elif hasattr(model, "loss_normalizer"):
        vars(model)["loss_normalizer"] = count_positive_anchors(model, images)
    with EventStorage():
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        normalizers = NormalizerOptions(policy)
        trainer = AccumulatingTrainer(
            model,
            [images],
            optimizer,
            micro_batch_size=sizes[0] if len(sizes) > 1 else None,
            normalizers=normalizers,
        )
        trainer.run_step()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def count_positive_anchors(model: nn.Module, batch: list[dict[str, Any]]) -> float:
    with EventStorage() as storage, torch.no_grad():
        model(batch)
        return storage.history("num_pos_anchors").latest() * len(batch)  # it logs the mean


class Samples:
    """Makes a model reuse, for each image, the samples of the image's first forward."""

    METHODS = (
        ("proposal_generator", "label_and_sample_anchors"),  # -> (labels, boxes), lists over images
        ("roi_heads", "label_and_sample_proposals"),  # -> list over images
    )

    def __init__(self, model: nn.Module) -> None:
        self._kept: dict[tuple[str, int], Any] = {}  # by method and image
        self._images: list[int] = []  # ids of the batch in the model
        self._hook = model.register_forward_pre_hook(self._look_at_batch)
        self._modules: list[tuple[nn.Module, str]] = []
        for owner, method in self.METHODS:
            if hasattr(model, owner):
                self._wrap(getattr(model, owner), method)

    def stop(self) -> None:
        self._hook.remove()
        for module, method in self._modules:
            delattr(module, method)

    def _look_at_batch(self, model: nn.Module, args: tuple[Any, ...]) -> None:
        self._images = [image["image_id"] for image in args[0]]

    def _wrap(self, module: nn.Module, method: str) -> None:
        original = getattr(module, method)
        self._modules.append((module, method))

        def sample(*args: Any) -> Any:
            if (method, self._images[0]) not in self._kept:
                result = original(*args)
                per_image = zip(*result) if isinstance(result, tuple) else result
                self._kept.update({(method, i): r for i, r in zip(self._images, per_image)})
            # Copies, because heads may change the boxes of their proposals.
            kept = [deepcopy(self._kept[method, i]) for i in self._images]
            return tuple(map(list, zip(*kept))) if isinstance(kept[0], tuple) else kept

        setattr(module, method, sample)
