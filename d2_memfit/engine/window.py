"""A window, one rank's share of an iteration: taken from the loader, cut, weighted, reported."""

import math
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Optional

import torch
from detectron2.utils import comm
from detectron2.utils.events import get_event_storage

from .. import compat
from ..errors import ConfigError, DataError

__all__ = ["MicroBatch", "Report", "Window", "check_finite", "write_metrics"]


@dataclass
class MicroBatch:
    """What goes through the model in one forward and backward."""

    data: Any
    losses: dict[str, torch.Tensor] = field(default_factory=dict)  # detached, set by the trainer

    @property
    def num_images(self) -> int:
        return _num_images(self.data)


@dataclass
class Report:
    """What the ranks tell each other about their windows. It is pickled, and small."""

    num_images: int
    loss_sums: dict[str, float]  # each loss, summed over images
    data_time: float  # seconds
    not_finite: list[str]  # one line for each micro-batch with a loss of infinity or NaN
    has_gradient: list[bool]  # for each parameter that is asked for, in the model's order


class Window:
    """The micro-batches of one iteration. They are taken from the loader while iterating.

    Taking them one by one, and not all at once, lets the loader's workers prepare the next batch
    while the model computes.

    Args:
        batches: the loader's iterator.
        accumulation_steps: how many of its batches make a window.
        images_per_micro_batch: where to cut the stream of images, whatever the loader's batches;
            the last micro-batch may have fewer. None keeps the loader's batches.

    Attributes:
        micro_batches: those taken so far.
        data_time: seconds spent on waiting for the loader so far.
        expected_images: ``accumulation_steps`` times the images of the first batch, known as soon
            as that was taken. With batches of one size it is their number of images.
    """

    def __init__(
        self,
        batches: Iterator[Any],
        accumulation_steps: int,
        images_per_micro_batch: Optional[int] = None,
    ) -> None:
        self.micro_batches: list[MicroBatch] = []
        self.data_time = 0.0
        self.expected_images = 0
        self._batches = batches
        self._accumulation_steps = accumulation_steps
        self._images_per_micro_batch = images_per_micro_batch

    def __iter__(self) -> Iterator[MicroBatch]:
        """
        Raises:
            DataError: the loader ended within the window.
            ConfigError: its batches are not lists of dataset dicts, so they cannot be cut.
        """
        size = self._images_per_micro_batch
        uncut: list[Any] = []
        for step in range(self._accumulation_steps):
            batch = self._take_batch(step)
            if size is None:
                yield self._add(batch)
                continue
            if not _is_list_of_images(batch):
                raise ConfigError(
                    f"MEMFIT.MICRO_BATCH {size} needs a data loader that gives lists of dataset "
                    f"dicts, and this one gives a {type(batch).__name__}"
                )
            uncut += batch
            while len(uncut) >= size:
                yield self._add(uncut[:size])
                del uncut[:size]
        if uncut:
            yield self._add(uncut)

    @property
    def num_images(self) -> int:
        """Images taken so far."""
        return sum(m.num_images for m in self.micro_batches)

    def report(self, parameters: Iterable[torch.Tensor] = ()) -> Report:
        """Sum up the losses after the last backward. This waits for the device."""
        sums: dict[str, float] = {}
        not_finite = []
        for m in self.micro_batches:
            losses = {name: loss.item() for name, loss in m.losses.items()}
            for name, loss in losses.items():
                sums[name] = sums.get(name, 0.0) + m.num_images * loss
            if not math.isfinite(sum(losses.values())):
                not_finite.append(f"losses {losses} on the images {_image_names(m.data)}")
        has_gradient = [p.grad is not None for p in parameters]
        return Report(self.num_images, sums, self.data_time, not_finite, has_gradient)

    def _take_batch(self, step: int) -> Any:
        start = time.perf_counter()
        try:
            batch = next(self._batches)
        except StopIteration:
            raise DataError(
                f"the data loader ended after {step} of the {self._accumulation_steps} batches "
                "that an iteration takes. Train with an endless loader, such as "
                "build_detection_train_loader makes, or lower SOLVER.MAX_ITER or "
                "SOLVER.ACCUMULATION_STEPS"
            ) from None
        self.data_time += time.perf_counter() - start
        if step == 0:
            self.expected_images = self._accumulation_steps * _num_images(batch)
        return batch

    def _add(self, data: Any) -> MicroBatch:
        self.micro_batches.append(MicroBatch(data))
        return self.micro_batches[-1]


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
    """Write what ``SimpleTrainer`` writes, once per iteration, as means over all images.

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


def _is_list_of_images(data: Any) -> bool:
    return isinstance(data, list) and all(isinstance(image, dict) for image in data)


def _num_images(data: Any) -> int:
    """Length of a list of dataset dicts or of a tensor. Data of any other kind counts as one."""
    return len(data) if _is_list_of_images(data) or isinstance(data, torch.Tensor) else 1


def _image_names(data: Any) -> str:
    if not _is_list_of_images(data):
        return f"of a {type(data).__name__}, which has no names"
    return ", ".join(
        f"{image.get('file_name', 'without file_name')} (image_id {image.get('image_id')})"
        for image in data
    )
