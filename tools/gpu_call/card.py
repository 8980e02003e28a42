# Copyright (c) the d2_memfit developers.
"""What the measurements share: the card, their jobs, and its memory.

With GPU_REHEARSE=1 the card is the made-up one of the tests, and everything is small.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Optional

import torch

from d2_memfit.common.units import GB
from d2_memfit.job import Job, WorstCase
from d2_memfit.measure.items import ITEMS, Item, Record, Scale
from d2_memfit.measure.jobs import measure
from d2_memfit.measure.peaks import outside_bytes

ROOT = Path(__file__).resolve().parents[2]
PREPARED = ROOT / ".gpu"  # by prepare.py
REHEARSE = bool(os.environ.get("GPU_REHEARSE"))

CARD = torch.device("cuda:0")
SCALE = Scale.for_device(torch.device("cpu") if REHEARSE else CARD)


@contextmanager
def card() -> Iterator[None]:
    """While open, the card is there; in a rehearsal, the made-up one."""
    if not REHEARSE:
        yield
        return
    sys.path.append(str(ROOT / "tests"))
    from made_up_card import made_up_card  # type: ignore[import-not-found]

    torch.set_flush_denormal(True)
    with made_up_card():
        yield


def full_size(size: Any, small: Any) -> Any:
    return small if REHEARSE else size


def job_of(num_images: int, batch: Optional[WorstCase] = None, **settings: Any) -> Job:
    """Mask R-CNN R50-FPN with random weights, as measure-gpu makes it."""
    settings = {"SOLVER.IMS_PER_BATCH": num_images, **settings}
    job = Item("more", "", settings=settings).job(CARD, SCALE)
    return job.with_batch(batch) if batch else job


def measured(key: str) -> Record:
    """Measure one of measure-gpu's items."""
    return measure(next(item for item in ITEMS if item.key == key), {}, CARD, SCALE)


def outside() -> Record:
    """Memory that the card says is taken, in all, and outside the allocator."""
    free, total = torch.cuda.mem_get_info(CARD)
    return {"taken_gb": (total - free) / GB, "outside_gb": outside_bytes(CARD) / GB}
