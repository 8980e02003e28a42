# Copyright (c) the d2_memfit developers.
"""The gradient of a window against that of one forward over the same images."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from detectron2.utils.events import EventStorage
from torch import nn
from torch.overrides import TorchFunctionMode

from d2_memfit import AccumulatingTrainer
from d2_memfit.engine import NormalizerOptions
from d2_memfit.measure.injection import seed_all

from .subject import Subject

__all__ = ["gradient"]

_OBJECTS = (10, 3, 0)  # of the images


def gradient(subject: Subject) -> str:
    """Compare three images, one by one and at once, in float32; and without normalisers.

    Random numbers are the same for each image and object, and there is no dropout.
    """
    [batch] = subject.record(1, 1)
    if not subject.project.has_plain_step or "image" not in batch[0]:
        return "not compared"
    images = _images(batch[0])
    try:
        full = _gradient(subject, images, None)
    except (AssertionError, RuntimeError):  # some cannot train on an image without objects
        images = images[:-1]
        full = _gradient(subject, images, None)
    on, off = (
        float((_gradient(subject, images, policy) - full).norm() / full.norm())
        for policy in ("window", "off")
    )
    return f"{on:.0e} ({off:.0e} without)"


def _images(first: dict[str, Any]) -> list[Any]:
    """Three shifted copies of an image, with some of its instances, or all of them repeated."""
    if "instances" not in first:
        return [first] * len(_OBJECTS)
    images = []
    for i, num in enumerate(_OBJECTS):
        image = copy.deepcopy(first)
        image["image"] = image["image"].roll(16 * i, -1)
        instances = image["instances"]
        chosen = torch.arange(num) % max(len(instances), 1)
        image["instances"] = instances[chosen]
        images.append(image)
    return images


def _gradient(subject: Subject, images: Sequence[Any], policy: Any) -> torch.Tensor:
    """Gradient of a window; of one forward if ``policy`` is None."""
    batch = copy.deepcopy(list(images))
    model = subject.parts(subject.settings(1)).model
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if isinstance(module, nn.MultiheadAttention):
            module.dropout = 0.0
    parameters = [p for p in model.parameters() if p.requires_grad]
    seed_all(3)
    with EventStorage(), _SameForEachRow():
        if policy is None:
            subject.losses(model, batch).backward()
        else:
            AccumulatingTrainer(
                model,
                [[image] for image in batch],
                torch.optim.SGD(parameters, lr=0.0),
                accumulation_steps=len(batch),
                normalizers=NormalizerOptions(policy),
                loss_fn=subject.losses,
            ).run_step()
    return torch.cat(
        [(torch.zeros_like(p) if p.grad is None else p.grad).flatten().double() for p in parameters]
    )


class _SameForEachRow(TorchFunctionMode):
    """Draws one row of random numbers, and repeats it along the first dimension."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in (torch.rand, torch.randn, torch.rand_like, torch.randn_like):
            result = func(*args, **kwargs)
            if result.dim() == 0 or not len(result):
                return result
            steps = torch.arange(result[0].numel(), dtype=result.dtype, device=result.device)
            row = (steps * 0.618034 + 0.1) % 1
            if func in (torch.randn, torch.randn_like):
                row = row * 2 - 1
            return result.detach().copy_(row.reshape(result[0].shape).expand_as(result))
        if func is torch.randperm:
            return torch.arange(args[0], device=kwargs.get("device"))
        return func(*args, **kwargs)
