# Copyright (c) the d2_memfit developers.
"""Tensors without values: fake ones, and the results of PyTorch's meta kernels.

Fake tensors have sizes, but their values do not matter and are not computed.
"""

from typing import Any

import torch

from ..common.compat import tree_map
from ..memory import storages

__all__ = ["is_fake", "make_fake", "make_real", "on_meta"]

_MOST_ANSWERS = 50_000  # some 60 MB

_empty_strided = torch.empty_strided  # cuda_as_cpu would replace it, which takes time

_answers: dict[Any, Any] = {}


def on_meta(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operator on meta tensors, for sizes, strides and dtypes without values.

    The result depends only on the operator, on shapes, strides and dtypes, and on the other
    arguments. So a kernel is called once per process, and not again for each image, block or dry
    run.

    Returns:
        The cached result, which must not be changed.

    Raises:
        RuntimeError: there is no meta kernel, or the size of the result depends on values.
    """
    key = func, _signature(args), _signature(tuple(kwargs.items()))
    try:
        answer = _answers.get(key)
    except TypeError:  # an argument that cannot be hashed
        return _ask(func, args, kwargs)
    if answer is None:
        try:
            answer = _ask(func, args, kwargs)
        except RuntimeError as e:
            answer = RuntimeError(str(e))  # the error itself has frames, which keep tensors alive
        if len(_answers) >= _MOST_ANSWERS:
            _answers.clear()
        _answers[key] = answer
    if isinstance(answer, RuntimeError):
        raise RuntimeError(*answer.args)
    return answer


def _ask(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    args, kwargs = tree_map(_to_meta, (args, kwargs))
    return func(*args, **kwargs)


def _signature(value: Any) -> Any:
    """A key of all that a result depends on; equal numbers of different types differ."""
    if isinstance(value, torch.Tensor):
        return value.shape, value.stride(), value.dtype
    if isinstance(value, (list, tuple)):
        return tuple(map(_signature, value))
    return type(value), value


def _to_meta(value: Any) -> Any:
    if isinstance(value, torch.device):
        return torch.device("meta")
    if not isinstance(value, torch.Tensor):
        return value
    return _empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")


def make_fake(tensors: Any) -> Any:
    """Mark tensors, in any containers, as fake, and return them."""
    for storage in storages(tensors):
        storage.is_fake = True  # type: ignore[attr-defined] # not an attribute of PyTorch
    return tensors


def make_real(tensors: Any) -> None:
    """Mark tensors as real: their values are computed."""
    for storage in storages(tensors):
        storage.is_fake = False  # type: ignore[attr-defined]


def is_fake(tensors: Any) -> bool:
    return any(getattr(storage, "is_fake", False) for storage in storages(tensors))
