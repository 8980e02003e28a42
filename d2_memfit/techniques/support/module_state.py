# Copyright (c) the d2_memfit developers.
"""State that a forward changes in a module, saved so that it can be restored."""

import random
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from enum import Enum
from functools import partial
from itertools import chain
from operator import itemgetter
from types import (
    BuiltinFunctionType,
    FunctionType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
)
from typing import Any, NamedTuple, Optional

import numpy as np
import torch
from torch import nn

from ...common.units import MB
from ...compat.pytorch import BatchNorm, buffers_by_name, children_by_name, versions_of

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

    A part with the methods ``save_for_retry()`` and ``restore_for_retry(state)`` saves its plain
    attributes itself. An attribute that leads to a tensor with a graph is not state, and is not
    saved.

    Args:
        changed: parameters, or large tensors among the attributes, that forwards change.
        last: an earlier state of this module. Unchanged values are not copied again: equal
            constants, and tensors with the same version in PyTorch. In the 1st, 2nd, 4th, 8th, ...
            state that follows another, these tensors are compared with their copies. A tensor that
            changes without a new version, as through ``.data``, is always copied from then on. So
            are batch normalisation's running statistics.

    Attributes:
        modules: all parts, including those that only plain attributes lead to, such as in a list.
        left_out: parts, names and reasons of attributes that may be state and are not saved.
        tensors: those that are copied.
    """

    def __init__(
        self,
        module: nn.Module,
        changed: Iterable[torch.Tensor] = (),
        last: Optional["ModuleState"] = None,
    ) -> None:
        self._changed = list(changed)
        self._parts: dict[int, _SavedModule]
        self._values: _Values
        self.tensors: list[torch.Tensor]
        if last is not None and last._has_parts_of_now(self._changed):
            self._parts, self._values, self.tensors = last._parts, last._values, last.tensors
            self._is_constant = True
        else:
            self._parts = _parts_of(module, self._changed, {} if last is None else last._parts)
            self._values = _Values(self.modules)
            self._is_constant = all(part.is_constant for part in self._parts.values())
            found = chain(self._changed, *(part.tensors for part in self._parts.values()))
            self.tensors = list({id(t): t for t in found}.values())
        self._versions = versions_of(self.tensors)
        self._age: int = 0 if last is None else last._age + 1
        self._is_compared = self._age & (self._age - 1) == 0
        self._changed_unseen: set[int] = set() if last is None else last._changed_unseen
        self._copies: dict[int, _Copy] = {} if last is None else last._copies
        self._new: set[int] = set()  # copies that were made here
        statistics = (p.tensors for p in self._parts.values() if p.changes_unseen)
        always = {id(t) for t in chain(self._changed, *statistics)} | self._changed_unseen
        if last is None or self._is_compared or always or self._versions != last._versions:
            self._copy_tensors(always)

    @property
    def modules(self) -> list[nn.Module]:
        return [part.module for part in self._parts.values()]

    @property
    def left_out(self) -> list[tuple[nn.Module, str, str]]:
        return [attribute for part in self._parts.values() for attribute in part.left_out]

    def restore(self) -> None:
        """Restore the state. This may be repeated, also between forward and backward.

        A tensor whose version is the same is left alone if it was not compared with its old copy:
        the copy may be older than a change without a new version.
        """
        for tensor, then, version in zip(
            self.tensors, _pairs(self._versions), _pairs(versions_of(self.tensors))
        ):
            if version != then or self._is_compared or id(tensor) in self._new:
                # Through .data, so that autograd does not see a change of a saved tensor.
                tensor.data.copy_(self._copies[id(tensor)].value)
        for part in self._parts.values():
            for undo in part.undo:
                undo()

    def _has_parts_of_now(self, changed: Sequence[torch.Tensor]) -> bool:
        """Whether all parts are constant, and the same as when this was made."""
        same_changed = list(map(id, changed)) == list(map(id, self._changed))
        return self._is_constant and same_changed and self._values.are_same()

    def _copy_tensors(self, always: AbstractSet[int]) -> None:
        """Copy tensors that have changed since they were copied, and those that always do."""
        earlier, self._copies = self._copies, {}
        for tensor, version in zip(self.tensors, _pairs(self._versions)):
            key = id(tensor)
            copy = earlier.get(key)
            if copy is not None and (copy.tensor is not tensor or copy.version != version):
                copy = None
            if copy is not None and self._is_compared and not torch.equal(copy.value, tensor):
                self._changed_unseen = {*self._changed_unseen, key}
                copy = None
            if copy is None or key in always:
                copy = _Copy(tensor, version, tensor.detach().clone())
                self._new.add(key)
            self._copies[key] = copy


def _pairs(versions: list[Any]) -> Iterator[tuple[Any, Any]]:
    """The two values of :func:`versions_of` for each tensor."""
    return zip(versions, versions[len(versions) // 2 :])


class _Copy(NamedTuple):
    tensor: torch.Tensor
    version: Any  # when it was copied
    value: torch.Tensor


class _Values:
    """Plain attributes, buffers and children of modules, to see later whether they are the same."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._attributes: list[tuple[Callable[[Any], Any], dict[str, Any]]] = []
        self._sized: list[dict[str, Any]] = []
        self._inner: list[dict[str, Any]] = []
        for module in modules:
            attributes = vars(module)
            names = list(attributes.keys() - _OF_MODULES)  # a compiled module has no "training"
            if names:  # one twice, as itemgetter returns a tuple from two on
                self._attributes.append((itemgetter(names[0], *names), attributes))
            self._sized.append(attributes)
            self._inner += [buffers_by_name(module), children_by_name(module)]
        self._then = self._now()

    def are_same(self) -> bool:
        try:
            return self._now() == self._then
        except Exception:  # an attribute is gone, or became a tensor, which cannot be compared
            return False

    def _now(self) -> tuple[list[Any], ...]:
        return (
            # Without tuples that stay: they would be garbage to collect.
            list(chain.from_iterable(values(a) for values, a in self._attributes)),
            list(map(len, self._sized)),
            list(chain.from_iterable(map(dict.values, self._inner))),
        )


