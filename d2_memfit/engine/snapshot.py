# Copyright (c) the d2_memfit developers.
"""A copy of what forward and backward change besides gradients, to undo them."""

import random
from typing import Optional

import numpy as np
import torch
from torch import nn

from ..techniques import ModuleState
from .state_watch import StateWatch
from .storage import WindowStorage

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
        self._device = next(model.parameters()).device
        self._python_rng = random.getstate()
        self._numpy_rng = np.random.get_state()
        self._torch_rng = torch.get_rng_state()
        if self._device.type != "cpu":
            self._device_rng = torch.get_device_module(self._device).get_rng_state(self._device)
        changed = StateWatch.of(model).changed if is_watched else ()
        self._module_state = ModuleState(model, changed)

    def restore(self) -> None:
        """Restore the state. This can be done more than once."""
        if self._storage is not None:
            self._storage.rewind(self._scalars)
        random.setstate(self._python_rng)
        np.random.set_state(self._numpy_rng)
        torch.set_rng_state(self._torch_rng)
        if self._device.type != "cpu":
            torch.get_device_module(self._device).set_rng_state(self._device_rng, self._device)
        self._module_state.restore()
