# Copyright (c) the d2_memfit developers.
"""What ranks tell each other after a window, and the one reduction of their gradients."""

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Optional

import torch
import torch.distributed as dist
from detectron2.layers import FrozenBatchNorm2d
from detectron2.utils import comm
from detectron2.utils.events import get_event_storage
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ..common import MB, compat
from ..common.compat import has_communication_hooks, take_tensors
from ..common.errors import ConfigError, MemfitError
from .retry import RecoveryReport
from .window import MicroBatch, Window, image_names

logger = logging.getLogger(__name__)

# DistributedDataParallel's default: little memory, and large enough for a network's speed.
_BUCKET_BYTES = 25 * MB


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
    error: Optional[MemfitError] = None  # for which all ranks end
    stop_signal: int = 0  # the signal that asked this rank to end the run

    def add(self, window: Window, model: nn.Module) -> None:
        """Sum a window's losses after its last backward. This waits for the device."""
        self.num_images = window.num_images
        self.data_time = window.data_time
        for m in window.micro_batches:
            losses = [x.float().sum() for x in m.losses.values()]
            values = dict(zip(m.losses, torch.stack(losses).tolist() if losses else ()))
            for name, loss in values.items():
                self.loss_sums[name] = self.loss_sums.get(name, 0.0) + m.num_images * loss
            if not math.isfinite(sum(values.values())):
                self.not_finite.append(_described(values, m, model))


def _described(losses: dict[str, float], micro_batch: MicroBatch, model: nn.Module) -> str:
    """The losses that are not finite, their images, and a cause that can be seen."""
    bad = ", ".join(f"{name} {v:g}" for name, v in losses.items() if not math.isfinite(v))
    norms = [m for m in model.modules() if isinstance(m, FrozenBatchNorm2d)]
    if not all(p.isfinite().all() for p in model.parameters()):
        cause = "The weights are not finite: lower SOLVER.BASE_LR"
    # Caffe2's have no statistics, but a bias.
    elif norms and not any(bool(n.running_mean.any() or n.bias.any()) for n in norms):
        cause = (
            "Frozen batch norm does not normalise the activations of random weights: name "
            "MODEL.WEIGHTS, or set MODEL.RESNETS.NORM GN and MODEL.BACKBONE.FREEZE_AT 0"
        )
    else:
        cause = (
            "The weights are finite. Try SOLVER.AMP.ENABLED False or MEMFIT.AMP_DTYPE bfloat16; "
            "then look at these images and their annotations; then lower SOLVER.BASE_LR"
        )
    return f"{bad} on the images {image_names(micro_batch.data)}. {cause}"


def check_finite(reports: Sequence[RankReport], iteration: int) -> None:
    """Raise FloatingPointError, on every rank, if any rank had a loss of infinity or NaN."""
    lines = [f"rank {rank}: {line}" for rank, r in enumerate(reports) for line in r.not_finite]
    if lines:
        text = f"Loss became infinite or NaN at iteration={iteration}!"
        raise FloatingPointError(f"{text} {'; '.join(lines)}")


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


def average_gradients(model: nn.Module, window: Window, reports: Sequence[RankReport]) -> None:
    """Make the window's gradients the mean over all its images, with DDP over all ranks' images.

    A rank without a gradient for a parameter contributes zeros. A parameter without a gradient on
    any rank keeps none, so that the optimizer skips it, as on one rank.

    Args:
        model: its gradients are sums over images, divided by ``window.expected_images``. If it is
            wrapped in DDP, they were accumulated under ``no_sync``.
        window: this rank's window.
        reports: those of all ranks, about the model's parameters.
    """
    if not isinstance(model, DistributedDataParallel):
        scale = window.expected_images / window.num_images
        for p in model.parameters() if scale != 1 else ():
            if p.grad is not None:
                p.grad.mul_(scale)
        return
    scale = window.expected_images / sum(r.num_images for r in reports)
    on_any_rank = [any(has) for has in zip(*(r.has_gradient for r in reports))]
    reduced = [p for p, has in zip(model.parameters(), on_any_rank) if has]
    for bucket in take_tensors(reduced, _BUCKET_BYTES):
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in bucket]
        flat = torch.cat([g.reshape(-1) for g in gradients]).mul_(scale)
        dist.all_reduce(flat, group=model.process_group)
        for p, gradient, mean in zip(bucket, gradients, flat.split([g.numel() for g in gradients])):
            p.grad = gradient.copy_(mean.view_as(gradient))


def check_ddp(model: DistributedDataParallel, recovers: bool) -> None:
    """Reject or warn of DDP options that need DDP's own reduction of gradients.

    Args:
        recovers: whether a rank may run images again alone.

    Raises:
        ConfigError: the model cannot be trained with these options.
    """
    if model.static_graph:
        text = "DistributedDataParallel(static_graph=True) cannot accumulate gradients: set it"
        raise ConfigError(f"{text} False, or SOLVER.ACCUMULATION_STEPS 1")
    if recovers and model.broadcast_buffers and any(True for _ in model.buffers()):
        raise ConfigError(
            "DistributedDataParallel(broadcast_buffers=True) communicates in a forward: set it "
            "False, as Detectron2 does, or MEMFIT.OOM.POLICY raise"
        )
    if has_communication_hooks(model):
        text = "The communication hooks of DistributedDataParallel, such as fp16_compression, are"
        logger.warning("%s not used: gradients are reduced once per iteration", text)
