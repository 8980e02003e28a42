# Copyright (c) the d2_memfit developers.
"""Functions that a model calls by name, replaced while one of its modules runs."""

from typing import Any

from torch import nn

from ...common.patching import Groups, replaced_together

__all__ = ["ReplacesInForward"]


class ReplacesInForward(nn.Module):
    """A mixin for :func:`add_mixin` that replaces functions during the module's forward.

    Models of Detectron2 and of projects call these functions by name. No argument, method or hook
    would let them call others.
    """

    def replaced(self) -> Groups:
        """What is replaced, as for :func:`~d2_memfit.common.patching.replaced_together`."""
        raise NotImplementedError

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with replaced_together(self.replaced()):
            return super().forward(*args, **kwargs)
