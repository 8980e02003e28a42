# Copyright (c) the d2_memfit developers.
"""Each rank's report of its window, and what all ranks conclude from the reports."""

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Optional

import torch
from detectron2.utils import comm
from detectron2.utils.events import get_event_storage

from .. import compat
from ..errors import ConfigError, OutOfMemoryError
from .normalizers import CountReport
from .recovery import RecoveryReport
from .window import MicroBatch, Window, image_names

__all__ = ["Report", "check_finite", "check_writing", "report", "write_metrics"]


@dataclass
class Report:
    """One rank's report of its window. It is pickled, and small."""

    num_images: int
    loss_sums: dict[str, float]  # each loss, summed over images
    data_time: float  # seconds
    not_finite: list[str]  # one line for each micro-batch with a loss of infinity or NaN
    has_gradient: list[bool]  # for each given parameter, in the model's order
    recovery: Optional[RecoveryReport] = None
    counts: CountReport = field(default_factory=CountReport)
    stop_signal: int = 0  # the signal that asked this rank to end the run
    run_state: bytes = b""  # a packed RunState, on several ranks


def report(
    window: Window,
    parameters: Iterable[torch.Tensor] = (),
    recovery: Optional[RecoveryReport] = None,
    counts: Callable[[], CountReport] = CountReport,
    explained: Optional[AbstractContextManager[None]] = None,
    cause: Callable[[MicroBatch], str] = lambda _: "unknown",
) -> Report:
    """Sum a window's losses after its last backward. This waits for the device.

    ``cause`` says what is likely if the losses of a micro-batch are not finite.

    If memory runs out here, under ``explained``, the report holds only that error.
    """
    try:
        with explained or nullcontext():
            return _report(window, parameters, recovery, counts(), cause)
    except OutOfMemoryError as e:
        return Report(0, {}, 0.0, [], [], RecoveryReport(final_error=str(e)))


def _report(
    window: Window,
    parameters: Iterable[torch.Tensor],
    recovery: Optional[RecoveryReport],
    counts: CountReport,
    cause: Callable[[MicroBatch], str],
) -> Report:
    sums: dict[str, float] = {}
    not_finite = []
    for m in window.micro_batches:
        losses = {name: loss.item() for name, loss in m.losses.items()}
        for name, loss in losses.items():
            sums[name] = sums.get(name, 0.0) + m.num_images * loss
        if not math.isfinite(sum(losses.values())):
            bad = ", ".join(f"{k} {v:g}" for k, v in losses.items() if not math.isfinite(v))
            not_finite.append(f"{bad} on the images {image_names(m.data)}. Likely {cause(m)}")
    has_gradient = [p.grad is not None for p in parameters]
    return Report(
        window.num_images,
        sums,
        window.data_time,
        not_finite,
        has_gradient,
        recovery,
        counts,
    )


def check_finite(reports: Sequence[Report], iteration: int) -> None:
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


def check_writing(in_the_background: bool) -> None:
    """Raise :class:`ConfigError` if losses are to be checked after the step."""
    if in_the_background:
        raise ConfigError(
            "async_write_metrics=True cannot be used: all ranks look at the losses before the "
            "step, so that one that is not finite changes nothing. Leave it False"
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
