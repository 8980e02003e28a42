# Copyright (c) the d2_memfit developers.
"""State that a forward changes in a module, saved so that it can be restored."""

import random
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Set as AbstractSet
from enum import Enum
from functools import partial
from types import (
    BuiltinFunctionType,
    FunctionType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
)
from typing import Any

import numpy as np
import torch
from torch import nn

from ...compat.pytorch import buffers_by_name

__all__ = ["LARGE_BYTES", "MOST_BYTES", "ModuleState", "plain_attributes"]

# A plain attribute that is a tensor is copied up to this size; a larger one if it is known to
# change.
LARGE_BYTES = 2**20
# Larger ones are left out. The weights of an R50-FPN, such as a teacher's, have 170 MB.
MOST_BYTES = 2**28
_MOST_OBJECTS = 10_000  # objects that an attribute leads to

# Attributes that nn.Module manages itself: parameters, buffers, modules and hooks.
_OF_MODULES = frozenset(vars(nn.Module())) - {"training"}

_CONSTANT = frozenset(
    {type(None), bool, int, float, complex, str, bytes, range, slice, type(Ellipsis)}
    | {torch.dtype, torch.device, torch.Size}
)
_NO_STATE = (type, FunctionType, MethodType, BuiltinFunctionType, ModuleType, Enum)
_NO_STATE_OF = {"torch", "logging", "threading", "weakref", "functools", "d2_memfit"}

_GENERATORS = (random.Random, np.random.RandomState, np.random.Generator, torch.Generator)

Undo = Callable[[], Any]


class ModuleState:
    """The state that a forward may change in a module and its parts, saved when this is made.

    - Buffers, such as running statistics of batch normalisation, including None.
    - Plain attributes of any kind, such as RetinaNet's running normaliser.
    - Their content: lists, tuples, deques, dicts, sets and NumPy arrays, random generators of
      Python, NumPy and PyTorch, tensors up to 1 MiB, and the attributes of other objects.
    - The tensors in ``changed``.

    A part with the methods ``save_for_retry()`` and ``restore_for_retry(state)`` keeps its plain
    attributes itself. An attribute that leads to a tensor with a graph is not state, and is left
    alone.

    Args:
        changed: parameters, or large tensors among the attributes, that forwards change.

    Attributes:
        parts: all modules, including those that only plain attributes lead to, such as in a list.
        left_out: parts, names and reasons of attributes that may be state and are not saved.
    """

    def __init__(self, module: nn.Module, changed: Iterable[torch.Tensor] = ()) -> None:
        self.parts: list[nn.Module] = []
        self.left_out: list[tuple[nn.Module, str, str]] = []
        self._known: dict[int, Any] = {}  # by id; the objects stay alive, so that ids do
        self._undo: list[Undo] = []
        for tensor in changed:
            self._known[id(tensor)] = tensor
            self._undo.append(_undo_tensor(tensor))
        parts = deque(module.modules())
        while parts:
            part = parts.popleft()
            if id(part) not in self._known:
                self._known[id(part)] = part
                parts.extend(self._keep(part))

    def restore(self) -> None:
        """Restore the state. This may be repeated, also between forward and backward."""
        for undo in self._undo:
            undo()

    def _keep(self, part: nn.Module) -> list[nn.Module]:
        """Save a part's state; return modules that only a plain attribute leads to."""
        self._undo += [_undo_tensor(b) for b in buffers_by_name(part).values() if b is not None]
        buffers = buffers_by_name(part)
        self._undo.append(partial(_restore_entries, buffers, dict(buffers)))
        self.parts.append(part)
        if hasattr(part, "save_for_retry"):
            own: Any = part
            self._undo.append(partial(own.restore_for_retry, own.save_for_retry()))
            return []
        kept = dict(vars(part))
        left = set(_OF_MODULES)
        modules: list[nn.Module] = []
        for name, value in kept.items():
            if type(value) in _CONSTANT or name in _OF_MODULES:
                continue
            contents = _Contents(self._known)
            try:
                contents.keep(value)
            except _LeftOutError as e:
                left.add(name)
                if e.reason:
                    self.left_out.append((part, name, e.reason))
                continue
            self._undo += contents.undo
            self._known.update(contents.found)
            modules += contents.modules
        self._undo.append(partial(_restore_attributes, vars(part), kept, left))
        return modules


def plain_attributes(part: nn.Module) -> Iterator[tuple[str, Any]]:
    """A module's attributes that PyTorch does not manage."""
    return ((k, v) for k, v in vars(part).items() if k not in _OF_MODULES)


class _LeftOutError(Exception):
    def __init__(self, reason: str = "") -> None:
        self.reason = reason


