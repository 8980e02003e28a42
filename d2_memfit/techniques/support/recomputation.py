# Copyright (c) the d2_memfit developers.
"""Recomputation of a forward, for which autograd keeps only the arguments."""

import logging
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Callable
from weakref import WeakKeyDictionary

import torch
from detectron2.utils.events import EventStorage
from torch import nn
from torch.utils.checkpoint import checkpoint

from ... import compat
from ...common.random_state import RandomState
from ...common.snapshot import Snapshot
from ...compat.pytorch import (
    TorchDispatchMode,
    schema,
    storage_id,
    tree_flatten,
    tree_iter,
    tree_unflatten,
)
from .modules import own_class

__all__ = ["recompute_in_backward"]

logger = logging.getLogger(__name__)

# For each called module, whether it changes its arguments in place.
_changes_arguments: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()


def recompute_in_backward(
    module: nn.Module, forward: Callable[..., Any], /, *args: Any, **kwargs: Any
) -> Any:
    """Call ``forward`` so that autograd keeps only its arguments.

    A module that changes one of its argument tensors in place could not be recomputed. This is
    noticed in its first forward, before the change. A warning names the module, and autograd then
    keeps its tensors as usual.

    Args:
        module: the module of this forward. Its running statistics and logged scalars change only
            once.
    """
    if not torch.is_grad_enabled() or _changes_arguments.get(module, False):
        return forward(*args, **kwargs)
    call, tensors = _repeatable(forward, args, kwargs)
    contexts = partial(_contexts, module)
    run = partial(checkpoint, call, *tensors, use_reentrant=False, context_fn=contexts)
    if module in _changes_arguments:
        return run()
    before = Snapshot(module)
    unchanged = _Unchanged(tensors)
    try:
        with unchanged:
            result = run()
        _changes_arguments[module] = False
        return result
    except _ArgumentChangesError:
        _changes_arguments[module] = True
    logger.warning(
        "Activation checkpointing leaves a %s out: it changes its input in place (%s)",
        own_class(module).__name__,
        unchanged.operator,
    )
    before.restore()
    return forward(*args, **kwargs)


def _repeatable(
    forward: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[Callable[..., Any], list[torch.Tensor]]:
    """A call as a function of the distinct tensors among its arguments, and these tensors.

    The first call gets the original arguments. Later calls get the function's tensors in their
    places. A tensor that was passed twice is one tensor again, because attention compares query,
    key and value by ``is``.
    """
    leaves, structure = tree_flatten((args, kwargs))
    tensors = {id(leaf): leaf for leaf in leaves if isinstance(leaf, torch.Tensor)}
    order = {key: i for i, key in enumerate(tensors)}
    positions = [order.get(id(leaf)) for leaf in leaves]
    others = [None if id(leaf) in tensors else leaf for leaf in leaves]
    first = [(args, kwargs)]

    def call(*tensors: torch.Tensor) -> Any:
        if first:
            args, kwargs = first.pop()
        else:
            leaves = [x if i is None else tensors[i] for i, x in zip(positions, others)]
            args, kwargs = tree_unflatten(leaves, structure)
        return forward(*args, **kwargs)

    return call, list(tensors.values())


class _ArgumentChangesError(Exception):
    pass


class _Unchanged(TorchDispatchMode):
    """While open, an operator that would change one of the given tensors raises first.

    Attributes:
        operator: the operator that raised.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self.operator: Any = None
        self._addresses = set(map(_address, tensors))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if schema(func).is_mutable:
            arguments = {a.name: a for a in schema(func).arguments}
            given = {**dict(zip(arguments, args)), **kwargs}
            for name, value in given.items():
                alias = arguments[name].alias_info
                if alias is not None and alias.is_write and self._has(value):
                    self.operator = func.overloadpacket
                    raise _ArgumentChangesError
        return func(*args, **kwargs)

    def _has(self, value: Any) -> bool:
        tensors = [t for t in tree_iter(value) if isinstance(t, torch.Tensor)]
        return any(_address(t) in self._addresses for t in tensors)


def _address(tensor: torch.Tensor) -> Any:
    return id(tensor) if tensor.is_sparse else storage_id(tensor.untyped_storage())


def _contexts(module: nn.Module) -> tuple[AbstractContextManager[None], "_WithoutTraces"]:
    """Contexts for the forward and for its recomputation."""
    return nullcontext(), _WithoutTraces(module)


class _WithoutTraces:
    """While open, a forward repeats its random numbers and leaves no traces.

    Running statistics and the run's scalars do not change. It can be opened again, as a second
    backward through the same graph does.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        device = next((p.device for p in module.parameters()), torch.device("cpu"))
        self._random = RandomState(device)

    def __enter__(self) -> None:
        self._outside = Snapshot(self._module)
        self._random.restore()
        self._storage = EventStorage(compat.current_iteration()).__enter__()

    def __exit__(self, *error: Any) -> None:
        self._storage.__exit__(*error)
        self._outside.restore()
