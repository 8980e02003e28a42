# Copyright (c) the d2_memfit developers.
"""What a forward changes in addition to gradients, saved so that it can be put back."""

import random
import re
import types
import zlib
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from enum import Enum
from itertools import chain
from typing import Any, Optional

import numpy as np
import torch
from detectron2.layers import FrozenBatchNorm2d
from torch import nn

from .compat import BatchNorm, own_buffers
from .side_work import RandomState

__all__ = ["Snapshot", "changed_by_forward", "state_of", "weights_that_may_change"]

# A tensor in an attribute is copied up to this size. Buffers of all sizes are.
_LARGE_BYTES = 2**20
# More weights are not copied. Those of an R50-FPN, such as a teacher's, have 170 MB.
_MOST_BYTES = 2**28
_MOST_OBJECTS = 10_000  # to which an attribute leads

# What nn.Module manages itself: parameters, buffers, modules and hooks.
_OF_MODULES = frozenset(vars(nn.Module())) - {"training"}
_CONSTANT = frozenset({type(None), bool, int, float, str})  # those that modules have most
_NO_STATE = (type, types.ModuleType, Enum, types.FunctionType, types.MethodType)
_NO_STATE_OF = {"torch", "logging", "threading", "weakref", "functools", "d2_memfit"}
# How to read and write values that lead to no others.
_LEAVES: dict[type, tuple[Callable[[Any], Any], Callable[[Any, Any], Any]]] = {
    # Written through .data, so that autograd sees no change
    torch.Tensor: (lambda x: x.detach().clone(), lambda x, saved: x.data.copy_(saved)),
    np.ndarray: (lambda x: x.copy(), lambda x, saved: x.__setitem__(..., saved)),
    bytearray: (bytearray.copy, lambda x, saved: x.__setitem__(slice(None), saved)),
    array: (lambda x: x[:], lambda x, saved: x.__setitem__(slice(None), saved)),
    random.Random: (random.Random.getstate, random.Random.setstate),
    np.random.RandomState: (np.random.RandomState.get_state, np.random.RandomState.set_state),
    np.random.Generator: (
        lambda x: x.bit_generator.state,
        lambda x, saved: setattr(x.bit_generator, "state", saved),
    ),
    torch.Generator: (torch.Generator.get_state, torch.Generator.set_state),
}


class Snapshot:
    """The state of a model and of the random generators, at the time when this is made.

    It has the generators of Python, NumPy and PyTorch, on the host and on the model's device. Of
    each module, and of those that only an attribute leads to, it has the buffers and the plain
    attributes with their content: containers, arrays, generators, tensors up to 1 MiB, and other
    objects. They are put back in place, because others may refer to them.

    A module with ``save_for_retry()`` and ``restore_for_retry(state)`` saves its attributes itself.
    An attribute is left alone if it leads to a tensor with a graph, to a larger tensor, or to an
    iterator.

    Args:
        model: without DDP around it.
        weights: parameters, or larger tensors, that forwards change.
        modules: parts of the model; None for all.
        draws: whether to save the random generators.
    """

    def __init__(
        self,
        model: nn.Module,
        weights: Iterable[torch.Tensor] = (),
        modules: Optional[Iterable[nn.Module]] = None,
        draws: bool = True,
    ) -> None:
        device = next((p.device for p in model.parameters()), torch.device("cpu"))
        self._random = RandomState(device) if draws else None
        self._weights = [(w, w.data, w.detach().clone()) for w in weights]
        self._parts: dict[int, _Part] = {}
        known: set[int] = set()
        waiting = list(model.modules() if modules is None else modules)
        for module in waiting:  # parts add those that only their attributes lead to
            if id(module) not in self._parts and type(module) is not FrozenBatchNorm2d:
                self._parts[id(module)] = _Part(module, known, waiting)

    def restore(self) -> None:
        """Put the state back. This may be repeated, also between forward and backward."""
        if self._random is not None:
            self._random.restore()
        for weight, data, saved in self._weights:
            weight.data = data.copy_(saved)
        for part in self._parts.values():
            part.restore()

    def changed_weights(self) -> list[torch.Tensor]:
        """Those of the weights that differ now."""
        return [w for w, _, saved in self._weights if not torch.equal(w.detach(), saved)]

    def changed_modules(self) -> list[nn.Module]:
        """Those whose buffers or attributes differ now."""
        return [part.module for part in self._parts.values() if part.has_changed()]


class _Part:
    """The buffers and attributes of one module.

    Args:
        known: the ids of values that are saved already; those of this module are added.
        modules: gets those that an attribute leads to, and their parts.
    """

    def __init__(self, module: Any, known: set[int], modules: list[nn.Module]) -> None:
        self.module, buffers = module, own_buffers(module)
        self._contents = [(b, _content(b)) for b in (*buffers.values(), buffers) if b is not None]
        self._names = set(vars(module))
        self._kept: dict[str, Any] = {}
        self._saves_itself = hasattr(type(module), "save_for_retry")
        self._own = module.save_for_retry() if self._saves_itself else None
        for name, value in () if self._saves_itself else vars(module).items():
            found = None if name in _OF_MODULES else _contents_of(value, known, modules)
            if found is not None:
                known.update(found)
                self._contents += found.values()
                self._kept[name] = value

    def restore(self) -> None:
        attributes = vars(self.module)
        for value, content in self._contents:
            _put_back(value, content)
        if self._saves_itself:
            self.module.restore_for_retry(self._own)
            return
        for name in attributes.keys() - self._names:  # the forward added it
            del attributes[name]
        attributes.update(self._kept)

    def has_changed(self) -> bool:
        attributes = vars(self.module)
        return (
            self._saves_itself
            or attributes.keys() != self._names
            or any(attributes[name] is not value for name, value in self._kept.items())
            or not all(_is_same(_content(value), content) for value, content in self._contents)
        )


