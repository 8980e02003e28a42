#!/usr/bin/env python3
# Copyright (c) the d2_memfit developers.
"""Measure the costs and the results of d2_memfit: tools/benchmark.py NAME --help

accumulation     time and memory of accumulation, against plain Detectron2
commands         CPU seconds of commands, against another revision
crowded          memory over iterations, with crowded images under a limit
gradients        distance of accumulated gradients from the full batch's
peers            other libraries that accumulate gradients or find a batch
recovery         cost of recovery from out-of-memory errors
runs             runs of others against what is predicted for them
techniques       savings and costs of each technique, and the guide by impact
zoo              estimates against the memory that Detectron2's zoo publishes
"""

import argparse
import re
import sys
from importlib import import_module

RAW = argparse.RawDescriptionHelpFormatter
NAMES = re.findall(r"^(\w+)   ", __doc__, re.M)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=RAW)
    parser.add_argument("name", choices=NAMES)
    name = parser.parse_args(sys.argv[1:2]).name
    benchmark = import_module(f"benchmarks.{name}")
    parser = argparse.ArgumentParser(name, description=benchmark.__doc__, formatter_class=RAW)
    benchmark.add_arguments(parser)
    benchmark.run(parser.parse_args(sys.argv[2:]))


if __name__ == "__main__":
    main()
