# Copyright (c) the d2_memfit developers.
"""The steps for one image that does not fit alone, from harmless to last resort."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ...job import resize_image
from ...settings import RecoveryOptions
from ...techniques import checkpointed
from ..window import MicroBatch, Window
from .oom_log import RAISE

__all__ = ["SKIP", "Escalation", "low_memory_step"]

SKIP = "it is skipped"

_AGAIN = "caches are freed and it is run again"
_LOW_MEMORY = "it is run again with checkpointed activations, kept on the host"
_RESIZE = "it is run again at 0.7 of its size, {:.2f} of the original"

_RESIZE_FACTOR = 0.7
_MAX_RESIZES = 3


@dataclass
class _HardImage:
    original: Any  # a dataset dict, a row of a batch in columns, or a batch that cannot be split
    failures: int = 0
    num_resizes: int = 0


class Escalation:
    """Remembers the steps taken for each image of a window. Make one object per window."""

    def __init__(self, options: RecoveryOptions) -> None:
        self._options = options
        self._hard: dict[int, _HardImage] = {}  # by the id of the image that is run for it

    def needs_low_memory(self, micro_batch: MicroBatch) -> bool:
        """Whether this micro-batch is an image that failed even with freed caches."""
        hard = self._hard.get(id(micro_batch.image))
        return hard is not None and hard.failures >= 2

    def next_action(self, micro_batch: MicroBatch, window: Window) -> str:
        """Take the next step for a micro-batch of one image that was put back.

        Returns:
            str: the step, one of this file's texts.
        """
        image = micro_batch.image
        hard = self._hard.setdefault(id(image), _HardImage(image))
        hard.failures += 1
        if hard.failures == 1:
            return _AGAIN
        if hard.failures == 2:
            return _LOW_MEMORY
        if self._options.allow_resize and hard.num_resizes < _MAX_RESIZES and _has_pixels(image):
            hard.num_resizes += 1
            factor = _RESIZE_FACTOR**hard.num_resizes
            smaller = resize_image(hard.original, factor)
            self._hard[id(smaller)] = self._hard.pop(id(image))
            window.replace(image, smaller)
            return _RESIZE.format(factor)
        if self._options.last_resort == "skip":
            window.replace(image, None)
            return SKIP
        return RAISE


@contextmanager
def low_memory_step(model: nn.Module) -> Iterator[None]:
    """Run forward and backward with less device memory: slower, with the same gradients."""
    with checkpointed(model), torch.autograd.graph.save_on_cpu():
        yield


def _has_pixels(image: Any) -> bool:
    return isinstance(image, dict) and isinstance(image.get("image"), torch.Tensor)
