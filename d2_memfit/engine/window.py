"""A window, one rank's share of the effective batch: how it is cut, weighted and reported."""

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Optional

import torch
from detectron2.utils import comm
from detectron2.utils.events import get_event_storage
from torch import nn

from .. import compat
from ..errors import ConfigError, DataError

__all__ = ["MicroBatch", "Report", "Window", "check_finite", "load_window", "write_metrics"]


@dataclass
class MicroBatch:
    """What goes through the model in one forward and backward."""

    data: Any
    losses: dict[str, torch.Tensor] = field(default_factory=dict)  # detached, set by the trainer

    @property
    def num_images(self) -> int:
        """Length of a list of dataset dicts or of a tensor. Data of other kinds counts as one."""
        return len(self.data) if isinstance(self.data, (list, tuple, torch.Tensor)) else 1


@dataclass
class Report:
    """What the ranks tell each other about their windows. A few numbers; it is pickled."""

    num_images: int
    loss_sums: dict[str, float]  # each loss, summed over images
    data_time: float  # seconds
    not_finite: list[str]  # one line for each micro-batch with a loss of infinity or NaN
    has_gradient: list[bool]  # for each parameter, in the model's order


@dataclass
class Window:
    """The micro-batches of one iteration."""

    micro_batches: list[MicroBatch]
    data_time: float  # seconds spent on waiting for the data loader

    @property
    def num_images(self) -> int:
        return sum(m.num_images for m in self.micro_batches)

    def report(self, model: nn.Module) -> Report:
        """Sum up the losses, after the last backward. The only place that waits for the device."""
        sums: dict[str, float] = {}
        not_finite = []
        for m in self.micro_batches:
            losses = {name: loss.item() for name, loss in m.losses.items()}
            for name, loss in losses.items():
                sums[name] = sums.get(name, 0.0) + m.num_images * loss
            if not math.isfinite(sum(losses.values())):
                not_finite.append(f"losses {losses} on the images {_image_names(m.data)}")
        has_gradient = [p.grad is not None for p in model.parameters()]
        return Report(self.num_images, sums, self.data_time, not_finite, has_gradient)


def load_window(
    batches: Iterator[Any], accumulation_steps: int, images_per_micro_batch: Optional[int] = None
) -> Window:
    """Take ``accumulation_steps`` batches from the loader.

    Args:
        batches: the loader's iterator.
        accumulation_steps: how many of its batches make a window.
        images_per_micro_batch: where to cut the window's images, whatever the loader's batches; the
            last micro-batch may have fewer. None keeps the loader's batches as micro-batches.

    Raises:
        DataError: the loader ended within the window.
        ConfigError: the loader's batches are not lists, so that they cannot be cut.
    """
    loaded: list[Any] = []
    start = time.perf_counter()
    while len(loaded) < accumulation_steps:
        try:
            loaded.append(next(batches))
        except StopIteration:
            raise DataError(
                f"the data loader ended after {len(loaded)} of the {accumulation_steps} batches "
                "that an iteration takes. Train with an endless loader, such as "
                "build_detection_train_loader makes, or lower SOLVER.MAX_ITER or "
                "SOLVER.ACCUMULATION_STEPS"
            ) from None
    data_time = time.perf_counter() - start

    if images_per_micro_batch is not None:
        if not all(isinstance(batch, list) for batch in loaded):
            raise ConfigError(
                f"MEMFIT.MICRO_BATCH {images_per_micro_batch} needs a data loader that gives lists "
                f"of dataset dicts, and this one gives {type(loaded[0]).__name__}"
            )
        images = [image for batch in loaded for image in batch]
        cuts = range(0, len(images), images_per_micro_batch)
        loaded = [images[i : i + images_per_micro_batch] for i in cuts]
    return Window([MicroBatch(data) for data in loaded], data_time)


def check_finite(reports: Sequence[Report], iteration: int) -> None:
    """Raise FloatingPointError, on every rank, if any rank had a loss of infinity or NaN.

    Args:
        reports: of all ranks, in their order.
        iteration: for the message.
    """
    lines = [f"rank {rank}: {line}" for rank, r in enumerate(reports) for line in r.not_finite]
    if lines:
        raise FloatingPointError(
            f"Loss became infinite or NaN at iteration={iteration}!\n"
            + "\n".join(lines)
            + "\nLook at the annotations of these images; or lower SOLVER.BASE_LR, lengthen "
            "SOLVER.WARMUP_ITERS, or set SOLVER.CLIP_GRADIENTS.ENABLED True"
        )


def write_metrics(reports: Sequence[Report]) -> None:
    """Write what ``SimpleTrainer`` writes, once per iteration, with means over all images.

    ``data_time`` is that of the slowest rank. ``effective_batch`` is the number of images.
    """
    storage = get_event_storage()
    compat.put_rank_data_time(reports[comm.get_rank()].data_time)
    if not comm.is_main_process():
        return
    num_images = sum(r.num_images for r in reports)
    names = dict.fromkeys(name for r in reports for name in r.loss_sums)
    losses = {k: sum(r.loss_sums.get(k, 0.0) for r in reports) / num_images for k in names}
    storage.put_scalar("data_time", max(r.data_time for r in reports))
    storage.put_scalar("total_loss", sum(losses.values()))
    if len(losses) > 1:
        storage.put_scalars(**losses)
    storage.put_scalar("effective_batch", num_images, smoothing_hint=False)


def _image_names(data: Any) -> str:
    if not isinstance(data, (list, tuple)) or not all(isinstance(image, dict) for image in data):
        return f"of a {type(data).__name__} (without names)"
    return ", ".join(
        f"{image.get('file_name', 'without file_name')} (image_id {image.get('image_id')})"
        for image in data
    )
