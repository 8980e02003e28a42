# Copyright (c) the d2_memfit developers.
"""The largest numbers of proposals and detections, in place of those of a dry run."""

import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any, Optional

import torch
from detectron2.modeling.proposal_generator.rpn import RPN
from detectron2.structures import Boxes, ImageList, Instances, RotatedBoxes
from torch import nn

from ..job.invented import rotated
from ..patching import knows_function, replaced_functions, source_files

__all__ = ["worst_detections", "worst_proposals"]

Note = Callable[[str], None]
_Size = tuple[int, int]  # height and width in pixels

_OF_BOXES = {"pred_boxes", "scores", "pred_classes"}  # almost no memory


@contextmanager
def worst_proposals(model: nn.Module, note: Note) -> Iterator[None]:
    """While open, RPNs before ROI heads find the most proposals possible, half on objects.

    Proposal generators of other classes are left alone.

    Args:
        model: it may have several parts with ROI heads, at any depth.
        note: called with a line for the user about each class that is left alone.
    """
    parts = [module for module in model.modules() if hasattr(module, "roi_heads")]
    found = {module for part in parts for module in part.modules() if isinstance(module, RPN)}
    others = {getattr(part, "proposal_generator", None) for part in parts} - found - {None}
    for generator in others:
        note(_left_alone("proposals", type(generator).__name__))
    noted = _once(note)
    hooks = [
        rpn.register_forward_hook(partial(_most_proposals, noted), with_kwargs=True)
        for rpn in found
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def worst_detections(model: nn.Module, note: Note) -> Iterator[None]:
    """While open, ROI heads detect the most objects possible, each as large as the image.

    Heads that do not call Detectron2's ``fast_rcnn_inference``, or call it with other arguments,
    are left alone.

    Args:
        note: called with a line for the user if it gets other arguments, or if a model that
            predicts more than boxes detects nothing.
    """
    files = source_files(model.modules())
    has_roi_heads = knows_function(files, "fast_rcnn_inference")
    most = {"fast_rcnn_inference": partial(_detecting_most, _once(note))} if has_roi_heads else {}
    hook = model.register_forward_hook(partial(_note_if_none, note))
    try:
        with replaced_functions(files, most):
            yield
    finally:
        hook.remove()


def _left_alone(what: str, where: str) -> str:
    return (
        f"The {what} of {where} are as the model makes them in a dry run; an image may have more, "
        "and need more"
    )


def _once(note: Note) -> Note:
    noted: set[str] = set()

    def note_once(text: str) -> None:
        if text not in noted:
            noted.add(text)
            note(text)

    return note_once


def _most_proposals(
    note: Note, rpn: RPN, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
) -> Any:
    """Replace an RPN's output, as a forward hook."""
    given = [*args, *kwargs.values()]  # by type: a technique's forward has no names for them
    sizes = next((value.image_sizes for value in given if isinstance(value, ImageList)), ())
    objects = next(filter(_are_instances, given), [None] * len(sizes))
    if not _is_an_rpns(output, len(sizes)) or not _are_of_one_kind(output[0], objects):
        note(_left_alone("proposals", type(rpn).__name__))
        return output
    num = rpn.post_nms_topk[rpn.training]
    found = output[0][0].proposal_boxes
    proposals = [
        _proposals(o, tuple(size), num, type(found)).to(found.device)
        for o, size in zip(objects, sizes)
    ]
    return proposals, *output[1:]


def _are_instances(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, Instances) for item in value)


def _is_an_rpns(output: Any, num_images: int) -> bool:
    proposals = output[0] if isinstance(output, tuple) and len(output) > 1 else None
    fields = {"proposal_boxes", "objectness_logits"}
    return (
        isinstance(proposals, list)
        and len(proposals) == num_images > 0
        and all(isinstance(p, Instances) and set(p.get_fields()) == fields for p in proposals)
        and all(type(p.proposal_boxes) in (Boxes, RotatedBoxes) for p in proposals)
    )


def _are_of_one_kind(proposals: list[Instances], objects: Iterable[Optional[Instances]]) -> bool:
    """Whether all boxes are upright, or all are rotated."""
    boxes = [p.proposal_boxes for p in proposals]
    boxes += [o.gt_boxes for o in objects if o is not None and o.has("gt_boxes")]
    return len({type(b) for b in boxes}) == 1


def _proposals(
    objects: Optional[Instances], size: _Size, num: int, kind: Callable[[torch.Tensor], Any] = Boxes
) -> Instances:
    """Proposals, half of them on the objects, so that they fill the foreground quota.

    Args:
        kind: ``Boxes`` or ``RotatedBoxes``.
    """
    boxes = _boxes(num, size)
    if kind is RotatedBoxes:
        boxes = rotated(boxes)
    if objects is not None and objects.has("gt_boxes") and len(objects):
        half = torch.arange(num // 2)
        boxes[half] = objects.gt_boxes.tensor.to(boxes)[half % len(objects)]
    return Instances(size, proposal_boxes=kind(boxes), objectness_logits=torch.zeros(num))


def _boxes(num: int, size: _Size) -> torch.Tensor:
    """Boxes [num, 4] of all sizes, anywhere in an image."""
    generator = torch.Generator().manual_seed(1)
    extent = torch.tensor([size[1], size[0]], dtype=torch.float32)
    corner, length = torch.rand(2, num, 2, generator=generator)
    corner, length = corner * 0.8 * extent, (length * 0.18 + 0.02) * extent
    return torch.cat([corner, corner + length], dim=1)


def _detecting_most(note: Note, function: Callable[..., Any]) -> Callable[..., Any]:
    """A replacement of Detectron2's ``fast_rcnn_inference``."""
    expected = inspect.signature(_most_detections)

    @wraps(function)
    def fast_rcnn_inference(*args: Any, **kwargs: Any) -> Any:
        try:
            given = expected.bind(*args, **kwargs).arguments
            is_known = len(given["boxes"]) == len(given["scores"]) == len(given["image_shapes"])
        except TypeError:
            is_known = False
        if is_known:
            return _most_detections(**given)
        note(_left_alone("detections", f"{function.__module__}.{function.__name__}"))
        return function(*args, **kwargs)

    return fast_rcnn_inference


def _note_if_none(note: Note, model: nn.Module, args: Any, output: Any) -> None:
    results = output if isinstance(output, (list, tuple)) else ()
    found = [result.get("instances") for result in results if isinstance(result, dict)]
    for instances in [i for i in found if isinstance(i, Instances)]:
        if set(instances.get_fields()) - _OF_BOXES and not len(instances):
            note(
                f"{type(model).__name__} detects nothing in a dry run; an image with many objects "
                "needs more"
            )


def _most_detections(
    boxes: list[torch.Tensor],
    scores: list[torch.Tensor],
    image_shapes: list[_Size],
    score_thresh: float,
    nms_thresh: float,
    topk_per_image: int,
) -> tuple[list[Instances], list[torch.Tensor]]:
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
