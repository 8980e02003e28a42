# Copyright (c) the d2_memfit developers.
"""The base class of hooks that observe memory."""

from typing import Any

import torch
from detectron2.engine import HookBase
from torch import nn

from ... import compat

__all__ = ["MemoryHook"]


class MemoryHook(HookBase):
    """A hook that knows the model and its device, and runs after each forward, too."""

    _inner: Any = None  # the trainer that has model and optimizer, once training has begun
    _model: nn.Module
    _device: torch.device
    _forward_hook: Any = None

    def before_train(self) -> None:
        self._inner = compat.inner_trainer(self.trainer)
        self._model = compat.without_ddp(self._inner.model)
        self._device = next(self._model.parameters()).device
        self._forward_hook = self._model.register_forward_hook(self.after_forward)

    def after_train(self) -> None:
        if self._forward_hook is not None:  # an error may come before this hook's before_train
            self._forward_hook.remove()

    def after_forward(self, model: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Called as a forward hook of the model, which has no DDP around it."""
