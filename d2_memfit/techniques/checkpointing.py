"""Activation checkpointing: what a block computes is computed again in the backward, not kept."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, Optional

import torch
from detectron2.config import CfgNode
from detectron2.utils.events import EventStorage
from torch import nn
from torch.nn.modules.conv import _ConvNd
from torch.utils.checkpoint import checkpoint

from .. import compat
from ..checks import check_strings
from .module_state import ModuleState
from .modules import extend, find_modules
from .registry import TECHNIQUES, Technique

__all__ = ["ActivationCheckpointing", "checkpointed", "recompute_in_backward"]

# Names that stand for the stages and blocks of these parts of a model.
_READY_MADE = {
    "backbone": ("backbone",),
    "backbone+heads": ("backbone", "proposal_generator", "roi_heads", "head", "sem_seg_head"),
}


@TECHNIQUES.register()
class ActivationCheckpointing(Technique):
    """Some modules keep only their inputs for the backward, which computes the rest again.

    Saves the activations within these modules. Costs their forward a second time, which is a
    quarter to a third of the time that they take.

    Source: Chen et al., "Training Deep Nets with Sublinear Memory Cost", arXiv:1604.06174;
    PyTorch's ``torch.utils.checkpoint`` without reentrance, which works with frozen inputs, outputs
    of any kind, unused parameters, mixed precision and DDP.
    """

    tier = "exact"
    part = "model"
    order = 1  # what others do in a forward, they must do again when it is computed again

    @classmethod
    def add_config(cls, cfg: CfgNode) -> None:
        cfg.MEMFIT.setdefault("CHECKPOINT", CfgNode())
        # The modules that keep only their inputs, by patterns of their names, such as
        # "backbone.bottom_up.res4.*" or "roi_heads.mask_head"; or one of two choices that are made
        # already: "backbone", the stages and blocks of the backbone, and "backbone+heads", those of
        # the heads too. None are [].
        cfg.MEMFIT.CHECKPOINT.MODULES = []

    @classmethod
    def settings(cls, cfg: CfgNode) -> dict[str, Any]:
        return {"MEMFIT.CHECKPOINT.MODULES": ["backbone+heads"]}

    @classmethod
    def is_on(cls, cfg: CfgNode) -> bool:
        check_strings("MEMFIT.CHECKPOINT.MODULES", cfg.MEMFIT.CHECKPOINT.MODULES)
        return len(cfg.MEMFIT.CHECKPOINT.MODULES) > 0

    @classmethod
    def apply(cls, model: nn.Module, cfg: CfgNode) -> nn.Module:
        patterns = _patterns(model, cfg.MEMFIT.CHECKPOINT.MODULES)
        for module in find_modules(model, "MEMFIT.CHECKPOINT.MODULES", patterns):
            extend(module, _Checkpointed if _is_called_by_forward(module) else _CheckpointedCall)
        return model


def _patterns(model: nn.Module, choices: Sequence[str]) -> list[str]:
    patterns = []
    for choice in choices:
        parts = [(n, m) for n, m in model.named_children() if n in _READY_MADE.get(choice, ())]
        names = [name for part, m in parts for name, _ in m.named_modules(prefix=part)]
        patterns += [name for name in names if _is_part(model.get_submodule(name))] or [choice]
    return patterns


class _Checkpointed(nn.Module):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return recompute_in_backward(self, super().forward, *args, **kwargs)


class _CheckpointedCall(nn.Module):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return recompute_in_backward(self, super().__call__, *args, **kwargs)


def _is_called_by_forward(module: nn.Module) -> bool:
    """Whether calling it calls the ``forward`` of its class, and hooks around that.

    Some modules have a ``__call__`` of their own, or a function in place of ``forward``.
    """
    return type(module).__call__ is nn.Module.__call__ and "forward" not in vars(module)


@contextmanager
def checkpointed(model: nn.Module) -> Iterator[None]:
    """While open, the parts of the model that can be checkpointed keep only their inputs.

    Keep it open for a forward and its backward. The parts are the model's blocks, and its stages,
    which are sequences of blocks. Each forward is run up to three times, and what is kept is one
    input per stage, and within the stage that is in its backward one per block. Gradients are the
    same; to the last bit in float32, where the layers are deterministic.
    """
    parts = [m for m in model.modules() if m is not model and _is_part(m)]
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


def recompute_in_backward(
    module: nn.Module, forward: Callable[..., Any], /, *args: Any, **kwargs: Any
) -> Any:
    """Call ``forward``, of which autograd keeps only the arguments.

    Args:
        module: whose forward it is. What that changes, running statistics and logged scalars, is
            changed once.
    """
    contexts = partial(_contexts, module)
    call = partial(forward, **kwargs)
    return checkpoint(call, *args, use_reentrant=False, context_fn=contexts)


def _contexts(module: nn.Module) -> tuple[AbstractContextManager[None], "_WithoutTraces"]:
    """For the forward, and for when it is computed again."""
    return nullcontext(), _WithoutTraces(module)


class _WithoutTraces:
    """While open, a forward draws the numbers of its first time, and running statistics and the
    scalars of the run change for nothing. It can be opened again, as a second backward through the
    same graph does.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        # PyTorch knows of the devices of tensors among the arguments only.
        self._device = next((p.device for p in module.parameters()), torch.device("cpu"))
        self._rng = _device_rng(self._device)

    def __enter__(self) -> None:
        self._state = ModuleState(self._module)
        self._rng_outside = _device_rng(self._device)
        _set_device_rng(self._device, self._rng)
        self._storage = EventStorage(compat.current_iteration()).__enter__()

    def __exit__(self, *error: Any) -> None:
        self._storage.__exit__(*error)
        _set_device_rng(self._device, self._rng_outside)
        self._state.restore()


def _device_rng(device: torch.device) -> Optional[torch.Tensor]:
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else None


def _set_device_rng(device: torch.device, state: Optional[torch.Tensor]) -> None:
    if state is not None:
        torch.cuda.set_rng_state(state, device)


def _is_part(module: nn.Module) -> bool:
    return _is_block(module) or _is_stage(module)


def _is_block(module: nn.Module) -> bool:
    """Whether a module has parameters, and its own parts are single layers.

    Such as a residual block, an attention, the head of the proposal network, a box or mask head.
    """
    layers = list(module.children())
    has_parameters = any(True for _ in module.parameters())
    return not _is_layer(module) and has_parameters and all(map(_is_layer, layers))


def _is_stage(module: nn.Module) -> bool:
    blocks = list(module.children())
    return isinstance(module, nn.Sequential) and len(blocks) > 0 and all(map(_is_block, blocks))


def _is_layer(module: nn.Module) -> bool:
    """Detectron2's convolutions have their normalisation inside."""
    return isinstance(module, _ConvNd) or not any(True for _ in module.children())
