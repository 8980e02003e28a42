# Copyright (c) the d2_memfit developers.
"""The measurement of an item, of the card alone or of a job."""

import platform
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from .. import __version__, compat
from .calibration import calibrate
from .items import Item, Record, Scale
from .outside import measure_outside
from .peaks import outside_bytes
from .steps import measured, recovered, with_fragments

__all__ = ["describe_machine", "error_record", "measure"]

_GB = 2**30


def measure(item: Item, settings: Mapping[str, Any], device: torch.device, scale: Scale) -> Record:
    """Measure an item.

    Args:
        settings: of a plan, in addition to the item's.
    """
    if item.group == "machine":
        return describe_machine(device)
    if item.group == "calibration":
        return calibrate(device, scale.seconds)
    if item.group == "outside":
        return {"rows": list(measure_outside(device, scale))}
    job = item.job(device, scale).with_settings(settings)
    run = {"fragments": with_fragments, "recovery": recovered}.get(item.group, measured)
    return run(item, job, device, scale)


def describe_machine(device: torch.device) -> Record:
    """Describe the machine and versions on which the figures depend."""
    record: Record = {
        "date": time.strftime("%Y-%m-%d"),
        "card": platform.processor() or platform.machine(),
        "rehearsal": device.type == "cpu",
        "d2_memfit": __version__,
        "detectron2": "main" if compat.SAVES_INNER_TRAINER else "v0.6",
        "pytorch": torch.__version__,
        "python": platform.python_version(),
    }
    if device.type == "cuda":
        torch.zeros(1, device=device)
        properties = torch.cuda.get_device_properties(device)
        record.update(
            card=properties.name,
            total_gb=properties.total_memory / _GB,
            outside_at_start_gb=outside_bytes(device) / _GB,
            capability=f"{properties.major}.{properties.minor}",
            cuda=torch.version.cuda,
            cudnn=torch.backends.cudnn.version(),
        )
    return record


def error_record(error: BaseException) -> Record:
    text = " ".join(str(error).split())[:500]
    last = traceback.extract_tb(error.__traceback__)[-1]
    where = f"{Path(last.filename).name}:{last.lineno}"
    return {"error": f"{type(error).__name__}: {text} ({where})"}
