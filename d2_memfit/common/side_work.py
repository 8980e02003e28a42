# Copyright (c) the d2_memfit developers.
"""Contexts for work that is not training, such as planning: on one rank, without logging, and
without an effect on random numbers.
"""

import logging
import random
import re
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

from .compat import default_group_replaced

__all__ = ["RandomState", "SameDraws", "alone", "no_information", "unchanged_random_state"]

_CPU = torch.device("cpu")
_DRAWS = re.compile(r"rand|bernoulli|(normal|uniform|exponential)_$")
_WITHOUT_GENERATOR = ("cpu", "meta")  # devices without one in addition to PyTorch's own


class RandomState:
    """The states of the generators of Python, NumPy and PyTorch, saved when this is made.

    Args:
        device: a device whose generator is included, if it has one.
    """

    def __init__(self, device: torch.device = _CPU) -> None:
        self.device = device
        self._states: dict[str, Any] = {
            "python": random.getstate(),
            "numpy": np.random.get_state(legacy=True),
            "torch": torch.get_rng_state(),
        }
        if device.type not in _WITHOUT_GENERATOR:
            self._states["device"] = torch.get_device_module(device).get_rng_state(device)

    def restore(self) -> None:
        """Restore the states. This can be done more than once."""
        random.setstate(self._states["python"])
        np.random.set_state(self._states["numpy"])
        torch.set_rng_state(self._states["torch"])
        if self.device.type not in _WITHOUT_GENERATOR and "device" in self._states:
            device_module = torch.get_device_module(self.device)
            device_module.set_rng_state(self._states["device"], self.device)

    def draws_the_same(self, other: "RandomState") -> bool:
        """Whether Python, NumPy and PyTorch draw the same numbers after both."""
        mine, theirs = self._states, other._states
        names = mine.keys() & {"torch", "device"}
        return (
            all(torch.equal(mine[name], theirs[name]) for name in names)
            and mine["python"] == theirs["python"]
            and mine["numpy"][2:] == theirs["numpy"][2:]
            and np.array_equal(mine["numpy"][1], theirs["numpy"][1])
        )

    def state_dict(self) -> dict[str, Any]:
        """The states in tensors, tuples, numbers and None.

        ``torch.load`` can read them with ``weights_only=True``.
        """
        _, keys, *rest = self._states["numpy"]
        return {**self._states, "numpy": (torch.from_numpy(keys.astype(np.int64)), *rest)}

    @classmethod
    def from_state_dict(cls, states: dict[str, Any], device: torch.device = _CPU) -> "RandomState":
        """The states of :meth:`state_dict`, of this or another process."""
        loaded = cls(device)
        keys, *rest = states["numpy"]
        loaded._states = {**states, "numpy": ("MT19937", keys.numpy().astype(np.uint32), *rest)}
        return loaded


@contextmanager
def alone() -> Iterator[None]:
    """While open, code that asks for ranks is told that this process is the only one.

    So Detectron2's loaders and the criteria of models do not wait for other ranks.
    """
    with default_group_replaced(None) if dist.is_available() else nullcontext():
        yield


@contextmanager
def no_information(up_to: int = logging.INFO) -> Iterator[None]:
    """While open, log only warnings and errors, because other messages concern another job.

    Args:
        up_to: the highest level that is not logged.
    """
    level = logging.root.manager.disable
    logging.disable(max(level, up_to))
    try:
        yield
    finally:
        logging.disable(level)


@contextmanager
def unchanged_random_state(device: torch.device = _CPU) -> Iterator[None]:
    """While open, random numbers can be drawn without an effect on the job.

    Args:
        device: a device whose generator is included, if it has one.
    """
    state = RandomState(device)
    try:
        yield
    finally:
        state.restore()


@contextmanager
def aside() -> Iterator[None]:
    """While open, work of one process has no effect on the job: all three of these contexts."""
    with alone(), no_information(), unchanged_random_state():
        yield


class SameDraws(TorchFunctionMode):
    """Random numbers that do not depend on earlier ones or on the batch, and no dropout.

    All rows of a random tensor have the same numbers: those of an object are the same in every
    batch. The anchors or proposals of an image are taken in their order.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        if "dropout" in name:
            return args[0] if args else kwargs["input"]
        if not _DRAWS.match(name):
            return func(*args, **kwargs)
        seed = torch.initial_seed()
        torch.manual_seed(seed)
        drawn = func(*args, **kwargs)
        if name == "randperm":
            return drawn.copy_(torch.arange(len(drawn)).roll(seed * len(drawn) // 3))
        if drawn.dim() > 0 and len(drawn) > 0:
            drawn.detach().copy_(drawn[:1].clone().expand_as(drawn))
        return drawn