def _parts_of(
    module: nn.Module, changed: Iterable[torch.Tensor], earlier: Mapping[int, "_SavedModule"]
) -> dict[int, "_SavedModule"]:
    """The parts of a module by their ids. Constant ones that are the same as earlier are kept."""
    known: dict[int, Any] = {id(t): t for t in changed}
    parts: dict[int, _SavedModule] = {}
    modules = deque(module.modules())
    while modules:
        found = modules.popleft()
        if id(found) not in known:
            known[id(found)] = found
            part = earlier.get(id(found))
            if part is None or not (part.is_constant and part.values.are_same()):
                part = _SavedModule(found, known)
            parts[id(found)] = part
            modules.extend(part.modules)
    return parts


class _SavedModule:
    """The buffers and plain attributes of one module.

    Args:
        known: objects whose content is saved already, by their ids; those of this part are added.

    Attributes:
        is_constant: whether the attributes are constants, so that they only change as a whole.
        changes_unseen: whether forwards change its buffers without a new version.
        tensors: the tensors to copy.
        modules: those that only a plain attribute leads to, and their parts.
    """

    def __init__(self, module: nn.Module, known: dict[int, Any]) -> None:
        buffers = buffers_by_name(module)
        self.module = module
        self.values = _Values([module])
        self.is_constant = True
        self.changes_unseen = isinstance(module, BatchNorm) and module.training
        self.tensors = [b for b in buffers.values() if b is not None]
        self.modules: list[nn.Module] = []
        self.left_out: list[tuple[nn.Module, str, str]] = []
        self.undo: list[Undo] = [partial(_restore_entries, buffers, dict(buffers))]
        if hasattr(module, "save_for_retry"):
            own: Any = module
            self.is_constant = False
            self.undo.append(partial(own.restore_for_retry, own.save_for_retry()))
        else:
            self._keep_attributes(known)

    def _keep_attributes(self, known: dict[int, Any]) -> None:
        kept = dict(vars(self.module))
        left = set(_OF_MODULES)
        for name, value in kept.items():
            if type(value) in _CONSTANT or name in _OF_MODULES:
                continue
            self.is_constant = False
            contents = _Contents(known)
            try:
                contents.keep(value)
            except _LeftOutError as e:
                left.add(name)
                if e.reason:
                    self.left_out.append((self.module, name, e.reason))
                continue
            self.undo += contents.undo
            self.tensors += contents.tensors
            known.update(contents.found)
            self.modules += [part for hidden in contents.modules for part in hidden.modules()]
        self.undo.append(partial(_restore_attributes, vars(self.module), kept, left))


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
        self.tensors: list[torch.Tensor] = []
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
            raise _LeftOutError(f"it has {tensor.nbytes / MB:.0f} MB")
        if tensor.nbytes <= LARGE_BYTES:
            self.tensors.append(tensor)

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
