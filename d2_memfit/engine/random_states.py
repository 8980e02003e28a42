# Copyright (c) the d2_memfit developers.
"""The states of a process's random generators, in plain types for a checkpoint."""

import random
from typing import Any, Optional

import numpy as np
import torch

__all__ = ["random_states", "set_random_states"]


def random_states(device: Optional[torch.device] = None) -> dict[str, Any]:
    """The states of the generators of Python, NumPy and PyTorch.

    Args:
        device: a device whose generator is included, if it is not the CPU.

    Returns:
        dict: tensors, tuples, numbers and None. ``torch.load`` can read it with
        ``weights_only=True``.
    """
    _, keys, *rest = np.random.get_state(legacy=True)
    states = {
        "python": random.getstate(),
        "numpy": (torch.from_numpy(np.asarray(keys).astype(np.int64)), *rest),
        "torch": torch.get_rng_state(),
    }
    if device is not None and device.type != "cpu":
        states["device"] = torch.get_device_module(device).get_rng_state(device)
    return states


def set_random_states(states: dict[str, Any], device: Optional[torch.device] = None) -> None:
    """Restore the states of :func:`random_states`, in this or another process."""
    random.setstate(states["python"])
    keys, *rest = states["numpy"]
    np.random.set_state(("MT19937", keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(states["torch"])
    if device is not None and device.type != "cpu" and "device" in states:
        torch.get_device_module(device).set_rng_state(states["device"], device)
