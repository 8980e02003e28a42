# Copyright (c) the d2_memfit developers.
"""The tensors that Python can see, and their owners."""

import gc
import weakref
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from types import FrameType, FunctionType, ModuleType
from typing import Any

import torch
from torch import nn

from ..compat.pytorch import storage_id
from .meter import storages

__all__ = [
    "TensorCensus",
    "bytes_by_kind",
    "dense_tensors",
    "holders",
    "live_tensors",
    "optimizer_states",
]


class TensorCensus:
    """The tensors that exist now, to find the new ones later."""

    def __init__(self) -> None:
        self._known = {id(t): weakref.ref(t) for t in dense_tensors()}

    def newcomers(self) -> list[torch.Tensor]:
        """Tensors made since then, one for each storage."""
        new = [t for t in dense_tensors() if self._known.get(id(t), lambda: None)() is not t]
        return list({storage_id(t.untyped_storage()): t for t in new}.values())


def bytes_by_kind(tensors: Iterable[torch.Tensor]) -> Counter[str]:
    """Bytes by kind of tensor, such as "float32 [256, 100] on cpu"."""
    kinds: Counter[str] = Counter()
    for t in tensors:
        kinds[_kind(t)] += t.untyped_storage().nbytes()
    return kinds


def holders(tensors: Iterable[torch.Tensor], owners: Iterable[tuple[str, Any]]) -> Counter[str]:
    """Bytes of tensors by the owner that holds them, directly or in its attributes.

    Args:
        owners: names, and modules, hooks or other objects. A tensor counts for the first owner that
            leads to it.
    """
    wanted = {id(t): t.untyped_storage().nbytes() for t in tensors}
    held: Counter[str] = Counter()
    owners = list(owners)
    visited = {id(owner) for _, owner in owners}
    for name, owner in owners:
        for obj in _reachable(owner, visited):
            held[name] += wanted.pop(id(obj), 0)
    return +held


def optimizer_states(optimizer: torch.optim.Optimizer) -> list[Any]:
    """An optimizer's states; only this rank's, if they are sharded."""
    return list(getattr(optimizer, "optim", optimizer).state.values())


def live_tensors(
    model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device
) -> tuple[Counter[str], list[dict[str, Any]]]:
    """Bytes on a device by owner, and a table of the tensors, the largest first.

    Owners are "parameters", "gradients", "buffers", "optimizer", and "tensors" for all others that
    Python can see.
    """
    owned: dict[str, list[Any]] = {
        "parameters": list(model.parameters()),
        "gradients": [p.grad for p in model.parameters()],
        "buffers": list(model.buffers()),
        "optimizer": optimizer_states(optimizer),
    }
    owner_of = {storage_id(s): owner for owner in owned for s in storages(owned[owner])}
    numbers: Counter[tuple[str, str]] = Counter()
    num_bytes_of: Counter[tuple[str, str]] = Counter()
    owners: Counter[str] = Counter()
    tensors = {storage_id(t.untyped_storage()): t for t in dense_tensors() if t.device == device}
    for address, tensor in tensors.items():
        owner = owner_of.get(address, "tensors")
        num_bytes = tensor.untyped_storage().nbytes()
        numbers[owner, _kind(tensor)] += 1
        num_bytes_of[owner, _kind(tensor)] += num_bytes
        owners[owner] += num_bytes
    table = [
        {"owner": key[0], "kind": key[1], "count": numbers[key], "bytes": num_bytes}
        for key, num_bytes in num_bytes_of.most_common()
    ]
    return owners, table


def _kind(tensor: torch.Tensor) -> str:
    dtype = str(tensor.dtype).replace("torch.", "")
    return f"{dtype} {list(tensor.shape)} on {tensor.device}"


def _reachable(owner: Any, visited: set[int]) -> Iterator[Any]:
    """Objects that an owner holds, without those of other owners, breadth first."""
    queue = deque(gc.get_referents(owner))
    while queue:
        obj = queue.popleft()
        # Not isinstance, which fails on a proxy of a dead object.
        if id(obj) in visited or issubclass(type(obj), (type, ModuleType, FrameType)):
            continue
        visited.add(id(obj))
        yield obj
        if issubclass(type(obj), FunctionType):  # not its globals, which lead everywhere
            queue.extend([obj.__closure__, obj.__defaults__])
        else:
            queue.extend(gc.get_referents(obj))


def dense_tensors() -> Iterator[torch.Tensor]:
    """All tensors that Python knows and that have a storage; sparse ones have none."""
    for obj in gc.get_objects():
        if issubclass(type(obj), torch.Tensor) and obj.layout == torch.strided:
            yield obj
