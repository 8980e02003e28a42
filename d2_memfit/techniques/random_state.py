# Copyright (c) the d2_memfit developers.
"""Saved random states, to draw the same random numbers again."""

import torch

from ..torch_private import tree_iter

__all__ = ["RandomState", "device_of"]


class RandomState:
    """The random states of the CPU and of a device, saved when this is made."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._states = [torch.get_rng_state()]
        if device.type == "cuda":
            self._states.append(torch.cuda.get_rng_state(device))

    def restore(self) -> None:
        torch.set_rng_state(self._states[0])
        if self._device.type == "cuda":
            torch.cuda.set_rng_state(self._states[1], self._device)

    def is_that_of(self, other: "RandomState") -> bool:
        return all(torch.equal(a, b) for a, b in zip(self._states, other._states))


def device_of(arguments: object) -> torch.device:
    """The device of the first tensor in some containers, or the CPU."""
    tensors = (t for t in tree_iter(arguments) if isinstance(t, torch.Tensor))
    return next((t.device for t in tensors), torch.device("cpu"))
