# Copyright (c) the d2_memfit developers.
"""Containers that grow, and their names in Python."""

import gc
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from types import CellType, FunctionType, ModuleType
from typing import Any

import numpy as np
import torch

__all__ = ["GrowingContainers"]

_CONTAINERS = (list, dict, set, deque)
_MOST_HOPS = 4  # from a container to something that has a name


class GrowingContainers:
    """A record of large containers, to find those that grow.

    Args:
        at_least: number of elements from which a container is large.
        others: containers that are known to grow.
    """

    def __init__(self, at_least: int, others: Iterable[Any] = ()) -> None:
        skip = {id(other) for other in others}
        self._lengths = [
            (obj, len(obj))
            for obj in _all_containers()
            if len(obj) >= at_least and id(obj) not in skip
        ]

    def grown(self, by: int) -> dict[str, int]:
        """Names of containers with at least ``by`` more elements, and these elements' bytes."""
        grown = [(obj, n) for obj, n in self._lengths if len(obj) >= n + by]
        self._lengths = []  # which refers to all of them
        return {_name_of(obj): _bytes_of(_last(obj, len(obj) - n)) for obj, n in grown}


def _all_containers() -> Iterator[Any]:
    for obj in gc.get_objects():
        if issubclass(type(obj), _CONTAINERS):
            yield obj
        # The garbage collector leaves out dicts of numbers and bytes, but knows their containers.
        for inner in gc.get_referents(obj):
            if type(inner) is dict and not gc.is_tracked(inner):
                yield inner


def _last(container: Any, num: int) -> list[Any]:
    values = list(container.values() if isinstance(container, dict) else container)
    return values[-num:]


def _bytes_of(value: Any, depth: int = 3) -> int:
    """Approximate bytes, with the content of containers; these may contain themselves."""
    if isinstance(value, torch.Tensor):
        return value.nbytes
    if isinstance(value, np.ndarray):
        return value.nbytes
    inner = list(value.values()) if isinstance(value, dict) else value
    if depth and isinstance(inner, (list, tuple, set, deque)):
        return sum(_bytes_of(v, depth - 1) for v in list(inner)) + sys.getsizeof(value)
    return sys.getsizeof(value) + (sys.getsizeof(vars(value)) if hasattr(value, "__dict__") else 0)


def _name_of(container: Any) -> str:
    """A container's name, such as "my_hook.Keeper.kept", or a description if it has none."""
    what, names = container, ""
    for _ in range(_MOST_HOPS):
        found = _referrer(what)
        if found is None:
            break
        what, step, is_last = found
        names = step + names
        if is_last:
            return names
    return f"a {type(container).__name__} of {len(container)} elements"


def _referrer(obj: Any) -> Any:
    """An object that leads to ``obj``, its part of the name, and whether the name is complete."""
    for module in list(sys.modules.values()):
        for name, value in list(getattr(module, "__dict__", {}).items()):
            if value is obj:
                return module, f"{getattr(module, '__name__', '')}.{name}", True
    referrers = gc.get_referrers(obj)
    for referrer in referrers:
        if isinstance(referrer, type):
            name = _key_of(vars(referrer), obj)
            if name is not None:
                return referrer, f"{referrer.__module__}.{referrer.__qualname__}.{name}", True
        attributes = getattr(referrer, "__dict__", None)
        is_plain = not isinstance(referrer, (ModuleType, FunctionType, type))
        if is_plain and isinstance(attributes, dict):
            name = _key_of(attributes, obj)
            if name is not None:
                kind = type(referrer)
                return referrer, f"{kind.__module__}.{kind.__qualname__}.{name}", True
        if isinstance(referrer, CellType):
            for function in gc.get_referrers(referrer):
                for outer in gc.get_referrers(function) if isinstance(function, tuple) else ():
                    if isinstance(outer, FunctionType):
                        return outer, f"a variable of {outer.__qualname__}", True
    for referrer in referrers:
        if isinstance(referrer, dict):
            owner = _owner_of(referrer, obj)
            if owner:
                return owner
    for referrer in referrers:
        if isinstance(referrer, _CONTAINERS) and referrer is not obj:
            return referrer, "[...]", False
    return None


def _owner_of(attributes: dict[Any, Any], obj: Any) -> Any:
    """The object or class whose ``__dict__`` this is."""
    name = _key_of(attributes, obj)
    for owner in gc.get_referrers(attributes):
        if getattr(owner, "__dict__", None) is attributes:
            kind = type(owner)
            return owner, f"{kind.__module__}.{kind.__qualname__}.{name}", True
        if isinstance(owner, type) and name in vars(owner):
            return owner, f"{owner.__module__}.{owner.__qualname__}.{name}", True
    return None


def _key_of(attributes: Any, obj: Any) -> Any:
    return next((k for k, v in list(attributes.items()) if v is obj), None)
