# Copyright (c) the d2_memfit developers.
"""The largest possible numbers of proposals, anchors and detections for a dry run."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any, Optional

import torch
from detectron2.modeling.matcher import Matcher
from detectron2.structures import Boxes, Instances, RotatedBoxes
from torch import nn

from ..common.patching import knows_function, replaced_functions, source_files
from ..job import boxes_anywhere, rotated

__all__ = ["detect_most", "parts_with_roi_heads", "worst_case"]

Note = Callable[[str], None]
_Size = tuple[int, int]  # height and width in pixels

_OF_BOXES = {"pred_boxes", "scores", "pred_classes"}  # almost no memory


@contextmanager
def worst_case(model: nn.Module, note: Note) -> Iterator[None]:
    """While open, ROI heads get the most proposals possible, and no anchor is ignored.

    As many proposals are on objects as the heads may take. ROI heads are found by the attribute
    ``roi_heads`` of any part of the model. So it does not matter which generator makes the
    proposals, or how many branches it has.

    RetinaNet ignores some anchors in its losses: those that overlap an object, but too little to be
    matched. An image can have none of them, so here they are background.

    Args:
        note: called with a line for the user about proposals whose largest number is not known.
    """
    parts = parts_with_roi_heads(model)
    hooks = [
        _heads_of(part).register_forward_pre_hook(
            partial(_give_most, note, getattr(part, "proposal_generator", None)),
            with_kwargs=True,
        )
        for part in parts
    ]
    values = [value for part in model.modules() for value in vars(part).values()]
    labels = [(value, value.labels) for value in values if isinstance(value, Matcher)]
    for matcher, given in labels:
        matcher.labels = [max(label, 0) for label in given]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for matcher, given in labels:
            matcher.labels = given


def detect_most(model: nn.Module, batch: Any, note: Note = lambda line: None) -> None:
    """Run a model in evaluation so that it detects the most objects possible.

    Detections of Detectron2's ``fast_rcnn_inference`` are as many as the config allows, each as
    large as the image. Other models decide by scores, which may be too low for any detection.

    Args:
        note: called with a line for the user if the largest number is not known.
    """
    name, files = "fast_rcnn_inference", source_files(model.modules())
    most = {name: partial(_detecting_most, note)} if knows_function(files, name) else {}
    with replaced_functions(files, most):
        if _is_empty(model(batch)):
            note(
                f"{type(model).__name__} detects nothing in a dry run; an image with objects needs "
                "more memory"
            )


def parts_with_roi_heads(model: nn.Module) -> list[nn.Module]:
    return [part for part in model.modules() if isinstance(_heads_of(part), nn.Module)]


def _heads_of(part: nn.Module) -> Any:
    return getattr(part, "roi_heads", None)


def _left_alone(what: str, where: str) -> str:
    return (
        f"The {what} of {where} are those of a dry run; a real image may have more, and need more "
        "memory"
    )


def _give_most(
    note: Note,
    generator: Any,
    heads: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Replace the proposals that ROI heads are called with, as a forward pre-hook."""
    given = [*args, *kwargs.values()]  # by type: projects and techniques have other names
    proposals = next((value for value in given if _box_field(value)), None)
    targets = next((value for value in given if _have_field(value, "gt_boxes")), [None])
    num = _most_after_nms(generator, heads.training)
    at_once = getattr(heads, "batch_size_per_image", 0) if heads.training else 0
    is_known = num or at_once or generator is None
    if proposals is None or not is_known or not _are_of_one_kind(proposals, targets):
        note(_left_alone("proposals", type(heads if generator is None else generator).__name__))
        return None
    filled = []
    for i, p in enumerate(proposals):  # a generator with branches gives each image several times
        objects = targets[i % len(targets)]
        filled.append(_filled(p, objects, max(num or at_once, len(p)), heads))
    return (
        tuple(filled if value is proposals else value for value in args),
        {k: filled if value is proposals else value for k, value in kwargs.items()},
    )


def _box_field(value: Any) -> str:
    """The field of the boxes of proposals, or of detections that only need masks; else ""."""
    names = ("proposal_boxes", "pred_boxes")
    return next((name for name in names if _have_field(value, name)), "")


