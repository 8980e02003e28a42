# Copyright (c) the d2_memfit developers.
"""What forwards change in a model, found by running: statistics, counters, queues, prototypes."""

import zlib
from collections.abc import Mapping
from typing import Any, Optional

import torch
from torch import nn

from ...compat.pytorch import BatchNorm, buffers_by_name
from ...techniques.support import plain_attributes

__all__ = ["changed_names", "counters_of", "state_of"]

State = dict[str, Any]  # a value, or a number that differs after a change, by name

_DEPTH = 3  # of containers
_MOST = 1000  # entries of a container that are looked at


def state_of(model: nn.Module) -> State:
    """Everything in the model that may change and is not a parameter, by name."""
    state: State = {}
    for path, part in model.named_modules():
        if isinstance(part, BatchNorm):  # batch statistics are judged by themselves
            continue
        values = [*plain_attributes(part), *buffers_by_name(part).items()]
        for name, value in values:
            state[f"{path or type(model).__name__}.{name}"] = _print_of(value, _DEPTH)
    return state


def changed_names(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Names whose value has changed. What a first forward adds, such as a cache, is left out."""
    return [name for name, value in after.items() if name in before and value != before[name]]


def counters_of(before: State, after: State, forwards: int) -> list[str]:
    """Names of numbers that have grown by one with each forward."""
    return [
        name
        for name in changed_names(before, after)
        if _number(before[name]) is not None
        and _number(after[name]) is not None
        and _number(after[name]) == _number(before[name]) + forwards  # type: ignore[operator]
    ]


def _number(value: Any) -> Optional[float]:
    if isinstance(value, tuple) and len(value) == 3 and value[0] == "tensor":
        value = value[2]
    return value if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def _print_of(value: Any, depth: int) -> Any:
    """A value that can be compared, and that differs after a change."""
    if isinstance(value, (bool, int, float, str, type(None))):
        return value
    if isinstance(value, torch.Tensor):
        if value.is_meta or value.layout != torch.strided:
            return id(value)
        if value.numel() == 1:
            return "tensor", (), value.item()
        data = value.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()
        return "tensor", tuple(value.shape), zlib.crc32(data)
    if depth and isinstance(value, Mapping):
        return tuple((str(k), _print_of(v, depth - 1)) for k, v in list(value.items())[:_MOST])
    if depth and isinstance(value, (list, tuple)):
        return tuple(_print_of(v, depth - 1) for v in value[:_MOST])
    return type(value).__name__  # an object of the project's own
