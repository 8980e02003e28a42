# Copyright (c) the d2_memfit developers.
"""Fake tensors: they have sizes, but their values do not matter and are not computed."""

from typing import Any

from ...memory import storages

__all__ = ["is_fake", "make_fake", "make_real"]


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
