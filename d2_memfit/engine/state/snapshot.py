# Copyright (c) the d2_memfit developers.
"""A copy of what forward and backward change besides gradients, to undo them."""

from typing import Optional

from torch import nn

from ...common.random_state import RandomState
from ...techniques.support import ModuleState
from ..window import WindowStorage
from .state_watch import StateWatch

__all__ = ["Snapshot"]


class Snapshot:
    """The state at the time when this object is made, which can be restored.

    It holds the random states of Python, NumPy and PyTorch, on the host and on the model's device.
    It holds what a forward changes in the model (:class:`ModuleState`), including parameters that
    are known to change (:class:`StateWatch`). It also holds the scalars logged in this window.

    Args:
        model: without DDP around it.
        storage: the window's storage, if there is one.
        is_watched: whether forwards of the model are watched for changes of parameters.
    """

    def __init__(
        self,
        model: nn.Module,
        storage: Optional[WindowStorage] = None,
        is_watched: bool = True,
    ) -> None:
        self._storage = storage
        self._scalars = storage and storage.mark()
        self._random_state = RandomState(next(model.parameters()).device)
        changed = StateWatch.of(model).changed if is_watched else ()
        self._module_state = ModuleState(model, changed)

    def restore(self) -> None:
        """Restore the state. This can be done more than once."""
        if self._storage is not None:
            self._storage.rewind(self._scalars)
        self._random_state.restore()
        self._module_state.restore()
