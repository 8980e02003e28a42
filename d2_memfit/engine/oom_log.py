# Copyright (c) the d2_memfit developers.
"""Descriptions of out-of-memory errors, for the log, the final error and a file."""

import json
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any, Optional

import torch
from detectron2.utils import comm
from detectron2.utils.file_io import PathManager
from torch import nn

from .. import compat
from ..common.units import GB
from ..config.settings import RecoveryOptions
from ..errors import START_HERE, OutOfMemoryError
from ..job import size_of
from ..memory import device_memory, error_line, is_out_of_memory
from .window import count_images, count_objects, dataset_dicts

logger = logging.getLogger(__name__)

__all__ = ["RAISE", "OomEvent", "OomLog", "observed", "padded_size"]

RAISE = "training stops"


@dataclass
class OomEvent:
    """One out-of-memory error. Sizes are in pixels, memory is in GB (2^30 bytes)."""

    iteration: int
    # start, window, forward, backward, restoration, vote, reduction, optimizer or evaluation
    phase: str
    micro_batch: int  # images in it
    images: list[dict[str, Any]]  # file_name, image_id, height, width, num_instances of each
    padded_size: Optional[tuple[int, int]]  # height and width of the batch that they make
    allocated_gb: float
    reserved_gb: float
    budget_gb: Optional[float]
    error: str
    action: str = ""  # what was done about it
    rank: int = field(default_factory=comm.get_rank)
    time: float = field(default_factory=time.time)  # seconds since 1970

    def __str__(self) -> str:
        names = ", ".join(
            f"{i['file_name']} (image_id {i['image_id']}, {i['height']} x {i['width']} pixels, "
            f"{i['num_instances']} instances)"
            for i in self.images
        )
        size = " x ".join(map(str, self.padded_size)) if self.padded_size else "unknown size"
        budget = "no budget" if self.budget_gb is None else f"a budget of {self.budget_gb:g} GB"
        return (
            f"Out of memory in the {self.phase} of iteration {self.iteration} on rank {self.rank}, "
            f"with a micro-batch of {self.micro_batch}, padded to {size}: {names or 'no images'}. "
            f"{self.allocated_gb:.2f} GB allocated, {self.reserved_gb:.2f} GB reserved, {budget}. "
            f"The error was: {self.error}"
        )


