# Copyright (c) the d2_memfit developers.
"""Export of trained models to TorchScript or ONNX files, checked against the model."""

import importlib.util
import os
import sys
import textwrap
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Optional

import torch
from detectron2.modeling import GeneralizedRCNN
from detectron2.structures import Instances
from torch import nn

from .. import compat
from ..common.files import output_file
from ..errors import ConfigError

__all__ = ["SUFFIXES", "export"]

SUFFIXES = (".onnx", ".ts")
_NEEDED = ("onnx", "onnxruntime")
_OPSET = 17  # the first with all operators of Detectron2's models
# The largest accepted differences: of boxes in pixels, and of scores and masks.
_MOST_PIXELS = 1.0
_MOST_SCORE = 0.01

Outputs = tuple[torch.Tensor, ...]


def export(model: nn.Module, image: torch.Tensor, to: Path) -> str:
    """Trace a model with Detectron2's ``TracingAdapter``, and check the file's predictions.

    The file takes an image [3, height, width] of the size that the model's test mapper makes. It
    returns the fields of its objects in alphabetical order, and the size of the image. Boxes are in
    pixels of this image. The masks of an R-CNN are those of its mask head, within the boxes.

    Args:
        model: in evaluation mode.
        image: an input on which the model finds objects, float32.
        to: the file, which ends in .ts or .onnx. It is written only if its predictions on this
            image and on a smaller part of it equal those of the model.

    Returns:
        A text about what was compared.

    Raises:
        ConfigError: the model cannot be exported.
    """
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if to.suffix == ".onnx" and missing:
        raise ConfigError(
            f"{to} needs packages that are not installed: pip install {' '.join(missing)}"
        )
    adapter = compat.tracing_adapter()(model, [{"image": image}], _inference_of(model))
    adapter.eval()
    part = image[:, : image.shape[1] * 3 // 4, : image.shape[2] * 3 // 4].contiguous()
    try:
        with output_file(to) as file, torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the tracer warns about values that become constants
            device = _device_of(adapter)
            eager = [_instances(adapter, adapter(pixels.to(device))) for pixels in (image, part)]
            if not len(eager[0]):
                raise ValueError("the model finds no objects in --input: name an image with some")
            run = (_onnx if to.suffix == ".onnx" else _torchscript)(adapter, image, file)
            found = [_instances(adapter, run(pixels)) for pixels in (image, part)]
            distance = max(map(_distance, eager, found))
    except Exception as e:  # the tracer and the exporter raise errors of all kinds
        reason = (
            str(e) or traceback.extract_tb(e.__traceback__)[-1].line
        )  # an assertion has no text
        text = textwrap.shorten(str(reason), 200, placeholder=" ...")
        raise ConfigError(
            f"this {type(model).__name__} cannot be exported as {to.suffix} "
            f"({type(e).__name__}: {text})"
        ) from e
    number = sum(map(len, eager))
    return f"{number} objects in 2 images, boxes within {distance:.3f} pixels of the model's"


def _inference_of(model: nn.Module) -> Optional[Callable[..., Any]]:
    if not isinstance(model, GeneralizedRCNN):
        return None

    def inference(model: Any, inputs: Any) -> Any:  # without pasted masks
        return [{"instances": model.inference(inputs, do_postprocess=False)[0]}]

    return inference


def _device_of(adapter: nn.Module) -> torch.device:
    return next(adapter.parameters()).device


def _torchscript(adapter: Any, image: torch.Tensor, file: Any) -> Callable[..., Outputs]:
    device = _device_of(adapter)
    traced = torch.jit.trace(adapter, (image.to(device),), check_trace=False)
    torch.jit.save(traced, file)
    file.flush()
    loaded = torch.jit.load(file.name, map_location=device)
    return lambda pixels: loaded(pixels.to(device))


def _onnx(adapter: Any, image: torch.Tensor, file: Any) -> Callable[..., Outputs]:
    import onnxruntime

    with _without_output():  # if it fails, C++ prints the graph: thousands of lines
        torch.onnx.export(
            adapter.cpu(),
            (image,),
            file.name,
            input_names=["image"],
            dynamic_axes={"image": {1: "height", 2: "width"}},
            opset_version=_OPSET,
            dynamo=False,  # torch.export does not take the data-dependent shapes of detectors
        )
    session = onnxruntime.InferenceSession(file.name, providers=["CPUExecutionProvider"])
    return lambda pixels: tuple(map(torch.from_numpy, session.run(None, {"image": pixels.numpy()})))


@contextmanager
def _without_output() -> Iterator[None]:
    """Discard what the process prints, also from C++."""
    sys.stdout.flush()
    sys.stderr.flush()
    kept = [(stream, os.dup(stream)) for stream in (1, 2)]
    with open(os.devnull, "w") as nowhere:
        for stream, _ in kept:
            os.dup2(nowhere.fileno(), stream)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for stream, copy in kept:
            os.dup2(copy, stream)
            os.close(copy)


def _instances(adapter: Any, outputs: Outputs) -> Instances:
    (result,) = adapter.outputs_schema(outputs)
    instances = result.get("instances")
    if not isinstance(instances, Instances):
        raise ValueError("its result has more than a list of objects")
    return instances.to("cpu")


def _distance(eager: Instances, other: Instances) -> float:
    """Largest difference of boxes in pixels.

    Raises:
        ValueError: objects differ.
    """
    if len(eager) != len(other):
        raise ValueError(f"it finds {len(other)} objects where the model finds {len(eager)}")
    if not len(eager):
        return 0.0
    # Objects with almost the same score may come in another order.
    other = other[torch.cdist(_places(eager), _places(other)).argmin(dim=1)]
    boxes = float((eager.pred_boxes.tensor - other.pred_boxes.tensor).abs().max())
    score = float((eager.scores - other.scores).abs().max())
    if eager.has("pred_masks"):
        score = max(score, float((eager.pred_masks - other.pred_masks).abs().max()))
    if boxes > _MOST_PIXELS or score > _MOST_SCORE:
        raise ValueError(f"its boxes differ by {boxes:.2f} pixels, scores or masks by {score:.3f}")
    return boxes


def _places(instances: Instances) -> torch.Tensor:
    """Points [N, 6] that are close together for the same object."""
    classes = instances.pred_classes
    scores = instances.scores
    return torch.cat([instances.pred_boxes.tensor, 1e4 * classes[:, None], scores[:, None]], dim=1)
