#!/usr/bin/env python3
# Copyright (c) the d2_memfit developers.
"""Measure the costs and the results of d2_memfit.

tools/benchmark.py accumulation     time and memory of accumulation, against plain Detectron2
tools/benchmark.py commands         CPU seconds of commands, against another revision
tools/benchmark.py crowded          memory over iterations, with crowded images under a limit
tools/benchmark.py crowds           memory, time and results by the number of objects in an image
tools/benchmark.py gradients        distance of accumulated gradients from the full batch's
tools/benchmark.py overhead         CPU seconds of an iteration beside those of the model
tools/benchmark.py peers            other libraries that accumulate gradients or find a batch
tools/benchmark.py recovery         cost of recovery from out-of-memory errors
tools/benchmark.py runs             runs of others against what is predicted for them
tools/benchmark.py techniques       savings and costs of each technique, and the guide by impact
tools/benchmark.py zoo              estimates against the memory that Detectron2's zoo publishes
"""

import argparse
from importlib import import_module
from typing import Any

BENCHMARKS = (
    "accumulation",
    "commands",
    "crowded",
    "crowds",
    "gradients",
    "overhead",
    "peers",
    "recovery",
    "runs",
    "techniques",
    "zoo",
)


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
    form = argparse.RawDescriptionHelpFormatter
    parser = Parser(description=__doc__, formatter_class=form)
    commands = parser.add_subparsers(dest="benchmark", required=True)
    for name in BENCHMARKS:
        commands.add_parser(name, formatter_class=form).name = name
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
