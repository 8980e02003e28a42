# Copyright (c) the d2_memfit developers.
"""One measurement that may fail, and leaves the others alone."""

import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch

from ..memory import release_memory
from .scale import Record

__all__ = ["attempt"]


def attempt(measure: Callable[[], Record], device: torch.device) -> Record:
    """A record, or one that says what went wrong, with nothing left on the device."""
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
