"""What a forward and a backward change beside gradients, kept so that they can be undone."""

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
    """The state to go back to, as it is when this is made.

    It holds the random generators of Python, NumPy and PyTorch, on the host and on the model's
    device; what a forward changes in the model (:class:`ModuleState`), with the parameters that are
    known to change (:class:`StateWatch`); and the scalars that were logged in this window.

    Args:
        model: without DDP around it.
        storage: that of the window, where there is one.
    """

    def __init__(self, model: nn.Module, storage: Optional[WindowStorage] = None) -> None:
        self._storage = storage
        self._scalars = storage and storage.mark()
        self._device = next(model.parameters()).device
        self._python_rng = random.getstate()
        self._numpy_rng = np.random.get_state()
        self._torch_rng = torch.get_rng_state()
        if self._device.type != "cpu":
            self._device_rng = torch.get_device_module(self._device).get_rng_state(self._device)
        self._module_state = ModuleState(model, StateWatch.of(model).changed)

    def restore(self) -> None:
        """Go back. It can be done more than once."""
        if self._storage is not None:
            self._storage.rewind(self._scalars)
        random.setstate(self._python_rng)
        np.random.set_state(self._numpy_rng)
        torch.set_rng_state(self._torch_rng)
        if self._device.type != "cpu":
            torch.get_device_module(self._device).set_rng_state(self._device_rng, self._device)
        self._module_state.restore()
