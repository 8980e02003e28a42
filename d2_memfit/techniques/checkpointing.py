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
    """While open, each block of the model keeps only its inputs for the backward.

    A block is a module with parameters whose parts are single layers: a residual block, a block's
    attention, the head of the proposal network, a box or mask head. The gradients are the same, to
    the last bit where the layers are deterministic.

    The backward runs the blocks' forwards again, and with them what these change: running
    statistics, logged scalars. The caller puts that back (see
    :class:`d2_memfit.engine.snapshot.Snapshot`).
    """
    blocks = [m for m in model.modules() if m is not model and _is_block(m)]
    originals = [vars(block).get("forward") for block in blocks]
    for block in blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    try:
        yield
    finally:
        for block, original in zip(blocks, originals):
            if original is None:
                del block.forward
            else:
                block.forward = original


def _is_block(module: nn.Module) -> bool:
    layers = list(module.children())
    return (
        not _is_layer(module)
        and all(_is_layer(layer) for layer in layers)
        and any(True for _ in module.parameters())
    )


def _is_layer(module: nn.Module) -> bool:
    """Detectron2's convolutions have their normalisation inside."""
    return isinstance(module, _ConvNd) or not any(True for _ in module.children())
