"""Activation checkpointing: what a block computes is computed again in the backward, not kept."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from torch import nn
from torch.nn.modules.conv import _ConvNd
from torch.utils.checkpoint import checkpoint

__all__ = ["checkpointed"]


@contextmanager
def checkpointed(model: nn.Module) -> Iterator[None]:
    """While open, the parts of the model that can be checkpointed keep only their inputs.

    Keep it open for a forward and its backward.

    These are its blocks: modules with parameters whose own parts are single layers, such as a
    residual block, an attention, the head of the proposal network, a box or mask head. And its
    stages: sequences of blocks. Each forward is run up to three times, and what is kept is one
    input per stage, and within the stage that is in its backward one per block. Gradients are the
    same; to the last bit in float32, where the layers are deterministic.

    The backward runs forwards again, and with them what these change: running statistics, logged
    scalars. The caller puts that back (see :class:`d2_memfit.engine.snapshot.Snapshot`).
    """
    parts = [m for m in model.modules() if m is not model and (_is_block(m) or _is_stage(m))]
    originals = [vars(part).get("forward") for part in parts]
    for part in parts:
        part.forward = partial(checkpoint, part.forward, use_reentrant=False)
    try:
        yield
    finally:
        for part, original in zip(parts, originals):
            if original is None:
                del part.forward
            else:
                part.forward = original


def _is_stage(module: nn.Module) -> bool:
    blocks = list(module.children())
    return isinstance(module, nn.Sequential) and blocks and all(map(_is_block, blocks))


def _is_block(module: nn.Module) -> bool:
    layers = list(module.children())
    has_parameters = any(True for _ in module.parameters())
    return not _is_layer(module) and has_parameters and all(map(_is_layer, layers))


def _is_layer(module: nn.Module) -> bool:
    """Detectron2's convolutions have their normalisation inside."""
    return isinstance(module, _ConvNd) or not any(True for _ in module.children())
