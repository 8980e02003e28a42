# Copyright (c) the d2_memfit developers.
"""Each rank's report of its window, and what all ranks conclude from the reports."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Optional

import torch
from detectron2.utils import comm
from detectron2.utils.events import get_event_storage

from .. import compat
from ..common.rank_table import rank_table
from ..errors import one_line
from .attempts import RecoveryReport
from .window import MicroBatch, Window, image_names

__all__ = ["RankReport", "Vote", "check_finite", "mean_losses", "write_metrics"]


@dataclass
class RankReport:
    """One rank's report of its window."""

    num_images: int = 0
    loss_sums: dict[str, float] = field(default_factory=dict)  # each loss, summed over images
    data_time: float = 0.0  # seconds
    # One line for each micro-batch with a loss of infinity or NaN.
    not_finite: list[str] = field(default_factory=list)
    # Of each parameter, in the model's order, if gradients are reduced after the backward.
    has_gradient: list[bool] = field(default_factory=list)
    recovery: Optional[RecoveryReport] = None
    error: str = ""  # for which all ranks end: memory ran out for good
    has_new_losses: bool = False  # since the check of losses
    refused: str = ""  # for which all ranks end: the config cannot train this model
    stop_signal: int = 0  # the signal that asked this rank to end the run
    run_state: Any = None  # for a checkpoint of the first rank, see StatesOfRanks

    def add(
        self,
        window: Window,
        parameters: Iterable[torch.Tensor],
        likely_cause: Callable[[MicroBatch], str],
    ) -> None:
        """Sum a window's losses after its last backward. This waits for the device.

        Args:
            parameters: those of the model, if other ranks need to know which have gradients.
            likely_cause: the text for a micro-batch whose losses are not finite. An error in it
                becomes part of the text, and goes no further.
        """
        self.num_images = window.num_images
        self.data_time = window.data_time
        self.has_gradient = [p.grad is not None for p in parameters]
        for m in window.micro_batches:
            losses = {name: loss.item() for name, loss in m.losses.items()}
            for name, loss in losses.items():
                self.loss_sums[name] = self.loss_sums.get(name, 0.0) + m.num_images * loss
            if not math.isfinite(sum(losses.values())):
                self.not_finite.append(_not_finite(m, losses, likely_cause))

    def numbers(self) -> list[float]:
        """The part that differs in each iteration, as numbers."""
        counted = [] if self.recovery is None else vars(self.recovery).values()
        return [
            *(self.num_images, self.data_time, self.stop_signal),
            *self.loss_sums.values(),
            *counted,
        ]

    def with_numbers(self, numbers: Sequence[float]) -> "RankReport":
        """This report with other :meth:`numbers`."""
        sums, counted = numbers[3:][: len(self.loss_sums)], numbers[3 + len(self.loss_sums) :]
        return replace(
            self,
            num_images=int(numbers[0]),
            data_time=numbers[1],
            stop_signal=int(numbers[2]),
            loss_sums=dict(zip(self.loss_sums, sums)),
            recovery=self.recovery and RecoveryReport(*map(int, counted)),
        )


class Vote:
    """The exchange of reports between ranks, which all take part in.

    Ranks exchange one small tensor, if only numbers have changed since the last pickled reports. If
    a report has more, such as an error, all ranks see that in the tensor, and exchange pickled
    reports.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._known: list[RankReport] = []  # the last pickled ones, of all ranks

    def all_gather(self, mine: RankReport) -> list[RankReport]:
        """The reports of all ranks."""
        ranks, rank = comm.get_world_size(), comm.get_rank()
        if ranks == 1:
            return [mine]
        width = 1 + max((len(r.numbers()) for r in self._known), default=0)
        numbers = mine.numbers()
        known = self._known[rank] if len(self._known) == ranks else RankReport()
        has_same = list(known.loss_sums) == list(mine.loss_sums) and len(numbers) < width
        is_usual = has_same and known.with_numbers(numbers) == mine
        row = [float(not is_usual), *(numbers if is_usual else ())]
        table = rank_table([*row, *[0.0] * (width - len(row))], self._device)
        has_more, *columns = zip(*table)
        if any(has_more):
            self._known = comm.all_gather(mine)
            return self._known
        return [r.with_numbers(row) for r, row in zip(self._known, zip(*columns))]


def check_finite(reports: Sequence[RankReport], iteration: int) -> None:
    """Raise FloatingPointError, on every rank, if any rank had a loss of infinity or NaN.

    Args:
        reports: those of all ranks, in rank order.
        iteration: used in the message.
    """
    lines = [f"rank {rank}: {line}" for rank, r in enumerate(reports) for line in r.not_finite]
    if lines:
        raise FloatingPointError(
            f"Loss became infinite or NaN at iteration={iteration}! {'; '.join(lines)}"
        )


def write_metrics(reports: Sequence[RankReport]) -> None:
    """Write what ``SimpleTrainer`` writes, once per iteration, as means over all images.

    ``data_time`` is that of the slowest rank. ``effective_batch`` is the number of images.
    """
    storage = get_event_storage()
    compat.put_rank_data_time(reports[comm.get_rank()].data_time)
    if not comm.is_main_process():
        return
    losses = mean_losses(reports)
    storage.put_scalar("data_time", max(r.data_time for r in reports))
    storage.put_scalar("total_loss", sum(losses.values()))
    if len(losses) > 1:
        storage.put_scalars(**losses)
    num_images = sum(r.num_images for r in reports)
    storage.put_scalar("effective_batch", num_images, smoothing_hint=False)


def mean_losses(reports: Sequence[RankReport]) -> dict[str, float]:
    """The mean of each loss over the images of all ranks."""
    num_images = sum(r.num_images for r in reports)
    names = dict.fromkeys(name for r in reports for name in r.loss_sums)
    return {k: sum(r.loss_sums.get(k, 0.0) for r in reports) / num_images for k in names}


def _not_finite(
    micro_batch: MicroBatch,
    losses: Mapping[str, float],
    likely_cause: Callable[[MicroBatch], str],
) -> str:
    bad = ", ".join(f"{k} {v:g}" for k, v in losses.items() if not math.isfinite(v))
    try:
        cause = f"Likely {likely_cause(micro_batch)}"
    except Exception as e:  # the other ranks wait in the vote
        cause = f"Cause not known: the search for it failed, {type(e).__name__}: {one_line(e)}"
    return f"{bad} on the images {image_names(micro_batch.data)}. {cause}"
