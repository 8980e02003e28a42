# Copyright (c) the d2_memfit developers.
"""Distances that docs/ACCUMULATION.md states for losses of well-known code."""

import re
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import torch

__all__ = ["PUBLISHED", "Published", "published"]


class Published(NamedTuple):
    """The distance that is stated for a loss.

    Attributes:
        distance: the largest relative distance of its gradient; 0 if none is stated.
        code: file and function that compute it.
    """

    distance: float = 0.0
    code: str = ""


_DENOISING = {"*_dn*": 1.0}  # such queries follow the most crowded image

# By file and function ("" for any) that compute a loss: patterns of names, and the distance of the
# gradient of single images from that of the images together, at most. docs/ACCUMULATION.md has the
# same table.
PUBLISHED: Mapping[tuple[str, str], Mapping[str, float]] = {
    ("detectron2/modeling/roi_heads/fast_rcnn.py", "losses"): {
        "loss_cls*": 0.3,
        "loss_box_reg*": 0.5,
    },
    ("detectron2/modeling/roi_heads/mask_head.py", "mask_rcnn_loss"): {"loss_mask*": 0.5},
    ("detectron2/modeling/roi_heads/keypoint_head.py", "keypoint_rcnn_loss"): {
        "loss_keypoint*": 0.8
    },
    ("detectron2/modeling/meta_arch/semantic_seg.py", "losses"): {"loss_sem_seg*": 0.5},
    ("detectron2/modeling/meta_arch/retinanet.py", "losses"): {
        "loss_cls": 0.2,
        "loss_box_reg": 0.2,
    },
    ("point_rend/point_head.py", "roi_mask_point_loss"): {"loss_mask*": 0.5},
    ("densepose/modeling/losses/chart.py", ""): {"loss_densepose*": 1.0},
    ("densepose/modeling/losses/utils.py", ""): {"loss_densepose*": 1.0},
    ("densepose/modeling/losses/segm.py", ""): {"loss_densepose*": 1.0},
    ("centermask/maskiou_head.py", "mask_iou_loss"): {"loss_maskiou": 0.7},
    ("centermask/mask_head.py", "mask_rcnn_loss"): {"loss_mask": 0.5},
    ("condinst/dynamic_mask_head.py", ""): {"loss_pairwise": 1.5},
    ("solov2/solov2.py", "loss"): {"loss_cate": 0.3, "loss_ins": 0.7},
    ("oneformer/modeling/criterion.py", ""): {"loss_contrastive": 2.0, "loss_ce*": 0.5},
    # DiffusionDet's matching has near ties, which the rounding of float32 decides.
    ("diffusiondet/loss.py", ""): {"*": 0.3},
    ("dino/modeling/dn_criterion.py", ""): _DENOISING,
    ("maskdino/modeling/criterion.py", ""): _DENOISING,
    ("transformers/loss/loss_rt_detr.py", ""): _DENOISING,
    ("transformers/loss/loss_d_fine.py", ""): _DENOISING,
}

_FRAME = re.compile(r'File "(.*?)", line \d+, in (\S+)')
_MOST_STEPS = 8  # from a loss to the operator of its criterion, past weights


def published(name: str, loss: torch.Tensor) -> Published:
    """The distance that is stated for a loss, by the code that has computed it.

    Args:
        name: of the loss.
        loss: computed under ``torch.autograd.detect_anomaly``, which keeps the calls that led to
            each operator.
    """
    node: Any = loss.grad_fn
    for _ in range(_MOST_STEPS):
        if node is None:
            break
        frames = _FRAME.findall("".join(node.metadata.get("traceback_", ())))
        for (suffix, function), distances in PUBLISHED.items():
            is_there = any(f.endswith(suffix) and function in ("", g) for f, g in frames)
            stated = [d for pattern, d in distances.items() if fnmatchcase(name, pattern)]
            if is_there and stated:
                return Published(stated[0], f"{suffix}:{function}".strip(":"))
        inputs = [n for n, _ in node.next_functions if n is not None]
        node = inputs[0] if len(inputs) == 1 else None  # a product with a weight
    return Published()
