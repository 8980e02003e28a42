# Copyright (c) the d2_memfit developers.
"""Evaluation results that are post-processed on the host, one mask at a time."""

import logging
from contextlib import AbstractContextManager
from typing import Any, Callable, Optional

import torch
import torch.nn.functional as F
from detectron2.config import CfgNode
from detectron2.layers import paste_masks_in_image
from detectron2.structures import Boxes, Instances
from torch import nn
from torch.overrides import TorchFunctionMode

from ..common.patching import calls_function, knows_function, replaced_functions, source_files
from ..errors import ConfigError
from .registry import TECHNIQUES, BooleanTechnique
from .support import add_mixin
from .support.lazy_rows import LazyRows, LazyRowsChangeError, RememberedRows

__all__ = ["EvaluationOnHost", "can_have_results_on_host", "results_on_host"]

logger = logging.getLogger(__name__)

_interpolate = F.interpolate  # a dry run replaces the function

# Functions of Detectron2 that resize results to the image.
_POSTPROCESSING = ("detector_postprocess", "sem_seg_postprocess")


@TECHNIQUES.register()
class EvaluationOnHost(BooleanTechnique):
    """Post-processes results on the host, and makes image-sized masks one at a time.

    Saves the image-sized masks of all detections, on the device and on the host. 100 masks of 5000
    x 5000 pixels take 2.5 GB pasted and 10 GB upsampled, several times over. The evaluator turns
    each mask into a run-length code at once. Costs time if the host is slower than the device.
    Upsampled masks are computed twice, for their scores and for their codes.

    Source: github.com/facebookresearch/detectron2/issues/1366, with ``paste_masks_in_image``, and
    github.com/facebookresearch/Mask2Former/issues/83.
    """

    tier = "exact"
    part = "evaluation"
    in_evaluation = True
    # Whether results are upsampled to the size of the image on the host, one mask at a time.
    key = "MEMFIT.EVALUATION.ON_HOST"

    @classmethod
    def apply(cls, model: nn.Module, cfg: CfgNode) -> nn.Module:
        if not can_have_results_on_host(model) and not calls_function(type(model), "interpolate"):
            raise ConfigError(
                f"MEMFIT.EVALUATION.ON_HOST: the files of the {type(model).__name__} call neither "
                f"{' nor '.join(_POSTPROCESSING)} of Detectron2, and it does not interpolate, so "
                "nothing would change. Set it False"
            )
        add_mixin(model, _EvaluatesOnHost)
        return model


class _EvaluatesOnHost(nn.Module):
    upsamples_later = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.training:
            return super().__call__(*args, **kwargs)
        with results_on_host(self, _detector_postprocess_lazily):
            if self.upsamples_later:
                try:
                    with _UpsamplesLater(args[0] if args else None):
                        return super().__call__(*args, **kwargs)
                except LazyRowsChangeError as e:
                    logger.warning("%s. All masks of an image are computed at once", e)
                    type(self).upsamples_later = False
            return super().__call__(*args, **kwargs)


class _UpsamplesLater(TorchFunctionMode):
    """While open, ``F.interpolate`` returns :class:`LazyRows` for results of at least image size.

    Examples are masks of queries and scores of classes.

    Args:
        batch: Detectron2's list of dicts with an image [3, height, width]. Other batches change
            nothing.
    """

    def __init__(self, batch: Any) -> None:
        super().__init__()
        is_known = isinstance(batch, list) and all(_has_image(image) for image in batch)
        sizes = [image["image"].shape[-2:] for image in batch] if is_known else []
        self._least = [min(lengths) for lengths in zip(*sizes)]  # height and width

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is _interpolate and self._least and args and _has_rows(args[0]):
            meta = torch.empty(args[0].shape, dtype=args[0].dtype, device="meta")
            like = func(meta, *args[1:], **kwargs)
            if all(a >= b for a, b in zip(like.shape[-2:], self._least)):
                return func(LazyRows.from_tensor(args[0], 2), *args[1:], **kwargs)
        return func(*args, **kwargs)


def _has_image(image: Any) -> bool:
    return isinstance(image, dict) and isinstance(image.get("image"), torch.Tensor)


def _has_rows(x: Any) -> bool:
    is_plain = type(x) is torch.Tensor and not (torch.is_grad_enabled() and x.requires_grad)
    return is_plain and x.dim() == 4 and x.is_floating_point()


def can_have_results_on_host(model: nn.Module) -> bool:
    """Whether :func:`results_on_host` has an effect."""
    files = source_files(model.modules())
    return any(knows_function(files, name) for name in _POSTPROCESSING)


def results_on_host(
    model: nn.Module, detector_postprocess: Optional[Callable[..., Any]] = None
) -> AbstractContextManager[None]:
    """While open, Detectron2's functions that resize results to the image run on the host.

    Args:
        detector_postprocess: makes a replacement from Detectron2's function of this name; None runs
            the original.
    """
    files = source_files(model.modules())
    replacements = dict.fromkeys(_POSTPROCESSING, _on_host)
    if detector_postprocess is not None:
        replacements["detector_postprocess"] = detector_postprocess
    known = {name: new for name, new in replacements.items() if knows_function(files, name)}
    return replaced_functions(files, known)


def _on_host(postprocess: Callable[..., Any]) -> Callable[..., Any]:
    def postprocess_on_host(results: Any, *args: Any, **kwargs: Any) -> Any:
        return postprocess(results.to("cpu"), *args, **kwargs)

    return postprocess_on_host


def _pasted(
    masks: torch.Tensor, boxes: Boxes, image_size: tuple[int, int], threshold: float
) -> LazyRows:
    """The masks [N, height, width] of an image's objects, pasted when they are needed.

    Args:
        masks: the scores of each object's mask within its box [N, size, size].
        boxes: the objects' boxes in the image.
        image_size: height and width in pixels.
        threshold: the score from which on a pixel belongs to the object.
    """

    def rows(numbers: torch.Tensor) -> torch.Tensor:
        return paste_masks_in_image(masks[numbers], boxes[numbers], image_size, threshold)

    like = torch.empty(1, *image_size, dtype=torch.bool, device="meta")
    return LazyRows(RememberedRows(rows), torch.arange(len(masks)), like, 0, masks.device)


def _detector_postprocess_lazily(postprocess: Callable[..., Any]) -> Callable[..., Any]:
    def postprocess_on_host(
        results: Instances, output_height: int, output_width: int, mask_threshold: float = 0.5
    ) -> Instances:
        results = results.to("cpu")
        if not results.has("pred_masks"):
            return postprocess(results, output_height, output_width, mask_threshold)
        # Under another name, masks are only filtered, along with boxes that have become empty.
        results.roi_masks = results.pred_masks
        results.remove("pred_masks")
        results = postprocess(results, output_height, output_width, mask_threshold)
        masks = results.roi_masks
        results.remove("roi_masks")
        masks = masks[:, 0] if isinstance(masks, torch.Tensor) else masks.tensor
        size = (int(output_height), int(output_width))
        results.pred_masks = _pasted(masks, results.pred_boxes, size, mask_threshold)
        return results

    return postprocess_on_host