def _have_field(value: Any, name: str) -> bool:
    is_list = isinstance(value, list) and len(value) > 0
    return is_list and all(isinstance(item, Instances) and item.has(name) for item in value)


def _most_after_nms(generator: Any, training: bool) -> Optional[int]:
    """A generator's limit, as Detectron2's RPN and most FCOS-likes keep it; None if unknown."""
    for module in generator.modules() if isinstance(generator, nn.Module) else ():
        both = getattr(module, "post_nms_topk", None)
        if isinstance(both, Mapping):
            return both[training]
        most = getattr(module, "post_nms_topk_train" if training else "post_nms_topk_test", None)
        if isinstance(most, int):
            return most
    return None


def _are_of_one_kind(proposals: list[Instances], objects: list[Any]) -> bool:
    """Whether all boxes are upright, or all are rotated."""
    boxes = [p.get(_box_field(proposals)) for p in proposals]
    boxes += [o.gt_boxes for o in objects if o is not None]
    kinds = {type(b) for b in boxes}
    return kinds in ({Boxes}, {RotatedBoxes})


def _filled(
    found: Instances, objects: Optional[Instances], num: int, heads: nn.Module
) -> Instances:
    """``num`` proposals with the fields of those found, as many on objects as heads may take."""
    name = _box_field([found])
    kind = type(found.get(name))
    boxes = torch.as_tensor(boxes_anywhere(num, found.image_size, seed=1)).float()
    boxes = rotated(boxes) if kind is RotatedBoxes else boxes
    if objects is not None and len(objects):
        share = getattr(heads, "positive_fraction", 0.5)
        num_on_objects = min(num, round(share * getattr(heads, "batch_size_per_image", num)))
        rows = torch.arange(num_on_objects)
        boxes[rows] = objects.gt_boxes.tensor.to(boxes)[rows % len(objects)]
    result = Instances(found.image_size)
    for field, value in found.get_fields().items():
        if field == name:
            result.set(field, kind(boxes.to(value.device)))
        else:
            result.set(field, _repeated(value, num))
    return result


def _repeated(value: Any, num: int) -> Any:
    """A field of Instances with another length: its items in turn, or zeros."""
    if len(value):
        return value[torch.arange(num) % len(value)]
    if isinstance(value, torch.Tensor):
        return value.new_zeros(num, *value.shape[1:])
    return type(value)(value.tensor.new_zeros(num, *value.tensor.shape[1:]))


def _detecting_most(note: Note, function: Callable[..., Any]) -> Callable[..., Any]:
    """A replacement of Detectron2's ``fast_rcnn_inference``."""

    @wraps(function)
    def fast_rcnn_inference(*args: Any, **kwargs: Any) -> Any:
        try:
            return _most_detections(*args, **kwargs)
        except (TypeError, ValueError):  # a project's function with other arguments
            note(_left_alone("detections", f"{function.__module__}.{function.__name__}"))
            return function(*args, **kwargs)

    return fast_rcnn_inference


def _is_empty(output: Any) -> bool:
    """Whether a model that predicts more than boxes detects nothing in an image."""
    results = output if isinstance(output, (list, tuple)) else ()
    found = [result.get("instances") for result in results if isinstance(result, dict)]
    return any(
        not len(i) and set(i.get_fields()) - _OF_BOXES for i in found if isinstance(i, Instances)
    )


def _most_detections(
    boxes: list[torch.Tensor],
    scores: list[torch.Tensor],
    image_shapes: list[_Size],
    score_thresh: float,
    nms_thresh: float,
    topk_per_image: int,
) -> tuple[list[Instances], list[torch.Tensor]]:
    if not len(boxes) == len(scores) == len(image_shapes):
        raise ValueError("these are not lists of the same images")
    results, kept = [], []
    for scores_of_image, size in zip(scores, image_shapes):
        num = len(scores_of_image)
        num = num if topk_per_image < 0 else min(topk_per_image, num)
        result = Instances(size)
        whole = scores_of_image.new_tensor([0.0, 0.0, size[1], size[0]])
        result.pred_boxes = Boxes(whole.repeat(num, 1))
        result.scores = scores_of_image[:num, 0]
        result.pred_classes = torch.zeros(num, dtype=torch.int64, device=whole.device)
        results.append(result)
        kept.append(torch.arange(num, device=whole.device))
    return results, kept
