# Copyright (c) the d2_memfit developers.
"""Descriptions of out-of-memory errors, for the log, the final error and a file."""

import json
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from detectron2.utils import comm
from detectron2.utils.file_io import PathManager
from torch import nn

from ..common import GB, compat
from ..common.errors import START_HERE, OutOfMemoryError
from ..config.settings import RecoveryOptions
from ..memory import device_memory, error_line, is_out_of_memory
from .window import count_images, count_objects, dataset_dicts

logger = logging.getLogger(__name__)

RAISE = "training stops"
_IMAGE = "{file_name} (image_id {image_id}, {height} x {width} pixels, {num_instances} instances)"


class OomEvent(dict[str, Any]):
    """One out-of-memory error, as in the file. Sizes are in pixels, memory is in GB (2^30 bytes).

    The phase is start, window, forward, backward, restoration, vote, reduction, optimizer or
    evaluation. ``action`` is what was done about it.
    """

    def __str__(self) -> str:
        names = ", ".join(_IMAGE.format(**image) for image in self["images"])
        budget_gb = self["budget_gb"]
        budget = "no budget" if budget_gb is None else f"a budget of {budget_gb:g} GB"
        text = (
            "Out of memory in the {phase} of iteration {iteration} on rank {rank}, with a "
            "micro-batch of {micro_batch}: {names}. {allocated_gb:.2f} GB allocated, "
            "{reserved_gb:.2f} GB reserved, {budget}. The error was: {error}"
        )
        return text.format(**self, names=names or "no images", budget=budget)


@dataclass
class OomLog:
    """Describes out-of-memory errors, for the log, the final error and ``memfit_oom.jsonl``.

    The file has one JSON object per line. Each is one write, so the file can be parsed whenever
    the process ends, and several ranks can share it.

    Args:
        options: its ``output_dir`` is the file's folder; "" for no file.
        model: without DDP around it.
        mixed_precision: whether it is on, for the advice in the final error.
    """

    options: RecoveryOptions
    model: nn.Module
    mixed_precision: bool = False

    def event(self, error: BaseException, phase: str, data: Any) -> OomEvent:
        """The event of an error in a micro-batch (``data``), while it is handled.

        It holds no reference to the error, whose traceback would keep tensors alive.
        """
        memory = device_memory(next(self.model.parameters()).device)
        images = [d for d in dataset_dicts(data) if isinstance(d.get("image"), torch.Tensor)]
        return OomEvent(
            iteration=compat.current_iteration(),
            phase=phase,
            micro_batch=count_images(data),
            images=[
                {
                    "file_name": image.get("file_name"),
                    "image_id": image.get("image_id"),
                    "height": image["image"].shape[-2],
                    "width": image["image"].shape[-1],
                    "num_instances": count_objects(image) if "instances" in image else None,
                }
                for image in images
            ],
            allocated_gb=round(memory.allocated_bytes / GB, 3),
            reserved_gb=round(memory.reserved_bytes / GB, 3),
            budget_gb=self.options.budget_gb,
            error=error_line(error),
            rank=comm.get_rank(),
            time=time.time(),
        )

    def log(self, event: OomEvent, action: str, warn: bool = True) -> None:
        """Write an event to the file and to the log, with what is done about it.

        Args:
            warn: False if the final error says it.
        """
        event["action"] = action
        if warn:
            logger.warning("%s. Now %s", event, action)
        if not self.options.output_dir:
            return
        path = os.path.join(self.options.output_dir, "memfit_oom.jsonl")
        line = json.dumps(event, default=lambda v: v.item() if hasattr(v, "item") else str(v))
        try:
            PathManager.mkdirs(self.options.output_dir)
            with PathManager.open(path, "a") as f:
                f.write(f"{line}\n")
        except (OSError, MemoryError) as e:  # a full disk must not end a run that just recovered
            logger.warning("Cannot write %s (%s). The event was %s", path, e, line)

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
            self.log(event, RAISE, warn=False)
            raise OutOfMemoryError(self.final_message(event)) from e

    def final_message(self, event: OomEvent) -> str:
        """Message of the error that ends a run: what happened, and three things to try next."""
        last_resorts = {"raise": ["resize", "skip"], "resize": ["skip"], "skip": []}
        steps = ["a smaller MEMFIT.MICRO_BATCH"] if event["micro_batch"] != 1 else []
        if event["phase"] == "evaluation":
            steps = ["a smaller INPUT.MAX_SIZE_TEST", "a smaller TEST.DETECTIONS_PER_IMAGE"]
        elif event["phase"] in ("forward", "backward"):
            steps += [] if self.mixed_precision else ["SOLVER.AMP.ENABLED True"]
            steps += ["a smaller INPUT.MAX_SIZE_TRAIN"]
            steps += [f"MEMFIT.OOM.LAST_RESORT {v}" for v in last_resorts[self.options.last_resort]]
        else:
            steps += ["a higher MODEL.BACKBONE.FREEZE_AT: its weights need no gradients"]
        is_limited = self.options.budget_gb is not None
        steps.append(
            "a larger MEMFIT.BUDGET_GB" if is_limited else "no other process on the device"
        )
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
