# Copyright (c) the d2_memfit developers.
"""Criteria of DETR-like models, and selections of the objects in their targets."""

import math
from collections.abc import Iterable, Iterator, Sequence
from inspect import unwrap
from types import FunctionType
from typing import Any, Optional, Union

import torch
from torch import nn

from ...compat.pytorch import tree_iter

__all__ = [
    "chunks_of",
    "classes_of_criteria",
    "device_of",
    "is_targets",
    "objects_per_image",
    "take_objects",
]

_LABELS = ("labels", "class_labels")  # DETR and its successors; the transformers library


def classes_of_criteria(model: nn.Module, files: Iterable[Any] = ()) -> list[type[nn.Module]]:
    """The classes of a model and of its criterion, with their bases.

    Args:
        files: with other classes that the model may use.
    """
    modules = list(model.modules())
    names = [vars(file) for file in files]
    # Models of the transformers library make their criterion in the function of their loss_type.
    losses: list[Any] = [m.loss_function for m in modules if getattr(m, "loss_type", None)]
    names += [unwrap(loss).__globals__ for loss in losses if isinstance(loss, FunctionType)]
    known = [*map(type, modules), *(value for file in names for value in list(file.values()))]
    bases = (base for cls in known if isinstance(cls, type) for base in cls.__mro__)
    return [base for base in dict.fromkeys(bases) if issubclass(base, nn.Module)]


def device_of(arguments: object) -> torch.device:
    """The device of the first tensor in some containers, or the CPU."""
    tensors = (t for t in tree_iter(arguments) if isinstance(t, torch.Tensor))
    return next((t.device for t in tensors), torch.device("cpu"))


def is_targets(value: Any) -> bool:
    """Whether a value is a list with a dict per image, or with a tensor per image."""
    if not isinstance(value, (list, tuple)) or not value:
        return False
    return all(isinstance(v, dict) for v in value) or all(
        isinstance(v, torch.Tensor) for v in value
    )


def objects_per_image(targets: Sequence[Any]) -> Optional[list[int]]:
    """Number of objects of each image; None if a target does not tell it."""
    num_per_image = []
    for target in targets:
        labels = target
        if isinstance(target, dict):
            labels = next((target[name] for name in _LABELS if name in target), None)
        if not isinstance(labels, torch.Tensor) or labels.dim() == 0:
            return None
        num_per_image.append(len(labels))
    return num_per_image


def take_objects(targets: Sequence[Any], chosen: Sequence[Union[slice, torch.Tensor]]) -> list[Any]:
    """Select some objects of the targets.

    Args:
        chosen: selection for each image.
    """
    num_per_image = objects_per_image(targets)
    assert num_per_image is not None
    if not isinstance(targets[0], dict):
        return [target[part] for target, part in zip(targets, chosen)]
    names = [name for name in targets[0] if _is_of_objects(name, targets, num_per_image)]
    return [
        {**target, **{name: target[name][part] for name in names}}
        for target, part in zip(targets, chosen)
    ]


def _is_of_objects(name: str, targets: Sequence[Any], num_per_image: Sequence[int]) -> bool:
    values = [target.get(name) for target in targets]
    if not all(isinstance(v, torch.Tensor) and v.dim() for v in values):
        return False
    if values[0].dim() == 1 and "size" in name:  # an image's size can be as long
        return False
    return [len(v) for v in values] == list(num_per_image)


def chunks_of(num_per_image: Sequence[int], chunk_size: int) -> Iterator[list[slice]]:
    """Split objects into chunks of about equal size, each as one slice per image.

    Args:
        num_per_image: number of objects in each image.
        chunk_size: objects in a chunk. No chunk has a single object.
    """
    total = sum(num_per_image)
    num_chunks = max(1, min(math.ceil(total / chunk_size), total // 2))
    starts = [sum(num_per_image[:i]) for i in range(len(num_per_image))]
    for chunk in range(num_chunks):
        first, end = (total * i // num_chunks for i in (chunk, chunk + 1))
        yield [
            slice(min(max(first - start, 0), num), min(max(end - start, 0), num))
            for start, num in zip(starts, num_per_image)
        ]
