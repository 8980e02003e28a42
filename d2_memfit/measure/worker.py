# Copyright (c) the d2_memfit developers.
"""A process that makes one measurement: ``python -m d2_memfit.measure.worker JOB DEVICE``.

It prints each record as one line at once. A CUDA error ends only this process.
"""

import json
import logging
import sys

from ..common.library_warnings import ignore_warnings_of_libraries

__all__ = ["MARK"]

MARK = "d2_memfit record: "  # other lines come from libraries


def main(job: str, device_name: str) -> None:
    ignore_warnings_of_libraries()
    import torch

    from ..memory import use_expandable_segments
    from .jobs import JOBS
    from .scale import Scale

    logging.getLogger("d2_memfit").setLevel(logging.ERROR)  # out-of-memory errors are intended
    use_expandable_segments()  # as in training under a budget
    device = torch.device(device_name)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    for record in JOBS[job](device, Scale.of(device)):
        print(MARK + json.dumps(record), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
