# Copyright (c) the d2_memfit developers.
"""Evaluation results that are resized to the image on the host."""

from contextlib import AbstractContextManager
from typing import Any, Callable, Optional

import torch
from detectron2.layers import paste_masks_in_image
from detectron2.structures import Boxes, Instances
from torch import nn

from ..common.compat import tree_map, without_torch_function
from ..common.errors import ConfigError
from ..common.patching import replaced_functions, source_files
from ..memory import on_host
from .technique import Technique, wrap_method

__all__ = ["EvaluationOnHost", "can_have_results_on_host", "results_on_host"]

# Functions of Detectron2 that resize results to the image.
_POSTPROCESSING = ("detector_postprocess", "sem_seg_postprocess")


class EvaluationOnHost(Technique):
    """Makes image-sized masks on the host: pasted masks one at a time, masks of queries together.

    Saves the image-sized masks of all detections on the device. 100 masks of 5000 x 5000 pixels
    take 2.5 GB pasted and 10 GB upsampled, several times over. Pasted masks are not kept on the
    host either: the evaluator turns each into a run-length code at once. Costs time if the host is
    slower than the device, and the host's memory for masks of queries, which an estimate states.

    Source: github.com/facebookresearch/detectron2/issues/1366, with ``paste_masks_in_image``, and
    github.com/facebookresearch/Mask2Former/issues/83.

    Key: Whether results are resized to the image on the host, and pasted masks one at a time.
    """

    part, needs = "evaluation", frozenset({"evaluation"})
    key, off = "MEMFIT.EVALUATION.ON_HOST", False

    def suggest(self, job: Any, model: nn.Module) -> Optional[bool]:
        return can_have_results_on_host(model) or None

    def apply(self, model: nn.Module, value: bool) -> nn.Module:
        if not can_have_results_on_host(model):
            raise ConfigError(
                f"{self.key}: the files of the {type(model).__name__} call neither "
                f"{' nor '.join(_POSTPROCESSING)} of Detectron2, so nothing would change. Set it "
                "False"
            )
        wrap_method(model, "forward", _forward_on_host)
        return model


def _forward_on_host(
    model: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    if model.training:
        return forward(*args, **kwargs)
    with results_on_host(model, _detector_postprocess_on_host):
        return forward(*args, **kwargs)


class _PastedMasks:
    """The masks of an image's objects, each [height, width], pasted when it is needed.

    It is what evaluators, ``Instances`` and ``Visualizer`` use of a tensor [N, height, width].

    Args:
        scores: of each object's mask within its box [N, size, size].
        boxes: the objects' boxes in the image.
        image_size: height and width in pixels.
        threshold: the score from which on a pixel belongs to the object.
    """

    def __init__(
        self, scores: torch.Tensor, boxes: Boxes, image_size: tuple[int, int], threshold: float
    ) -> None:
        self._scores, self._boxes = scores, boxes
        self._image_size, self._threshold = image_size, threshold

    def __len__(self) -> int:
        return len(self._scores)

    def __getitem__(self, item: Any) -> Any:
        if isinstance(item, int) or (isinstance(item, torch.Tensor) and item.dim() == 0):
            item = int(item)
            if not -len(self) <= item < len(self):
                raise IndexError(f"mask {item} of {len(self)}")  # which ends an iteration
            return self[[item]].to_tensor()[0]
        of_image = (self._image_size, self._threshold)
        return _PastedMasks(self._scores[item], self._boxes[item], *of_image)

    def to_tensor(self) -> torch.Tensor:
        """All masks [N, height, width], bool."""
        of_image = (self._image_size, self._threshold)
        return paste_masks_in_image(self._scores, self._boxes, *of_image)

    def to(self, *args: Any, **kwargs: Any) -> "_PastedMasks":
        return self  # masks are on the host

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        masks = self.to_tensor().numpy()
        return masks if dtype is None else masks.astype(dtype, copy=False)


class _HostMasks(torch.Tensor):
    """Masks on the host. All that is computed with them is there too.

    A model may use them together with tensors on the device, such as the scores of the queries.
    """

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        given = (args, kwargs or {})
        name = func.__name__
        is_operator = name.endswith("__") and name != "__setitem__" and not name.startswith("__i")
        is_in_place = name.endswith("_") and not is_operator
        if not is_in_place or isinstance(args[0], cls):  # others write into a tensor on the device
            given = tree_map(_to_host, given)
        with on_host():
            return tree_map(_marked, without_torch_function(func, types, *given))

    def __deepcopy__(self, memo: Any) -> torch.Tensor:
        return self.clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        plain = without_torch_function(torch.Tensor.detach, (_HostMasks,), (self,), {})
        return plain.__reduce_ex__(protocol)


def _to_host(value: Any) -> Any:
    is_other = isinstance(value, torch.Tensor) and not isinstance(value, _HostMasks)
    return value.cpu() if is_other else value


def _marked(value: Any) -> Any:
    is_on_host = type(value) is torch.Tensor and value.device.type == "cpu"
    return value.as_subclass(_HostMasks) if is_on_host else value


def can_have_results_on_host(model: nn.Module) -> bool:
    """Whether :func:`results_on_host` has an effect."""
    files = source_files(model.modules())
    return any(hasattr(file, name) for file in files for name in _POSTPROCESSING)


def results_on_host(
    model: nn.Module, detector_postprocess: Optional[Callable[..., Any]] = None
) -> AbstractContextManager[None]:
    """While open, Detectron2's functions that resize results to the image run on the host.

    Args:
        detector_postprocess: makes a replacement from Detectron2's function of this name; None runs
            the original.
    """
    replacements = dict.fromkeys(_POSTPROCESSING, _on_host)
    if detector_postprocess is not None:
        replacements["detector_postprocess"] = detector_postprocess
    return replaced_functions((source_files(model.modules()), replacements))


def _on_host(postprocess: Callable[..., Any]) -> Callable[..., Any]:
    def postprocess_on_host(results: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(results, torch.Tensor):
            return postprocess(results.to("cpu"), *args, **kwargs)
        with on_host():
            masks = _marked(results.to("cpu", copy=True))
        return postprocess(masks, *args, **kwargs)

    return postprocess_on_host


def _detector_postprocess_on_host(postprocess: Callable[..., Any]) -> Callable[..., Any]:
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
        results.pred_masks = _PastedMasks(masks, results.pred_boxes, size, mask_threshold)
        return results

    return postprocess_on_host
