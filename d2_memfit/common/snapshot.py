# Copyright (c) the d2_memfit developers.
"""The state of a model and of random numbers, which can be restored."""

import copy
from collections import deque
from collections.abc import Iterable
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn

from ..compat.pytorch import buffers_by_name
from .random_state import RandomState

__all__ = ["Snapshot"]

_MANAGED = set(vars(nn.Module())) - {"training"}
_AS_IT_IS = (
    *(type(None), bool, int, float, complex, str, bytes, range, type, torch.dtype, torch.device),
    *(torch.Size, FunctionType, BuiltinFunctionType, MethodType, ModuleType),
)
_MOST = 2**28  # bytes of an attribute


class Snapshot:
    """The state at the time when this object is made.

    It holds buffers and plain attributes of the modules, and random states.

    Args:
        model: without DDP around it.
        weights: parameters that are restored, too.
    """

    def __init__(self, model: nn.Module, weights: Iterable[torch.Tensor] = ()) -> None:
        self._random = RandomState(next(model.parameters()).device)
        self._memo: Any = {id(t): t for t in (*model.parameters(), *model.modules())}  # shared
        self._weights = [(w, w.data, w.data.clone()) for w in weights]
        self._parts = [
            (m, self._attributes(m), dict(own := buffers_by_name(m)), _cloned(own))
            for m in model.modules()
        ]

    def restore(self) -> None:
        """Restore the state. This can be done more than once."""
        self._random.restore()
        for weight, data, saved in self._weights:
            weight.data = data.copy_(saved)
        for module, kept, buffers, clones in self._parts:
            own = buffers_by_name(module)
            own.clear()
            own.update(buffers)
            for name, value in clones.items():
                buffers[name].data.copy_(value)
            for name in vars(module).keys() - kept.keys() - _MANAGED:
                del vars(module)[name]
            for name, (value, copied) in kept.items():
                same = value is copied
                vars(module)[name] = value if same else _refilled(value, self._copy(copied))

    def _copy(self, value: Any) -> Any:
        return copy.deepcopy(value, dict(self._memo))

    def _attributes(self, module: nn.Module) -> dict[str, tuple[Any, Any]]:
        kept = {}
        for name, value in vars(module).items():
            if name in _MANAGED:
                continue
            saved = value
            if not isinstance(value, _AS_IT_IS) and getattr(value, "nbytes", 0) <= _MOST:
                try:
                    saved = self._copy(value)
                except Exception:  # an iterator, a lock, part of a graph: left as it is
                    saved = value
            kept[name] = value, saved
        return kept


def _cloned(buffers: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {k: b.detach().clone() for k, b in buffers.items() if b is not None}


def _refilled(value: Any, saved: Any) -> Any:
    """The same container with its old content: others may refer to it."""
    if isinstance(value, (list, deque)):
        value.clear()
        value.extend(saved)
    elif isinstance(value, (dict, set)):
        value.clear()
        value.update(saved)
    elif isinstance(value, torch.Tensor):
        value.data.copy_(saved)
    elif isinstance(value, np.ndarray):
        value[...] = saved
    else:
        return saved
    return value
