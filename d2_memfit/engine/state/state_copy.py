# Copyright (c) the d2_memfit developers.
"""A copy of what forward and backward change in addition to gradients, to undo them.

Large tensors are not copied at first. Changes of these are detected, and then copied, too.
"""

import logging
from collections.abc import Iterator, Sized
from contextlib import contextmanager
from typing import Any, Optional
from weakref import WeakKeyDictionary, ref

import torch
from torch import nn

from ... import compat
from ...common.random_state import RandomState
from ...compat.pytorch import parameters_by_name, version_of, versions_of
from ...techniques.support import LARGE_BYTES, MOST_BYTES, ModuleState, plain_attributes
from ..storage import WindowStorage

__all__ = ["StateCopy", "StateWatch", "watched"]

logger = logging.getLogger(__name__)

# By id, with their names. References are weak: tensors that a forward replaces must be freed.
Tensors = dict[int, tuple[str, "ref[torch.Tensor]"]]

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class StateCopy:
    """The state at the time when this object is made, which can be restored.

    It holds the random states of Python, NumPy and PyTorch, on the host and on the model's device.
    It holds what a forward changes in the model (:class:`ModuleState`), including parameters that
    are known to change (:class:`StateWatch`). It also holds the scalars logged in this window.

    Args:
        model: without DDP around it.
        storage: the window's storage, if there is one.
        is_watched: whether forwards of the model are watched for changes of parameters.
        last: an earlier copy of the model, which shares the values of what has not changed since.
    """

    def __init__(
        self,
        model: nn.Module,
        storage: Optional[WindowStorage] = None,
        is_watched: bool = True,
        last: Optional["StateCopy"] = None,
    ) -> None:
        self._storage = storage
        self._scalars = 0 if storage is None else storage.num_entries()
        self._random_state = RandomState(next(model.parameters()).device)
        watch = StateWatch.for_model(model) if is_watched else None
        self._module_state: ModuleState = ModuleState(
            model,
            () if watch is None else watch.changed,
            None if last is None else last._module_state,
        )

    def restore(self) -> None:
        """Restore the state. This can be done more than once."""
        if self._storage is not None:
            self._storage.rewind(self._scalars)
        self._random_state.restore()
        self._module_state.restore()


@contextmanager
def watched(model: nn.Module, may_run_again: bool) -> Iterator[None]:
    """While open, watch a forward that may run again."""
    if not may_run_again:
        yield
        return
    model = compat.without_ddp(model)
    with StateWatch.for_model(model).forward(model):
        yield


class StateWatch:
    """Watches a model's forwards for changes of parameters and other large tensors.

    A teacher's weights are an example. Once a change is seen, copies copy the tensor. For the
    first forward they copy all of them that are not trained. Tensors that are too large or cannot
    be restored cause a warning.

    PyTorch counts the changes of a tensor, except changes through ``.data``. The 1st, 2nd, 4th,
    8th, ... forward is searched for these, and for changes of plain attributes that copies leave
    out.
    """

    def __init__(self, model: nn.Module) -> None:
        self._num_forwards = 0
        self._tensors: Tensors = {}
        self._said: set[str] = set()
        self._changed: list[ref[torch.Tensor]] = []
        known = [reference() for _, reference in _named_state(model)[0].values()]
        frozen = [t for t in known if t is not None and not t.requires_grad]
        self._at_first = frozen if _num_bytes(frozen) <= MOST_BYTES else []

    @classmethod
    def for_model(cls, model: nn.Module) -> "StateWatch":
        """The watch of a model, which has no DDP around it."""
        if model not in _watches:
            _watches[model] = cls(model)
        return _watches[model]

    @property
    def changed(self) -> list[torch.Tensor]:
        """Tensors that copies must copy."""
        return self._at_first or [t for t in (r() for r in self._changed) if t is not None]

    @contextmanager
    def forward(self, model: nn.Module) -> Iterator[None]:
        """Watch one forward of the model."""
        looks = self._num_forwards & (self._num_forwards + 1) == 0
        left_out: dict[str, tuple[nn.Module, str, str]] = {}
        if looks:
            self._tensors, left_out = _named_state(model)
        copied = {id(t) for t in self.changed}
        before = _versions(self._tensors, looks)
        others = {k: _fingerprint(getattr(m, a)) for k, (m, a, _) in left_out.items()}
        is_done = False
        try:
            yield
            is_done = True
        finally:
            self._num_forwards += 1
            self._at_first = []
            try:
                after = _versions(self._tensors, looks)
            except torch.OutOfMemoryError:  # a forward that failed may leave no memory to look with
                if is_done:
                    raise
                after, left_out = _versions(self._tensors, looks=False), {}
            for key, version in after.items() if before != after else ():
                name, reference = self._tensors[key]
                tensor = reference()
                if tensor is not None and before[key][: len(version)] != version:
                    self._note(name, tensor, is_late=not is_done and key not in copied)
            for name, (part, attribute, why) in left_out.items():
                if others[name] != _fingerprint(getattr(part, attribute, None)):
                    self._warn(name, why)

    def _note(self, name: str, tensor: torch.Tensor, is_late: bool) -> None:
        """Record a changed tensor. After a failed forward it is too late: no copy has it."""
        changed = self.changed
        if all(other is not tensor for other in changed):
            if _num_bytes([*changed, tensor]) > MOST_BYTES:
                self._warn(name, f"more than {MOST_BYTES >> 20} MB change in a forward")
                return
            self._changed = [ref(t) for t in (*changed, tensor)]
        if is_late:
            logger.warning(
                "%s was changed by a forward that failed, for the first time, and this change "
                "stays. From now on such changes are put back",
                name,
            )

    def _warn(self, name: str, why: str) -> None:
        if name not in self._said:
            self._said.add(name)
            logger.warning(
                "The forward changes %s, and that is not put back when images are run again: %s. "
                "If later forwards depend on it, give its module save_for_retry() and "
                "restore_for_retry(state)",
                name,
                why,
            )


