# Copyright (c) the d2_memfit developers.
"""Cutting and joining batches that come in columns, such as (images, targets)."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Optional

import torch

__all__ = ["Row", "as_given", "columns_of", "dataset_dicts", "rows_of"]


@dataclass(frozen=True, eq=False)
class Row:
    """One image's entries in the columns of a batch."""

    parts: tuple[Any, ...]
    join: Callable[[Sequence[Sequence[Any]]], Any]  # makes a batch of its columns' parts


def columns_of(batch: Any) -> Optional[Sequence[Any]]:
    """The columns of a batch; None if it has no columns.

    Columns are equally long lists, tuples or tensors in a tuple, with one entry per image.
    """
    kinds = (list, tuple, torch.Tensor)
    if not isinstance(batch, tuple) or not all(isinstance(c, kinds) for c in batch):
        return None
    if any(isinstance(column, torch.Tensor) and column.dim() == 0 for column in batch):
        return None
    lengths = {len(column) for column in batch}
    return batch if len(lengths) == 1 and 0 not in lengths else None


def rows_of(columns: Sequence[Any]) -> list[Row]:
    """One row per image."""

    def join(parts: Sequence[Sequence[Any]]) -> Any:
        return make([_join_like(kind)(column) for kind, column in zip(kinds, parts)])

    make = _maker(columns)
    kinds = [type(column) for column in columns]
    parts = [c.split(1) if isinstance(c, torch.Tensor) else c for c in columns]
    return [Row(row, join) for row in zip(*parts)]


def as_given(data: Any) -> Any:
    """Convert a micro-batch's data to the form that its loader gave.

    Lists in columns are copied, because a model may append to them.
    """
    if isinstance(data, list) and data and isinstance(data[0], Row):
        return data[0].join(list(zip(*(row.parts for row in data))))
    columns = columns_of(data)
    if columns is None:
        return data
    return _maker(columns)([list(c) if isinstance(c, list) else c for c in columns])


def dataset_dicts(data: Any) -> Iterator[dict[str, Any]]:
    """All dataset dicts in a batch of any kind."""
    if isinstance(data, dict):
        yield data
    elif isinstance(data, Row):
        yield from dataset_dicts(list(data.parts))
    elif isinstance(data, (list, tuple)):
        for part in data:
            yield from dataset_dicts(part)


def _maker(columns: Sequence[Any]) -> Callable[[Sequence[Any]], Any]:
    """The constructor of another batch of the same type; a named tuple has its own."""
    return getattr(type(columns), "_make", type(columns))


def _join_like(kind: type) -> Callable[[Sequence[Any]], Any]:
    if issubclass(kind, torch.Tensor):
        return lambda parts: torch.cat(list(parts))
    return list if issubclass(kind, list) else tuple
