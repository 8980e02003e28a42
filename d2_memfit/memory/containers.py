# Copyright (c) the d2_memfit developers.
"""Containers that grow, and their names in Python."""

import gc
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from types import CellType, FunctionType, ModuleType
from typing import Any

import numpy as np
import torch

__all__ = ["GrowingContainers"]

_CONTAINERS = (list, dict, set, deque)
_WITH_ELEMENTS = (*_CONTAINERS, tuple)
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
            (obj, _length(obj))
            for obj in _all_containers()
            if _length(obj) >= at_least and id(obj) not in skip
        ]

    def grown(self, by: int) -> dict[str, int]:
        """Names of containers with at least ``by`` more elements, and these elements' bytes."""
        grown = [(obj, n) for obj, n in self._lengths if _length(obj) >= n + by]
        self._lengths = []  # which refers to all of them
        return {_name_of(obj): _bytes_of(_elements(obj)[n:]) for obj, n in grown}


def _all_containers() -> Iterator[Any]:
    for obj in gc.get_objects():
        if issubclass(type(obj), _CONTAINERS):
            yield obj
        # The garbage collector leaves out dicts of numbers and bytes, but knows their containers.
        for inner in gc.get_referents(obj):
            if type(inner) is dict and not gc.is_tracked(inner):
                yield inner


def _base(container: Any) -> Any:
    """The type whose methods are called: those of a subclass may load anything, or raise."""
    return next((kind for kind in _WITH_ELEMENTS if issubclass(type(container), kind)), None)


def _length(container: Any) -> int:
    length: int = _base(container).__len__(container)
    return length


def _elements(container: Any) -> list[Any]:
    base = _base(container)
    return list(dict.values(container) if base is dict else base.__iter__(container))


def _bytes_of(value: Any, depth: int = 3) -> int:
    """Approximate bytes, with the content of containers; these may contain themselves."""
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return value.nbytes
    if depth and _base(value) is not None:
        return sum(_bytes_of(v, depth - 1) for v in _elements(value)) + sys.getsizeof(value)
    return sys.getsizeof(value) + (sys.getsizeof(vars(value)) if hasattr(value, "__dict__") else 0)


def _name_of(container: Any) -> str:
    """A container's name, such as "my_hook.Keeper.kept", or a description if it has none."""
    held = container
    path = ""
    for _ in range(_MOST_HOPS):
        name = _name_in_owner(held)
        if name:
            return name + path
        held = _outer_container(held)
        if held is None:
            break
        path = f"[...]{path}"
    return f"a {type(container).__name__} of {_length(container)} elements"


def _name_in_owner(obj: Any) -> str:
    """The name of an object that is an attribute, a global or a function's variable; "" if none."""
    for referrer in gc.get_referrers(obj):
        if isinstance(referrer, CellType) and _name_of_variable(referrer):
            return _name_of_variable(referrer)
        # A module, class or object, or the __dict__ of one.
        owners = gc.get_referrers(referrer) if type(referrer) is dict else [referrer]
        for owner in owners:
            attributes = getattr(owner, "__dict__", None)
            items = list(attributes.items()) if isinstance(attributes, Mapping) else []
            for name, value in items:
                if value is obj:
                    return f"{_name_of_owner(owner)}.{name}"
    return ""


def _name_of_owner(owner: Any) -> str:
    if isinstance(owner, ModuleType):
        return owner.__name__
    kind = owner if isinstance(owner, type) else type(owner)
    return f"{kind.__module__}.{kind.__qualname__}"


def _name_of_variable(cell: CellType) -> str:
    for cells in gc.get_referrers(cell):
        for function in gc.get_referrers(cells) if isinstance(cells, tuple) else []:
            if isinstance(function, FunctionType):
                return f"a variable of {function.__qualname__}"
    return ""


def _outer_container(obj: Any) -> Any:
    """A container that an object is in; None if there is none."""
    referrers = gc.get_referrers(obj)
    return next((r for r in referrers if isinstance(r, _CONTAINERS) and r is not obj), None)
