#!/usr/bin/env python3
# Copyright (c) the d2_memfit developers.
"""Measure the costs and the results of d2_memfit.

tools/benchmark.py accumulation     time and memory of accumulation, against plain Detectron2
tools/benchmark.py crowded          memory over iterations, with crowded images under a limit
tools/benchmark.py crowds           memory, time and results by the number of objects in an image
tools/benchmark.py denoising        denoising queries of crowded images, with and without a limit
tools/benchmark.py dry_runs         time and RAM of dry runs
tools/benchmark.py edges            plans in budgets that are just too small, run under a limit
tools/benchmark.py estimates        estimates against the same jobs run on the CPU
tools/benchmark.py gradients        distance of accumulated gradients from the full batch's
tools/benchmark.py other_loops      accumulated gradients of other trainers
tools/benchmark.py overhead         CPU seconds of an iteration beside those of the model
tools/benchmark.py peers            other libraries that accumulate gradients or find a batch
tools/benchmark.py plans            plans against the best of all choices
tools/benchmark.py recovery         cost of recovery from out-of-memory errors
tools/benchmark.py runs             runs of others against what is predicted for them
tools/benchmark.py selective        blocks chosen one by one against checkpoints of all blocks
tools/benchmark.py techniques       savings and costs of each technique
tools/benchmark.py times            predicted times against published ones
tools/benchmark.py zoo              estimates against the memory that Detectron2's zoo publishes
"""

import argparse
from importlib import import_module

BENCHMARKS = (
    "accumulation",
    "crowded",
    "crowds",
    "denoising",
    "dry_runs",
    "edges",
    "estimates",
    "gradients",
    "other_loops",
    "overhead",
    "peers",
    "plans",
    "recovery",
    "runs",
    "selective",
    "techniques",
    "times",
    "zoo",
)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="benchmark", required=True)
    for name in BENCHMARKS:
        benchmark = import_module(f"benchmarks.{name}")
        command = commands.add_parser(
            name,
            description=benchmark.__doc__,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        benchmark.add_arguments(command)
        command.set_defaults(run=benchmark.run)
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
