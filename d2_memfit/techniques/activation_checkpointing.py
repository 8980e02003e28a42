# Copyright (c) the d2_memfit developers.
"""Activation checkpointing: activations are recomputed in the backward, and not kept."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from detectron2.config import CfgNode
from detectron2.modeling import Backbone
from torch import nn

from ..errors import ConfigError
from .registry import TECHNIQUES, ModulesTechnique
from .support import add_mixin, find_blocks, find_modules, recompute_in_backward

__all__ = ["ActivationCheckpointing", "blocks_of", "checkpointed"]

_READY_MADE = ("backbone", "all", "backbone+heads")


@TECHNIQUES.register()
class ActivationCheckpointing(ModulesTechnique):
    """Makes modules keep only their inputs for the backward, which recomputes the rest.

    Saves the activations within these modules. Costs a second forward of them, a quarter to a third
    of their time.

    Source: Chen et al., "Training Deep Nets with Sublinear Memory Cost", arXiv:1604.06174;
    PyTorch's ``torch.utils.checkpoint`` without reentrance, which works with frozen inputs, outputs
    of any kind, unused parameters, mixed precision and DDP.
    """

    tier = "exact"
    part = "model"
    order = 1  # recomputation must include what other techniques do in a forward
    # The modules that keep only their inputs for the backward. Give patterns of their names,
    # such as "backbone.bottom_up.res4.*" or "transformer.encoder.layers.*", or one of two
    # ready-made choices. "backbone" is the blocks of the backbone. "all" is every block of the
    # model: residual stages, encoder and decoder layers, necks, heads. "backbone+heads" is
    # another name of "all". [] is none.
    key = "MEMFIT.CHECKPOINT.MODULES"

    @classmethod
    def enabling_settings(cls, cfg: CfgNode) -> dict[str, Any]:
        return {"MEMFIT.CHECKPOINT.MODULES": ["all"]}

    @classmethod
    def apply(cls, model: nn.Module, cfg: CfgNode) -> nn.Module:
        patterns = _patterns(model, cfg.MEMFIT.CHECKPOINT.MODULES)
        for module in find_modules(model, cls.key, patterns):
            add_mixin(module, _Checkpointed if _is_called_by_forward(module) else _CheckpointedCall)
        return model


def _patterns(model: nn.Module, choices: Sequence[str]) -> list[str]:
    """Replace ready-made choices by the names of their blocks; keep patterns."""
    patterns = []
    for choice in choices:
        if choice in _READY_MADE:
            blocks = blocks_of(model, choice)
            if not blocks and choice not in dict(model.named_modules()):
                raise ConfigError(
                    f"MEMFIT.CHECKPOINT.MODULES: {choice!r} finds no blocks in this model. Name "
                    "modules of it, or set []"
                )
            patterns += blocks or [choice]
        else:
            patterns.append(choice)
    return patterns


def blocks_of(model: nn.Module, choice: str) -> list[str]:
    """Names of the blocks of a ready-made choice."""
    blocks = find_blocks(model)
    return [b for b in blocks if choice != "backbone" or _is_in_backbone(model, b)]


def _is_in_backbone(model: nn.Module, name: str) -> bool:
    parts = name.split(".")
    outer = (".".join(parts[:i]) for i in range(1, len(parts)))
    return "backbone" in parts or any(
        isinstance(model.get_submodule(name), Backbone) for name in outer
    )


class _Checkpointed(nn.Module):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return recompute_in_backward(self, super().forward, *args, **kwargs)


class _CheckpointedCall(nn.Module):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return recompute_in_backward(self, super().__call__, *args, **kwargs)


def _is_called_by_forward(module: nn.Module) -> bool:
    """Whether a call runs the ``forward`` of the module's class, and hooks around it.

    Some modules have their own ``__call__``, or a function in place of ``forward``.
    """
    return type(module).__call__ is nn.Module.__call__ and "forward" not in vars(module)


@contextmanager
def checkpointed(model: nn.Module) -> Iterator[None]:
    """While open, the model's blocks keep only their inputs.

    Keep it open for a forward and its backward. The blocks are those of :func:`find_blocks`. In a
    stage that is a sequence of blocks, each forward runs up to three times. One input is kept per
    stage, and one per block in the stage that runs its backward. Gradients are the same, to the
    last bit in float32 if the layers are deterministic.
    """
    parts = [model.get_submodule(name) for name in find_blocks(model)]
    originals = [vars(part).get("forward") for part in parts]
    for part in parts:
        part.forward = partial(recompute_in_backward, part, part.forward)
    try:
        yield
    finally:
        for part, original in zip(parts, originals):
            if original is None:
                del part.forward
            else:
                part.forward = original
