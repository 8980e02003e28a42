# Copyright (c) the d2_memfit developers.
"""The largest possible numbers of proposals and detections for a dry run."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, Optional

import torch
from detectron2.structures import Boxes, Instances
from torch import nn

from ..common.patching import replaced_functions, source_files, with_original
from ..job import boxes_anywhere

__all__ = ["detect_most", "parts_with_roi_heads", "worst_case"]

Note = Callable[[str], Any]

_OF_BOXES = {"pred_boxes", "scores", "pred_classes"}  # almost no memory


@contextmanager
def worst_case(model: nn.Module, note: Note) -> Iterator[None]:
    """While open, ROI heads get the most proposals possible, as many on objects as they may take.

    ROI heads are found by the attribute ``roi_heads`` of any part of the model. So it does not
    matter which generator makes the proposals, or how many branches it has.

    Args:
        note: called with a line for the user about proposals whose largest number is not known.
    """
    hooks = []
    for part in parts_with_roi_heads(model):
        give = partial(_give_most, note, getattr(part, "proposal_generator", None))
        hooks.append(part.roi_heads.register_forward_pre_hook(give, with_kwargs=True))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def detect_most(model: nn.Module, batch: Any, note: Note = str) -> None:
    """Run a model in evaluation so that it detects the most objects possible.

    Detections of Detectron2's ``fast_rcnn_inference`` are as many as the config allows, each as
    large as the image. Other models decide by scores, which may be too low for any detection.

    Args:
        note: called with a line for the user if the largest number is not known.
    """
    most = {"fast_rcnn_inference": with_original(partial(_most_detections, note))}
    with replaced_functions((source_files(model.modules()), most)):
        if _is_empty(model(batch)):
            note(
                f"{type(model).__name__} detects nothing in a dry run; an image with objects needs "
                "more memory"
            )


def parts_with_roi_heads(model: nn.Module) -> list[Any]:
    return [m for m in model.modules() if isinstance(getattr(m, "roi_heads", None), nn.Module)]


def _left_alone(what: str, where: str) -> str:
    return (
        f"The {what} of {where} are those of a dry run; a real image may have more, and need more "
        "memory"
    )


def _give_most(note: Note, generator: Any, heads: nn.Module, args: Any, kwargs: Any) -> Any:
    """Replace the proposals that ROI heads are called with, as a forward pre-hook."""
    given = [*args, *kwargs.values()]  # by type: projects and techniques have other names
    proposals = next((value for value in given if _have_boxes(value, "proposal_boxes")), None)
    targets = next((value for value in given if _have_boxes(value, "gt_boxes")), [None])
    num = _most_after_nms(generator, heads.training)
    at_once = getattr(heads, "batch_size_per_image", 0) if heads.training else 0
    is_known = num or at_once or generator is None
    if proposals is None or not is_known:
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


def _have_boxes(value: Any, name: str) -> bool:
    """Whether a value is Instances of images with upright boxes in a field."""
    items = value if isinstance(value, list) else []
    fields = [i.get_fields().get(name) if isinstance(i, Instances) else None for i in items]
    return len(fields) > 0 and all(type(boxes) is Boxes for boxes in fields)


def _most_after_nms(generator: Any, training: bool) -> Optional[int]:
    """A generator's limit, as Detectron2's RPN keeps it; None if unknown."""
    for module in generator.modules() if isinstance(generator, nn.Module) else ():
        both = getattr(module, "post_nms_topk", None)
        if isinstance(both, Mapping):
            return both[training]
    return None


def _filled(
    found: Instances, objects: Optional[Instances], num: int, heads: nn.Module
) -> Instances:
    """``num`` proposals with the fields of those found, as many on objects as heads may take."""
    boxes = torch.as_tensor(boxes_anywhere(num, found.image_size, seed=1)).float()
    if objects is not None and len(objects):
        share = getattr(heads, "positive_fraction", 0.5)
        num_on_objects = min(num, round(share * getattr(heads, "batch_size_per_image", num)))
        rows = torch.arange(num_on_objects)
        boxes[rows] = objects.gt_boxes.tensor.to(boxes)[rows % len(objects)]
    result = Instances(found.image_size)
    for field, value in found.get_fields().items():
        is_boxes = field == "proposal_boxes"
        result.set(field, Boxes(boxes.to(value.device)) if is_boxes else _repeated(value, num))
    return result


def _repeated(value: Any, num: int) -> Any:
    """A field of Instances with another length: its items in turn, or zeros."""
    if len(value):
        return value[torch.arange(num) % len(value)]
    if isinstance(value, torch.Tensor):
        return value.new_zeros(num, *value.shape[1:])
    return type(value)(value.tensor.new_zeros(num, *value.tensor.shape[1:]))


def _most_detections(note: Note, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """In place of Detectron2's ``fast_rcnn_inference``."""
    # A project's function may have other arguments.
    if len(args) == 6 and len(args[0]) == len(args[1]) == len(args[2]):
        return _detections(*args[1:3], args[5])
    note(_left_alone("detections", f"{function.__module__}.{function.__name__}"))
    return function(*args, **kwargs)


def _is_empty(output: Any) -> bool:
    """Whether a model that predicts more than boxes detects nothing in an image."""
    results = output if isinstance(output, (list, tuple)) else ()
    found = [result.get("instances") for result in results if isinstance(result, dict)]
    instances = [i for i in found if isinstance(i, Instances)]
    return any(not len(i) and set(i.get_fields()) - _OF_BOXES for i in instances)


def _detections(
    scores: list[torch.Tensor], image_shapes: list[tuple[int, int]], most: int
) -> tuple[list[Instances], list[torch.Tensor]]:
    results, kept = [], []
    for of_image, size in zip(scores, image_shapes):
        best = of_image[: most if most >= 0 else None, 0]
        boxes = Boxes(best.new_tensor([0.0, 0.0, size[1], size[0]]).repeat(len(best), 1))
        kept.append(torch.arange(len(best), device=best.device))
        classes = torch.zeros_like(kept[-1])
        results.append(Instances(size, pred_boxes=boxes, scores=best, pred_classes=classes))
    return results, kept
