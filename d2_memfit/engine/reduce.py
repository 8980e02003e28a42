# Copyright (c) the d2_memfit developers.
"""Gradient reduction over ranks: the mean over all images, for any number on each rank."""

import logging
from collections.abc import Iterable, Iterator, Sequence
from typing import Union

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ..common.units import MB
from ..compat.pytorch import has_communication_hooks
from ..errors import ConfigError
from .rank_report import RankReport
from .window import Window

__all__ = ["average_gradients", "check_ddp", "image_share"]

logger = logging.getLogger(__name__)

# DistributedDataParallel's default: little memory, and large enough for a network's speed.
_BUCKET_BYTES = 25 * MB


def image_share(num_images: int, model: nn.Module) -> Union[float, torch.Tensor]:
    """Factor for a loss that makes DDP's mean over ranks the mean over images.

    It is exactly 1 without DDP, and if all ranks have the same number of images. With DDP it is a
    tensor on the model's device, so that nothing waits for the GPU.
    """
    if not isinstance(model, DistributedDataParallel):
        return 1.0
    total = torch.tensor(float(num_images), device=next(model.parameters()).device)
    dist.all_reduce(total, group=model.process_group)
    return num_images * dist.get_world_size(model.process_group) / total


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
        if window.num_images != window.expected_images:
            for p in model.parameters():
                if p.grad is not None:
                    p.grad.mul_(window.expected_images / window.num_images)
        return
    scale = window.expected_images / sum(r.num_images for r in reports)
    on_any_rank = [any(has) for has in zip(*(r.has_gradient for r in reports))]
    for bucket in _buckets(p for p, has in zip(model.parameters(), on_any_rank) if has):
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
        raise ConfigError(
            "DistributedDataParallel(static_graph=True) cannot accumulate gradients: set "
            "static_graph False, or SOLVER.ACCUMULATION_STEPS 1"
        )
    if recovers and model.broadcast_buffers and any(True for _ in model.buffers()):
        raise ConfigError(
            "DistributedDataParallel(broadcast_buffers=True) communicates in a forward, which one "
            "rank cannot run again alone: set broadcast_buffers False, as Detectron2 does, or "
            "MEMFIT.OOM.POLICY raise"
        )
    if has_communication_hooks(model):
        logger.warning(
            "The communication hooks of DistributedDataParallel (such as fp16_compression) are not "
            "used: with accumulation, gradients are reduced once per iteration in their own type"
        )


def _buckets(parameters: Iterable[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Consecutive parameters of one dtype and device, about ``_BUCKET_BYTES`` per bucket."""
    bucket: list[nn.Parameter] = []
    size = 0
    for p in parameters:
        kind_changes = bucket and (p.dtype, p.device) != (bucket[0].dtype, bucket[0].device)
        if kind_changes or size >= _BUCKET_BYTES:
            yield bucket
            bucket = []
            size = 0
        bucket.append(p)
        size += p.numel() * p.element_size()
    if bucket:
        yield bucket
