# Copyright (c) the d2_memfit developers.
"""Activation checkpointing: activations are recomputed in the backward, and not kept."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, Callable, Optional

import torch
from detectron2.modeling import Backbone
from detectron2.utils.events import EventStorage
from detectron2.utils.logger import log_first_n
from torch import nn
from torch.utils.checkpoint import checkpoint

from ..common import compat
from ..common.compat import (
    TorchDispatchMode,
    schema,
    storage_id,
    tree_flatten,
    tree_iter,
    tree_unflatten,
)
from ..common.errors import ConfigError
from ..common.side_work import RandomState
from ..common.snapshot import Snapshot
from .technique import Technique, find_blocks, find_modules, wrap_method

__all__ = ["ActivationCheckpointing", "Recomputed", "blocks_of", "checkpointed"]

_READY_MADE = ("backbone", "all")


class ActivationCheckpointing(Technique):
    """Makes modules keep only their inputs for the backward, which recomputes the rest.

    Saves the activations within these modules. Costs a second forward of them, a quarter to a third
    of their time.

    Source: Chen et al., "Training Deep Nets with Sublinear Memory Cost", arXiv:1604.06174;
    PyTorch's ``torch.utils.checkpoint`` without reentrance, which works with frozen inputs, outputs
    of any kind, unused parameters, mixed precision and DDP.

    Key: The modules that keep only their inputs for the backward. Give patterns of their names,
    such as "backbone.bottom_up.res4.*" or "transformer.encoder.layers.*", or one of two ready-made
    choices. "backbone" is the blocks of the backbone. "all" is every block of the model: residual
    stages, encoder and decoder layers, necks, heads. [] is none.
    """

    key, off = "MEMFIT.CHECKPOINT.MODULES", []

    def suggest(self, job: Any, model: nn.Module) -> Optional[list[str]]:
        return ["all"] if find_blocks(model) else None

    def apply(self, model: nn.Module, patterns: Sequence[str]) -> nn.Module:
        for module in find_modules(model, self.key, _named(model, patterns)):
            wrap_method(module, "forward", _recomputed_forward, Recomputed())
        return model


def _named(model: nn.Module, patterns: Sequence[str]) -> list[str]:
    """Replace ready-made choices by the names of their blocks; keep patterns."""
    names = []
    for pattern in patterns:
        blocks = blocks_of(model, pattern) if pattern in _READY_MADE else [pattern]
        if not blocks and pattern not in dict(model.named_modules()):
            raise ConfigError(
                f"{ActivationCheckpointing.key}: {pattern!r} finds no blocks in this model. Name "
                "modules of it, or set []"
            )
        names += blocks or [pattern]
    return names


def blocks_of(model: nn.Module, choice: str) -> list[str]:
    """Names of the blocks of a ready-made choice."""
    blocks = find_blocks(model)
    return [b for b in blocks if choice != "backbone" or _is_in_backbone(model, b)]


def _is_in_backbone(model: nn.Module, name: str) -> bool:
    parts = name.split(".")
    outer = (".".join(parts[:i]) for i in range(1, len(parts)))
    return "backbone" in parts or any(
        isinstance(model.get_submodule(name), Backbone) for name in outer
    )


def _recomputed_forward(
    module: nn.Module,
    forward: Callable[..., Any],
    recomputed: "Recomputed",
    *args: Any,
    **kwargs: Any,
) -> Any:
    return recomputed(module, forward, *args, **kwargs)


@contextmanager
def checkpointed(model: nn.Module) -> Iterator[None]:
    """While open, the model's blocks keep only their inputs.

    Keep it open for a forward and its backward. The blocks are those of :func:`find_blocks`. In a
    stage that is a sequence of blocks, each forward runs up to three times. One input is kept per
    stage, and one per block in the stage that runs its backward. Gradients are the same, to the
    last bit in float32 if the layers are deterministic.
    """
    parts = [model.get_submodule(name) for name in find_blocks(model)]
    originals = [vars(part).get("forward") for part in parts]
    for part in parts:
        wrap_method(part, "forward", _recomputed_forward, Recomputed())
    try:
        yield
    finally:
        for part, original in zip(parts, originals):
            del part.forward
            if original is not None:
                part.forward = original


class Recomputed:
    """Calls a module's forward so that autograd keeps only its arguments.

    A module that changes one of its argument tensors in place could not be recomputed. This is
    noticed in its first forward, before the change. A warning names the module, and autograd then
    keeps its tensors as usual.
    """

    def __init__(self) -> None:
        self.changing: list[nn.Module] = []  # parts whose state a forward changes
        self._draws = False  # random numbers
        self._is_known = self._changes_arguments = False

    def __call__(
        self, module: nn.Module, forward: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Any:
        """Run the forward. Its running statistics and logged scalars change only once."""
        if not torch.is_grad_enabled() or self._changes_arguments:
            return forward(*args, **kwargs)
        call, tensors = _repeatable(forward, args, kwargs)
        random = None
        if self._draws or not self._is_known:
            random = RandomState(next((t.device for t in tensors), torch.device("cpu")))

        def contexts() -> tuple[AbstractContextManager[None], "_WithoutTraces"]:
            return nullcontext(), _WithoutTraces(module, self, random)

        options: Any = {"use_reentrant": False, "preserve_rng_state": False}
        run = partial(checkpoint, call, *tensors, context_fn=contexts, **options)
        if self._is_known:
            return run()
        before, unchanged = Snapshot(module), _Unchanged(tensors)
        try:
            with unchanged:
                result = run()
            self.changing = before.changed_modules()
            self._draws = random is None or not random.draws_the_same(RandomState(random.device))
            self._is_known = True
            return result
        except _ArgumentChangesError:
            self._changes_arguments = True
        text = "Activation checkpointing leaves a {} out: it changes its input in place ({})"
        text = text.format(type(module).__name__, unchanged.operator)
        log_first_n(logging.WARNING, text, key="message")
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


class _WithoutTraces:
    """While open, a forward repeats its random numbers and leaves no traces.

    Running statistics and the run's scalars do not change. It can be opened again, as a second
    backward through the same graph does.
    """

    def __init__(
        self, module: nn.Module, recomputed: Recomputed, random: Optional[RandomState]
    ) -> None:
        self._module, self._recomputed, self._random = module, recomputed, random

    def __enter__(self) -> None:
        draws = self._random is not None
        self._outside = Snapshot(self._module, (), self._recomputed.changing, draws)
        if self._random is not None:
            self._random.restore()
        self._storage = EventStorage(compat.current_iteration()).__enter__()

    def __exit__(self, *error: Any) -> None:
        self._storage.__exit__(*error)
        self._outside.restore()
