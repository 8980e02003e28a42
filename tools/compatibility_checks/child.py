# Copyright (c) the d2_memfit developers.
"""Checks of one project in its own process: python -m compatibility_checks.child.

The parent passes arguments as JSON, and reads a line of JSON for each check.
"""

import contextlib
import gc
import json
import logging
import resource
import sys
import tempfile
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

import torch

__all__ = ["PREFIX", "main"]

PREFIX = "compatibility: "


def main() -> None:
    args = json.loads(sys.argv[1])
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    limit = args["memory_bytes"] if most < 0 else min(args["memory_bytes"], most)
    resource.setrlimit(resource.RLIMIT_AS, (limit, most))
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    from .checks import CHECKS
    from .dataset import register_dataset
    from .planning import PLANNING
    from .project import DATASET
    from .projects import PROJECTS
    from .subject import make_subject

    logging.disable(logging.CRITICAL)
    checks = {**CHECKS, **PLANNING}
    project = next(p for p in PROJECTS if p.name == args["project"])
    folder = Path(args["folder"])
    with tempfile.TemporaryDirectory() as scratch:
        project.prepare(folder / project.tree)
        register_dataset(DATASET, project.data, Path(scratch) / "dataset")
        subject = make_subject(project, folder, Path(scratch))
        warm_up(subject)
        for name in args["checks"]:
            start = time.perf_counter()
            gc.collect()
            try:
                cell = checks[name](subject)
            except Exception as e:
                traceback.print_exc()
                cell = _one_line(e)
            _say({"check": name, "cell": cell, "seconds": time.perf_counter() - start})


def warm_up(subject: Any) -> None:
    """Run once: a process's first run differs from later ones in the last bits, plain or not."""
    with contextlib.suppress(Exception):  # checks will report errors
        subject.run(subject.settings(subject.project.images), plain=True, name="warm_up")


def _say(message: dict[str, Any]) -> None:
    print(PREFIX + json.dumps(message), flush=True)


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split()).replace("|", "/")
    return f"{type(error).__name__}: {text[:200]}"


if __name__ == "__main__":
    main()
