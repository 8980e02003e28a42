#!/usr/bin/env python3
# Copyright (c) the d2_memfit developers.
"""Measure the costs and the results of d2_memfit: tools/benchmark.py NAME --help

commands         CPU seconds of commands, against another revision
crowded          memory over iterations, with crowded images under a limit
crowds           losses of many masks, as numbers and as bits
gradients        distance of accumulated gradients from the full batch's
guide            the table of docs/OUT_OF_MEMORY.md
peers            other libraries that accumulate gradients or find a batch
runs             runs of others against what is predicted for them
training         time and memory of accumulation, recovery and techniques
zoo              estimates against the memory that Detectron2's zoo publishes
"""

import argparse
import re
from importlib import import_module
from typing import Any

RAW = argparse.RawDescriptionHelpFormatter
NAMES = re.findall(r"^(\w+)   ", __doc__, re.M)


class Parser(argparse.ArgumentParser):
    """Parser of a benchmark, whose module is imported when its arguments are parsed."""

    name = ""

    def parse_known_args(self, *args: Any) -> Any:  # type: ignore[override]
        if self.name and not self.description:
            benchmark = import_module(f"benchmarks.{self.name}")
            self.description = benchmark.__doc__
            benchmark.add_arguments(self)
            self.set_defaults(run=benchmark.run)
        return super().parse_known_args(*args)


def main() -> None:
    parser = Parser(description=__doc__, formatter_class=RAW)
    commands = parser.add_subparsers(required=True)
    for name in NAMES:
        commands.add_parser(name, formatter_class=RAW).name = name
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
