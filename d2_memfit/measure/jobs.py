# Copyright (c) the d2_memfit developers.
"""The process that estimates or measures items, of the card alone or of a job.

``python -m d2_memfit.measure.jobs STAGE DEVICE MODEL`` imports everything, then reads JSON from its
input: the keys of items, each with the settings of its plan. It prints each record at once, as one
line.
"""

import json
import logging
import platform
import sys
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from .. import compat
from ..memory import device_and_software, return_large_blocks, use_expandable_segments
from ..planner.device import DeviceModel
from .calibration import calibrate
from .items import ITEMS, Item, Record, Scale, expected
from .outside import measure_outside
from .results import MACHINE
from .steps import measured, recovered, with_fragments
from .worker import say

__all__ = ["error_record", "measure"]


def measure(item: Item, settings: Mapping[str, Any], device: torch.device, scale: Scale) -> Record:
    """Measure an item.

    Args:
        settings: of a plan, in addition to the item's.
    """
    if item.group == "machine":
        torch.zeros(1, device=device)  # it answers
        here = device_and_software(device)
        return {
            "date": time.strftime("%Y-%m-%d"),
            "rehearsal": device.type == "cpu",
            **{"card": here.pop("device"), "pytorch": here.pop("torch"), **here},
            "detectron2": "main" if compat.SAVES_INNER_TRAINER else "v0.6",
            "python": platform.python_version(),
        }
    if item.group == "calibration":
        return calibrate(device, scale.seconds)
    if item.group == "outside":
        return {"rows": list(measure_outside(device, scale))}
    job = item.job(device, scale).with_settings(settings)
    run = {"fragments": with_fragments, "recovery": recovered}.get(item.group, measured)
    return run(item, job, device, scale)


def error_record(error: BaseException) -> Record:
    text = " ".join(str(error).split())[:500]
    last = traceback.extract_tb(error.__traceback__)[-1]
    where = Path(last.filename).name
    return {"error": f"{type(error).__name__}: {text} ({where}:{last.lineno})"}


def main(stage: str, device_name: str, model_name: str) -> None:
    logging.getLogger("d2_memfit").setLevel(logging.ERROR)  # out-of-memory errors are intended
    use_expandable_segments()  # as in training under a budget
    return_large_blocks()  # on a CPU, so that a limit is of memory in use
    items = {item.key: item for item in ITEMS}
    given = json.loads(sys.stdin.read() or "{}")  # nothing, if it is not needed
    # A process that waits has no CUDA context, whose memory would be measured with an item's.
    device = torch.device(device_name)
    if device.type == "cuda" and stage == "measured":
        torch.cuda.set_device(device)
    scale = Scale.for_device(device)
    model = DeviceModel.choose(model_name, device_name) if stage == "expected" else None
    for key, settings in given.items():
        try:
            if model is not None:
                record = expected(items[key], device, model, scale)
            else:
                record = measure(items[key], settings, device, scale)
        except Exception as e:
            if key == MACHINE:
                raise
            record = error_record(e)
        say({"stage": stage, "item": key, **record})


if __name__ == "__main__":
    main(*sys.argv[1:])
