#!/usr/bin/env python3
# Copyright (c) the d2_memfit developers.
"""Measure this machine's GPU for estimates: about a minute, with nothing else running on it.

    tools/calibrate_device.py my_gpu.yaml
    d2-memfit plan --config-file FILE --card 6GB --device my_gpu.yaml

Without a GPU it measures the CPU's speed.
"""

from d2_memfit.common.library_warnings import ignore_warnings_of_libraries

ignore_warnings_of_libraries()

import argparse
from pathlib import Path

import torch
import yaml

from d2_memfit.common.files import check_outputs, output_file
from d2_memfit.errors import exit_on_error
from d2_memfit.measure.calibration import calibrate


@exit_on_error
def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("output", type=Path, help="file to write, ending in .yaml")
    args = parser.parse_args()
    if args.output.suffix != ".yaml":
        parser.error(f"the file's name must end in .yaml, got {args.output}")
    check_outputs([args.output])
    values = calibrate(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    comment = f"# Measured with tools/calibrate_device.py, PyTorch {torch.__version__}.\n"
    with output_file(args.output, "w") as file:
        file.write(comment + yaml.safe_dump(values, sort_keys=False))
    print(args.output)


if __name__ == "__main__":
    main()
