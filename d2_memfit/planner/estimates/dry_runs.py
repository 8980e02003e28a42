# Copyright (c) the d2_memfit developers.
"""Dry runs that are made once for several estimates and plans of a job."""

import hashlib
import io
import pickle
import tempfile
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, MutableMapping
from typing import Any, Optional

import numpy as np
import torch

from ...job import Job
from ..dry_run import (
    Allocate,
    Allocation,
    BlockCall,
    Convolution,
    Copy,
    Free,
    Operator,
    Timeline,
    Work,
)

__all__ = ["DryRuns"]

# Keys that no dry run reads: budgets, and how plans are made.
_OF_PLANS = ("BUDGET_GB", "PRESET", "PLAN")

# A batch whose values cannot be read, such as a sparse tensor, or one that contains itself.
_NO_KEY = (NotImplementedError, RecursionError, RuntimeError, TypeError, ValueError)

_CLASSES = {
    (cls.__module__, cls.__qualname__): cls
    for cls in (
        *(Allocate, Allocation, BlockCall, Convolution, Copy, Free, Operator, Timeline, Work),
        *(Counter, defaultdict, torch.Size),
    )
}


class DryRuns:
    """Makes dry runs, each once.

    Two are the same if config, ranks, micro-batches and the other arguments are. What else a job
    has, such as classes, is the same for all jobs that share a ``DryRuns``.

    Args:
        kept: timelines of earlier runs, which grows; written by this class, by key.
    """

    def __init__(self, kept: Optional[MutableMapping[str, bytes]] = None) -> None:
        self.kept: MutableMapping[str, bytes] = {} if kept is None else kept

    def __call__(self, step: Callable[..., Timeline], job: Job, batch: Any, *args: Any) -> Timeline:
        """Call ``train`` or ``evaluate`` of :mod:`~d2_memfit.planner.estimates.steps`."""
        try:
            key = _key(step.__name__, _without_budget(job), job.ranks, batch, args)
        except _NO_KEY:
            return step(job, batch, *args)
        if key in self.kept:
            known = _read(self.kept[key])
            if known is not None:
                return known
        made = step(job, batch, *args)
        self.kept[key] = zlib.compress(pickle.dumps(made, protocol=4), level=1)
        return made


def _without_budget(job: Job) -> str:
    cfg = job.cfg.clone()
    for key in _OF_PLANS:
        dict.pop(cfg.MEMFIT, key)
    return str(cfg)


def _key(*values: Any) -> str:
    digest = hashlib.sha256()
    _add(digest, values)
    return digest.hexdigest()


def _add(digest: Any, value: Any) -> None:
    """Add a value with its type. Where temporary images were is not added."""
    digest.update(f"{type(value).__qualname__}:".encode())
    if isinstance(value, torch.Tensor):
        digest.update(f"{value.dtype} {value.shape}:".encode())
        digest.update(value.detach().cpu().reshape(-1).contiguous().view(torch.uint8).numpy().data)
    elif isinstance(value, np.ndarray) and value.dtype.hasobject:
        _add(digest, value.tolist())
    elif isinstance(value, np.ndarray):
        digest.update(f"{value.dtype} {value.shape}:".encode())
        digest.update(np.ascontiguousarray(value).data)
    elif isinstance(value, dict):
        _add(digest, [*value.items()])
    elif isinstance(value, (list, tuple)):
        for item in value:
            _add(digest, item)
        digest.update(b".")
    elif hasattr(value, "__dict__") and not callable(value):  # what code does is not in it
        _add(digest, vars(value))
    elif not (isinstance(value, str) and value.startswith(tempfile.gettempdir())):
        digest.update(f"{value!r},".encode())


class _Reader(pickle.Unpickler):
    """Reads timelines. Whatever a file says, it makes no other objects."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _CLASSES:
            return _CLASSES[module, name]
        value = vars(torch).get(name) if module == "torch" else None
        if isinstance(value, torch.dtype):
            return value
        raise pickle.UnpicklingError(f"{module}.{name} is not in a timeline")


def _read(data: bytes) -> Optional[Timeline]:
    try:
        read = _Reader(io.BytesIO(zlib.decompress(data))).load()
    except (pickle.UnpicklingError, zlib.error, EOFError, AttributeError, TypeError, ValueError):
        return None
    return read if isinstance(read, Timeline) else None