class OomLog:
    """Describes out-of-memory errors, for the log, the final error and ``memfit_oom.jsonl``.

    The file has one JSON object per line. Each is one write, so the file can be parsed whenever
    the process ends, and several ranks can share it.

    Args:
        options: its ``output_dir`` is the file's folder; "" for no file.
        model: without DDP around it.
        mixed_precision: whether it is on, for the advice in the final error.
    """

    FILE_NAME = "memfit_oom.jsonl"

    def __init__(
        self, options: RecoveryOptions, model: nn.Module, mixed_precision: bool = False
    ) -> None:
        self._options = options
        self._model = model
        self._mixed_precision = mixed_precision

    def event(self, error: BaseException, phase: str, data: Any) -> OomEvent:
        """The event of an error in a micro-batch (``data``), while it is handled.

        It holds no reference to the error, whose traceback would keep tensors alive.
        """
        memory = device_memory(next(self._model.parameters()).device)
        images = [d for d in dataset_dicts(data) if isinstance(d.get("image"), torch.Tensor)]
        return OomEvent(
            iteration=compat.current_iteration(),
            phase=phase,
            micro_batch=count_images(data),
            images=[_describe(image) for image in images],
            padded_size=padded_size(images, self._model),
            allocated_gb=round(memory.allocated_bytes / GB, 3),
            reserved_gb=round(memory.reserved_bytes / GB, 3),
            budget_gb=self._options.budget_gb,
            error=error_line(error),
        )

    def append(self, event: OomEvent, action: str) -> None:
        """Write an event to the file, with what is done about it."""
        event.action = action
        if not self._options.output_dir:
            return
        path = os.path.join(self._options.output_dir, self.FILE_NAME)
        line = json.dumps(asdict(event), default=_plain) + "\n"
        try:
            PathManager.mkdirs(self._options.output_dir)
            with PathManager.open(path, "a") as f:
                f.write(line)
        except (OSError, MemoryError) as e:  # a full disk must not end a run that just recovered
            logger.warning("Cannot write %s (%s). The event was %s", path, e, line.strip())

    def log(self, event: OomEvent, action: str) -> None:
        """Write an event to the file and to the log, with what is done about it."""
        self.append(event, action)
        logger.warning("%s. Now %s", event, action)

    @contextmanager
    def explained(self, phase: str, data: Callable[[], Any] = list) -> Iterator[None]:
        """Record and explain an out-of-memory error where nothing can be run again.

        Args:
            data: asked for the micro-batch when the error comes.

        Raises:
            OutOfMemoryError: in place of the original error.
        """
        try:
            yield
        except Exception as e:
            if not is_out_of_memory(e) or isinstance(e, OutOfMemoryError):  # explained already
                raise
            event = self.event(e, phase, data())
            self.append(event, RAISE)
            raise OutOfMemoryError(self.final_message(event)) from e

    def final_message(self, event: OomEvent) -> str:
        """Message of the error that ends a run: what happened, and three things to try next."""
        options = self._options
        smaller = ["a smaller MEMFIT.MICRO_BATCH"] if event.micro_batch != 1 else []
        if event.phase == "evaluation":
            steps = ["a smaller INPUT.MAX_SIZE_TEST", "a smaller TEST.DETECTIONS_PER_IMAGE"]
        elif event.phase in ("forward", "backward"):
            steps = [*smaller, *([] if self._mixed_precision else ["SOLVER.AMP.ENABLED True"])]
            steps += ["a smaller INPUT.MAX_SIZE_TRAIN"]
            steps += ["MEMFIT.OOM.LAST_RESORT resize"] if options.last_resort == "raise" else []
            steps += ["MEMFIT.OOM.LAST_RESORT skip"] if options.last_resort != "skip" else []
        else:
            steps = [*smaller, "a higher MODEL.BACKBONE.FREEZE_AT: its weights need no gradients"]
        limited = options.budget_gb is not None
        steps.append("a larger MEMFIT.BUDGET_GB" if limited else "no other process on the device")
        steps.append("a smaller backbone")
        tries = "; ".join(f"({i}) {step}" for i, step in enumerate(steps[:3], 1))
        return f"{event}. Next things to try: {tries}. More: {START_HERE}"


@contextmanager
def observed(observers: Sequence[Callable[[], None]]) -> Iterator[None]:
    """While open, call the observers when memory runs out, before anything is freed."""
    try:
        yield
    except Exception as e:
        for observe in observers if is_out_of_memory(e) else ():
            try:
                observe()
            except Exception as failed:  # the run may still continue
                logger.warning("The memory at this error could not be recorded: %s", failed)
        raise


def padded_size(data: Any, model: nn.Module) -> Optional[tuple[int, int]]:
    """Height and width, in pixels, to which the model pads a micro-batch's images."""
    height, width = size_of(data)
    if not height:
        return None
    divisors, squares = [1], [0]
    for module in model.modules():
        constraints = getattr(module, "padding_constraints", None) or {}
        divisors.append(getattr(module, "size_divisibility", 0))
        squares.append(constraints.get("square_size", 0))
    square, d = max(squares), max(divisors)
    return (square, square) if square else (-(-height // d) * d, -(-width // d) * d)


def _describe(image: dict[str, Any]) -> dict[str, Any]:
    height, width = image["image"].shape[-2:]
    return {
        "file_name": image.get("file_name"),
        "image_id": image.get("image_id"),
        "height": height,
        "width": width,
        "num_instances": count_objects(image) if "instances" in image else None,
    }


def _plain(value: Any) -> Any:
    """A value that JSON can hold, from an image_id of any type."""
    return value.item() if hasattr(value, "item") else str(value)
