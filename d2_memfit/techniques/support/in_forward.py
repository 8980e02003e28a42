# Copyright (c) the d2_memfit developers.
"""Functions that a model calls by name, replaced while one of its modules runs."""

from itertools import chain
from typing import Any

from torch import nn

from ...common.patching import Groups, replaced_together

__all__ = ["ReplacesInForward"]


class ReplacesInForward(nn.Module):
    """A mixin for :func:`add_mixin` that replaces functions during the module's forward.

    Models of Detectron2 and of projects call these functions by name. No argument, method or hook
    would let them call others. A module can have several such mixins.
    """

    def replaced(self) -> Groups:
        """What is replaced, as for :func:`~d2_memfit.common.patching.replaced_together`."""
        return ()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        kinds = (cls for cls in type(self).__mro__ if issubclass(cls, ReplacesInForward))
        groups = [cls.replaced(self) for cls in kinds if "replaced" in vars(cls)]
        with replaced_together(chain.from_iterable(groups)):
            return super().forward(*args, **kwargs)
