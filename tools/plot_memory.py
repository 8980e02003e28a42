#!/usr/bin/env python3
# Copyright (c) the d2_memfit developers.
"""Draw the memory of a run from the files in its OUTPUT_DIR.

    tools/plot_memory.py OUTPUT_DIR [--to FOLDER]

Writes memory.png and memory.html. Train with MEMFIT.MONITOR.PERIOD 20 for the lines, and with
MEMFIT.MONITOR.SNAPSHOT_ITER 100 for the owners of the memory at the peak.
"""

import argparse
from pathlib import Path

from d2_memfit.errors import exit_on_error
from d2_memfit.report import read_run, write_html, write_png


@exit_on_error
def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("output_dir", help="OUTPUT_DIR of a run")
    parser.add_argument("--to", type=Path, help="folder for the pictures, OUTPUT_DIR unless told")
    args = parser.parse_args()
    run = read_run(args.output_dir)
    folder = args.to or Path(args.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    for name, write in (("memory.png", write_png), ("memory.html", write_html)):
        write(run, folder / name)
        print(folder / name)


if __name__ == "__main__":
    main()
