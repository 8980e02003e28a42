# Copyright (c) the d2_memfit developers.
"""The base of hooks that look at memory after each forward."""

from typing import Any

from detectron2.engine import HookBase
from torch import nn

from ... import compat

__all__ = ["AfterForwards"]


class AfterForwards(HookBase):
    """A hook that also runs after each forward of the model, while training runs."""

    _forward_hook: Any = None

    def before_train(self) -> None:
        self._inner: Any = compat.inner_trainer(self.trainer)  # it has model and optimizer
        self._model = compat.without_ddp(self._inner.model)
        self._device = next(self._model.parameters()).device
        self._forward_hook = self._model.register_forward_hook(self.after_forward)

    def after_train(self) -> None:
        if self._forward_hook is not None:  # an error may come before this hook's before_train
            self._forward_hook.remove()

    def after_forward(self, model: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Called as a forward hook of the model, which has no DDP around it."""
        raise NotImplementedError