class _Contents:
    """The content of a value, and the functions that restore it."""

    def __init__(self, known: dict[int, Any]) -> None:
        self.undo: list[Undo] = []
        self.found: dict[int, Any] = {}
        self.modules: list[nn.Module] = []
        self._known = known

    def keep(self, value: Any) -> None:
        if type(value) in _CONSTANT or id(value) in self._known or id(value) in self.found:
            return
        if len(self.found) == _MOST_OBJECTS:
            raise _LeftOutError(f"it leads to more than {_MOST_OBJECTS} objects")
        if isinstance(value, nn.Module):
            self.modules.append(value)
            return
        self.found[id(value)] = value
        if isinstance(value, torch.Tensor):
            self._keep_tensor(value)
        elif isinstance(value, np.ndarray):
            if value.flags.writeable:
                self.undo.append(partial(value.__setitem__, ..., value.copy()))
        elif isinstance(value, (bytearray, array)):
            self.undo.append(partial(value.__setitem__, slice(None), value[:]))
        elif isinstance(value, (list, deque)):
            self._keep_all(value)
            self.undo.append(partial(_refill, value, value.extend, list(value)))
        elif isinstance(value, set):
            self.undo.append(partial(_refill, value, value.update, list(value)))
        elif isinstance(value, dict):
            self._keep_all(value.values())
            self.undo.append(partial(_restore_entries, value, dict(value)))
        elif isinstance(value, (tuple, frozenset)):
            self._keep_all(value)
        elif isinstance(value, _GENERATORS):
            self.undo.append(_undo_generator(value))
        elif isinstance(value, Iterator):
            raise _LeftOutError(f"it is a {type(value).__name__}, which cannot go back")
        elif not isinstance(value, _NO_STATE):
            self._keep_object(value)

    def _keep_all(self, values: Iterable[Any]) -> None:
        for value in values:
            self.keep(value)

    def _keep_tensor(self, tensor: torch.Tensor) -> None:
        if tensor.grad_fn is not None:
            raise _LeftOutError
        if tensor.layout != torch.strided or tensor.is_meta:
            return
        if tensor.nbytes > MOST_BYTES:
            raise _LeftOutError(f"it has {tensor.nbytes / 2**20:.0f} MB")
        if tensor.nbytes <= LARGE_BYTES:
            self.undo.append(_undo_tensor(tensor))

    def _keep_object(self, value: Any) -> None:
        if type(value).__module__.partition(".")[0] in _NO_STATE_OF:
            return
        attributes = getattr(value, "__dict__", None)
        if isinstance(attributes, dict):
            self._keep_all(attributes.values())
            self.undo.append(partial(_restore_attributes, attributes, dict(attributes)))
        slots = {name: getattr(value, name) for name in _slots(value) if hasattr(value, name)}
        if slots:
            self._keep_all(slots.values())
            self.undo.append(partial(_restore_slots, value, slots))


def _slots(value: Any) -> list[str]:
    """Attributes of an object that are not in a ``__dict__``, set or not."""
    bases = (vars(base) for base in type(value).__mro__ if "__slots__" in vars(base))
    members = (item for base in bases for item in base.items())
    return [name for name, member in members if isinstance(member, MemberDescriptorType)]


def _restore_slots(value: Any, kept: dict[str, Any]) -> None:
    for name in _slots(value):
        if name not in kept and hasattr(value, name):
            object.__delattr__(value, name)
        elif name in kept and getattr(value, name, None) is not kept[name]:
            object.__setattr__(value, name, kept[name])


def _undo_tensor(tensor: torch.Tensor) -> Undo:
    # Through .data, so that autograd does not see a change of a saved tensor.
    value = tensor.detach().clone()
    return lambda: tensor.data.copy_(value)


def _refill(values: Any, add: Callable[[Any], None], kept: Iterable[Any]) -> None:
    values.clear()
    add(kept)


def _restore_entries(entries: dict[Any, Any], kept: dict[Any, Any]) -> None:
    is_same = len(entries) == len(kept) and all(
        a is b and v is w for (a, v), (b, w) in zip(entries.items(), kept.items())
    )
    if not is_same:  # a config may refuse to be written
        entries.clear()
        entries.update(kept)


def _restore_attributes(
    attributes: dict[str, Any], kept: dict[str, Any], others: AbstractSet[str] = frozenset()
) -> None:
    """Restore a ``__dict__``, except for some names."""
    for name in attributes.keys() - kept.keys():  # the first forward added it
        del attributes[name]
    attributes.update((name, value) for name, value in kept.items() if name not in others)


def _undo_generator(generator: Any) -> Undo:
    if isinstance(generator, random.Random):
        return partial(generator.setstate, generator.getstate())
    if isinstance(generator, np.random.Generator):
        bits = generator.bit_generator
        return partial(setattr, bits, "state", bits.state)
    return partial(generator.set_state, generator.get_state())