def _contents_of(value: Any, known: set[int], modules: list[Any]) -> Optional[dict[int, Any]]:
    """All that a value leads to, itself included: by the id of each, it and what is in it.

    None if something cannot be saved. The other arguments are those of :class:`_Part`.
    """
    found: dict[int, Any] = {}
    waiting = [value]
    while waiting:  # each object before its parts, which come in their order
        part = waiting.pop()
        if type(part) in _CONSTANT or id(part) in known or id(part) in found:
            continue
        if isinstance(part, torch.Tensor):
            if part.grad_fn is not None or part.nbytes > _LARGE_BYTES:
                return None
            if _is_plain(part):
                found[id(part)] = part, _content(part)
        elif isinstance(part, nn.Module):
            modules += part.modules()
        elif isinstance(part, tuple(_LEAVES)):
            if not isinstance(part, np.ndarray) or part.flags.writeable:
                found[id(part)] = part, _content(part)
        elif not isinstance(part, _NO_STATE) and _library(part) not in _NO_STATE_OF:
            if isinstance(part, Iterator) or len(found) >= _MOST_OBJECTS:
                return None
            _, content = found[id(part)] = part, _content(part)
            waiting += reversed(content.values() if isinstance(content, dict) else content)
    return found


def state_of(model: nn.Module) -> dict[str, Any]:
    """All that may change, by name: numbers, and what else differs after a change."""
    state: dict[str, Any] = {}
    for path, part in model.named_modules():
        if not isinstance(part, BatchNorm):  # its statistics are not read in training
            own = {k: v for k, v in vars(part).items() if k not in _OF_MODULES}
            own |= {**own_buffers(part), **dict(part.named_parameters(recurse=False))}
            for name, value in own.items():
                state[f"{path or type(model).__name__}.{name}"] = _print_of(value)
    return state


def _print_of(value: Any, depth: int = 5) -> Any:
    if isinstance(value, (torch.Tensor, np.ndarray)):
        numbers = torch.as_tensor(value).detach().to_dense().cpu().double().numpy()
        return numbers.item() if numbers.size == 1 else zlib.crc32(numbers.tobytes())
    if depth and isinstance(value, (dict, list, tuple, deque)):
        items = value.items() if isinstance(value, dict) else value
        return [_print_of(item, depth - 1) for item in items]
    return value if isinstance(value, (int, float)) else re.sub(r" at 0x\w+", "", repr(value))


def changed_by_forward(old: dict[str, Any], new: dict[str, Any]) -> tuple[list[str], list[str]]:
    """Names of what has changed in :func:`state_of`, and of the numbers that have grown by one."""
    changed = [name for name in new if old.get(name, new[name]) != new[name]]
    numbers = [name for name in changed if {type(old[name]), type(new[name])} <= {int, float}]
    return changed, [name for name in numbers if new[name] == old[name] + 1]


def weights_that_may_change(model: nn.Module) -> list[torch.Tensor]:
    """Frozen weights, such as a teacher's, and large tensors in attributes; none if too many."""
    tensors: list[torch.Tensor] = []
    for part in Snapshot(model)._parts.values():
        tensors += [p for p in part.module.parameters(recurse=False) if not p.requires_grad]
        large = [v for v in vars(part.module).values() if isinstance(v, torch.Tensor)]
        tensors += [v for v in large if v.nbytes > _LARGE_BYTES and _is_plain(v)]
    return tensors if sum(t.nbytes for t in tensors) <= _MOST_BYTES else []


def _is_plain(tensor: torch.Tensor) -> bool:
    is_state = not isinstance(tensor, nn.Parameter) and tensor.grad_fn is None
    return is_state and tensor.layout == torch.strided and not tensor.is_meta


def _library(value: Any) -> str:
    return type(value).__module__.partition(".")[0]


def _content(value: Any) -> Any:
    """What is in a value, as a copy of one level."""
    for kind, (read, _) in _LEAVES.items():
        if isinstance(value, kind):
            return read(value)
    if isinstance(value, dict):
        return dict(value)
    if isinstance(value, (list, deque, set, tuple, frozenset)):
        return list(value)
    return {name: getattr(value, name) for name in _names(value) if hasattr(value, name)}


def _put_back(value: Any, content: Any) -> None:
    for kind, (_, write) in _LEAVES.items():
        if isinstance(value, kind):
            write(value, content)
            return
    now = _content(value)
    if _is_same(now, content):  # a config may refuse to be written
        return
    if isinstance(value, (dict, set, list, deque)):
        value.clear()
        (value.update if isinstance(value, (dict, set)) else value.extend)(content)
        return
    for name in now.keys() - content.keys():
        object.__delattr__(value, name)
    for name in content:
        if now.get(name, now) is not content[name]:
            object.__setattr__(value, name, content[name])


def _names(value: Any) -> list[str]:
    """Attributes of an object, those of __slots__ included, set or not."""
    bases = (vars(base) for base in type(value).__mro__ if "__slots__" in vars(base))
    slot = types.MemberDescriptorType
    slots = [n for base in bases for n, m in base.items() if isinstance(m, slot)]
    return [*slots, *getattr(value, "__dict__", ())]


def _is_same(one: Any, other: Any) -> bool:
    """Whether two contents are the same, one level deep."""
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        one, other = [*chain(*one.items())], [*chain(*other.items())]  # in their order
    if isinstance(one, list):
        return [*map(id, one)] == [*map(id, other)]
    if isinstance(one, np.ndarray):
        return np.array_equal(one, other)
    return str(one) == str(other)  # of a generator
