# Copyright (c) the d2_memfit developers.
"""Stands in for ``detectron2._C`` where Detectron2 runs without its compiled operators.

Rotated boxes, (modulated) deformable convolution and the fast COCO evaluation need them; all else
in Detectron2 is Python. A missing operator says so when it is used, and ``hasattr`` finds none.
"""

from typing import NoReturn

import torch

_MISSING = (
    "this Detectron2 was set up without its compiled operators, so it has no {}. Rotated boxes, "
    "deformable convolution and the fast COCO evaluation (use_fast_impl=True) need them: build "
    "Detectron2 from source"
)


def __getattr__(name: str) -> NoReturn:
    raise AttributeError(_MISSING.format(f"detectron2._C.{name}"))


def get_compiler_version() -> str:
    return "none (built without compiled operators)"


get_cuda_version = get_compiler_version


# Detectron2 reaches this one through torch.ops instead of detectron2._C.
_library = torch.library.Library("detectron2", "DEF")
_library.define("nms_rotated(Tensor boxes, Tensor scores, float iou_threshold) -> Tensor")


def _nms_rotated(boxes: torch.Tensor, scores: torch.Tensor, iou_threshold: float) -> torch.Tensor:
    raise NotImplementedError(_MISSING.format("torch.ops.detectron2.nms_rotated"))


_library.impl("nms_rotated", _nms_rotated, "CompositeExplicitAutograd")
