# Copyright (c) the d2_memfit developers.
"""What tests share: small models and images, the files of a run, processes."""

import json
import os
import subprocess
import sys
from pathlib import Path

from d2_memfit.measure.tiny import (
    every_anchor_counts,
    image,
    images,
    parameters,
    relative_difference,
    tiny_cfg,
    tiny_model,
)

__all__ = [
    "ROOT",
    "every_anchor_counts",
    "image",
    "images",
    "import_from",
    "parameters",
    "read_metrics",
    "relative_difference",
    "run_process",
    "tiny_cfg",
    "tiny_model",
]

ROOT = Path(__file__).resolve().parents[1]


def read_metrics(output_dir):
    """metrics.json as a list of dicts."""
    return [json.loads(line) for line in (Path(output_dir) / "metrics.json").open()]


def run_process(command, timeout_s=180, **kwargs):
    """Run a command to its end in a process that can import what this one can."""
    return subprocess.run(
        [str(c) for c in command],
        check=False,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        **{"env": {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}, **kwargs},
    )


def import_from(folder):
    """Make a script's folder importable, as it is when the script runs."""
    if str(ROOT / folder) not in sys.path:
        sys.path.insert(0, str(ROOT / folder))