def _named_state(model: nn.Module) -> tuple[Tensors, dict[str, tuple[nn.Module, str, str]]]:
    """Tensors that forwards may change and copies do not copy, and attributes copied in part.

    The attributes come with the reason why a part is left out.
    """
    state = ModuleState(model)
    paths = {part: path for path, part in model.named_modules() if path}

    def full_name(part: nn.Module, name: str) -> str:
        return f"{paths.get(part, type(part).__name__)}.{name}"

    tensors: Tensors = {}
    for part in state.modules:
        for name, value in [*parameters_by_name(part).items(), *plain_attributes(part)]:
            if _may_change_unseen(value):
                tensors[id(value)] = full_name(part, name), ref(value)
    for part in state.modules:
        for p in part.parameters() if hasattr(part, "save_for_retry") else ():
            tensors.pop(id(p), None)
    left_out = {full_name(part, name): (part, name, why) for part, name, why in state.left_out}
    return tensors, left_out


def _may_change_unseen(value: Any) -> bool:
    """Whether a value is a tensor that copies copy only on request."""
    return (
        isinstance(value, torch.Tensor)
        and (isinstance(value, nn.Parameter) or value.nbytes > LARGE_BYTES)
        and (value.layout == torch.strided and not value.is_meta)
        and value.grad_fn is None
    )


def _versions(tensors: Tensors, looks: bool) -> dict[int, tuple[Any, ...]]:
    alive = [r() for _, r in tensors.values()]
    there = [t for t in alive if t is not None and not t.is_inference()]
    if not looks and len(there) == len(alive):
        versions = versions_of(there)
        return dict(zip(tensors, zip(versions, versions[len(there) :])))
    return {key: _version(t, looks) for key, t in zip(tensors, alive)}


def _version(tensor: Optional[torch.Tensor], looks: bool) -> tuple[Any, ...]:
    """Values that differ after the tensor changed; with ``looks``, also through ``.data``."""
    if tensor is None:
        return ()
    version = None if tensor.is_inference() else version_of(tensor)
    value = version, tensor.data_ptr()
    integer = _INTEGERS.get(tensor.element_size())
    if looks and integer is not None and not tensor.is_complex():
        return (*value, tensor.detach().view(integer).sum().item())
    return value


def _fingerprint(value: Any) -> Any:
    """A value that differs after a change, as far as can be seen at the top level.

    A change in a tensor is seen as that of any large tensor.
    """
    if isinstance(value, Iterator):
        return object()
    if isinstance(value, dict):
        return [id(v) for v in value.values()]
    if isinstance(value, Sized) and hasattr(value, "__iter__"):
        return [id(v) for v in value]
    return id(value)


def _num_bytes(tensors: Any) -> int:
    return sum(t.nbytes for t in tensors)


_watches: WeakKeyDictionary[nn.Module, StateWatch] = WeakKeyDictionary()
