# Copyright (c) the d2_memfit developers.
"""Contexts for work that is not training, such as planning: on one rank, without logging, and
without an effect on random numbers.
"""

import logging
import random
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Optional

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from .compat import default_group_replaced

__all__ = ["RandomState", "SameDraws", "aside", "no_information", "unchanged_random_state"]

_CPU = torch.device("cpu")
_DRAWS = re.compile(r"rand|bernoulli|(normal|uniform|exponential)_$")
_WITHOUT_GENERATOR = ("cpu", "meta")  # devices without one in addition to PyTorch's own


class RandomState:
    """The states of the generators of Python, NumPy and PyTorch, saved when this is made.

    Args:
        device: a device whose generator is included, if it has one.
        states: those of another one, of this or another process; None for those of now.

    Attributes:
        states: tensors, tuples and numbers, which ``torch.load`` reads with ``weights_only=True``.
    """

    def __init__(
        self, device: torch.device = _CPU, states: Optional[dict[str, Any]] = None
    ) -> None:
        self.device = device
        if states is None:
            numpy: Any = np.random.get_state(legacy=True)
            states = {
                "python": random.getstate(),
                "numpy": numpy[2:],
                "numpy_keys": torch.from_numpy(numpy[1].view(np.int32)),
                "torch": torch.get_rng_state(),
            }
            if device.type not in _WITHOUT_GENERATOR:
                states["device"] = torch.get_device_module(device).get_rng_state(device)
        self.states = states

    def restore(self) -> None:
        """Restore the states. This can be done more than once."""
        states = self.states
        keys = states["numpy_keys"].numpy().view(np.uint32)
        random.setstate(states["python"])
        np.random.set_state(("MT19937", keys, *states["numpy"]))
        torch.set_rng_state(states["torch"])
        if self.device.type not in _WITHOUT_GENERATOR and "device" in states:
            torch.get_device_module(self.device).set_rng_state(states["device"], self.device)

    def draws_the_same(self, other: "RandomState") -> bool:
        """Whether all generators draw the same numbers after both."""
        pairs = [(value, other.states[name]) for name, value in self.states.items()]
        return all(torch.equal(*p) if torch.is_tensor(p[0]) else p[0] == p[1] for p in pairs)


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
    """While open, work of one process has no effect on the job, and does not wait for others."""
    with default_group_replaced(None), no_information(), unchanged_random_state():
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
