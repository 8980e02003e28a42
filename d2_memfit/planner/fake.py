"""Tensors whose values do not matter: they have sizes, and are not computed."""

from typing import Any

from ..memory import storages

__all__ = ["is_fake", "make_fake", "make_real"]


def make_fake(tensors: Any) -> Any:
    """Say of tensors, in any containers, that their values do not matter. They are returned."""
    for storage in storages(tensors):
        storage.is_fake = True  # type: ignore[attr-defined]  # one that PyTorch does not have
    return tensors


def make_real(tensors: Any) -> None:
    """Say that the values have been computed after all."""
    for storage in storages(tensors):
        storage.is_fake = False  # type: ignore[attr-defined]


def is_fake(tensors: Any) -> bool:
    return any(getattr(storage, "is_fake", False) for storage in storages(tensors))
