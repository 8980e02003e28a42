# Copyright (c) the d2_memfit developers.
"""A measurement whose error does not end the other ones."""

import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch

from ..memory import release_memory
from .scale import Record

__all__ = ["attempt"]


def attempt(measure: Callable[[], Record], device: torch.device) -> Record:
    """Return the record of a measurement, or a record of its error, and release its memory."""
    record: Record = {}
    try:
        record = measure()
    except Exception as e:
        text = " ".join(str(e).split())[:500]
        last = traceback.extract_tb(e.__traceback__)[-1]
        where = f"{Path(last.filename).name}:{last.lineno}"
        record = {"error": f"{type(e).__name__}: {text} ({where})"}
    with suppress(RuntimeError):  # after some errors nothing works on a GPU
        release_memory(device)
    return record
