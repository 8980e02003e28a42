# Copyright (c) the d2_memfit developers.
"""Selections of the objects in a DETR-like criterion's targets."""

import math
from collections.abc import Iterator, Sequence
from typing import Any, Optional, Union

import torch

from ...compat.pytorch import tree_iter

__all__ = ["chunks_of", "device_of", "is_targets", "objects_per_image", "take_objects"]

_LABELS = ("labels", "class_labels")  # DETR and its successors; the transformers library


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
    counts = []
    for target in targets:
        labels = target
        if isinstance(target, dict):
            labels = next((target[name] for name in _LABELS if name in target), None)
        if not isinstance(labels, torch.Tensor) or labels.dim() == 0:
            return None
        counts.append(len(labels))
    return counts


def take_objects(targets: Sequence[Any], chosen: Sequence[Union[slice, torch.Tensor]]) -> list[Any]:
    """Select some objects of the targets.

    Args:
        chosen: selection for each image.
    """
    counts = objects_per_image(targets)
    assert counts is not None
    if not isinstance(targets[0], dict):
        return [target[part] for target, part in zip(targets, chosen)]
    names = [name for name in targets[0] if _is_of_objects(name, targets, counts)]
    return [
        {**target, **{name: target[name][part] for name in names}}
        for target, part in zip(targets, chosen)
    ]


def _is_of_objects(name: str, targets: Sequence[Any], counts: Sequence[int]) -> bool:
    values = [target.get(name) for target in targets]
    if not all(isinstance(v, torch.Tensor) and v.dim() for v in values):
        return False
    if values[0].dim() == 1 and "size" in name:  # an image's size can be as long
        return False
    return [len(v) for v in values] == list(counts)


def chunks_of(counts: Sequence[int], chunk_size: int) -> Iterator[list[slice]]:
    """Split objects into chunks of about equal size, each as one slice per image.

    Args:
        counts: number of objects in each image.
        chunk_size: objects in a chunk. No chunk has a single object.
    """
    num = sum(counts)
    num_chunks = max(1, min(math.ceil(num / chunk_size), num // 2))
    starts = [sum(counts[:i]) for i in range(len(counts))]
    for chunk in range(num_chunks):
        first, end = (num * i // num_chunks for i in (chunk, chunk + 1))
        yield [
            slice(min(max(first - start, 0), count), min(max(end - start, 0), count))
            for start, count in zip(starts, counts)
        ]
