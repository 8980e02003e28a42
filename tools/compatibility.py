#!/usr/bin/env python3
# Copyright (c) the d2_memfit developers.
"""Run d2_memfit in public projects, and write the tables of docs/COMPATIBILITY.md.

tools/compatibility.py --projects FOLDER [--only NAME ...] [--output docs/COMPATIBILITY.md]

FOLDER has the projects' trees, named like their repositories. You can name several folders, such as
Detectron2's own projects/. Nothing is fetched, and no tree is changed. Each project runs in its own
process, with a limit of time. Projects that need a Detectron2 newer than v0.6 run with
--python-main. With --results, a later call runs only the projects of --only, and keeps the other
rows.
"""

import argparse
import contextlib
import json
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

TOOLS = Path(__file__).resolve().parent
PAGE = TOOLS.parent / "docs" / "COMPATIBILITY.md"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--projects", type=Path, nargs="+", required=True, metavar="FOLDER")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="rows of the table")
    parser.add_argument("--output", type=Path, default=PAGE, help="file for the page")
    parser.add_argument("--results", type=Path, help="JSON file that keeps all findings")
    parser.add_argument("--python-main", default=sys.executable, help="with Detectron2 main")
    parser.add_argument("--timeout", type=float, default=1800, help="seconds for each project")
    args = parser.parse_args()

    from compatibility_checks.project import PROJECTS
    from compatibility_checks.table import page

    known = args.results is not None and args.results.exists()
    results: dict[str, Any] = json.loads(args.results.read_text()) if known else {}
    for name, project in PROJECTS.items():
        folder = next((f for f in args.projects if (f / project.tree).is_dir()), None)
        if folder is None:
            print(f"{name}: no tree {project.tree}", file=sys.stderr)
        if folder is None or (args.only and name not in args.only):
            continue
        python = args.python_main if project.needs_main else sys.executable
        results[name] = {
            "commit": commit_of(folder / project.tree),
            "findings": examined(name, folder.resolve(), python, args),
        }
        if args.results is not None:
            args.results.write_text(json.dumps(results, indent=1))
    args.output.write_text(page(PAGE.read_text(), results, versions()))


def examined(name: str, folder: Path, python: str, args: argparse.Namespace) -> dict[str, Any]:
    """The doctor's findings by line; "end" says why its process ended early."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    paths = [str(TOOLS), str(TOOLS.parent), env.get("PYTHONPATH", "")]
    env["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    error = "the time was over"
    with tempfile.NamedTemporaryFile("r") as file:
        child = ("-m", "compatibility_checks.child", name, str(folder))
        with contextlib.suppress(subprocess.TimeoutExpired):
            done = subprocess.run(
                [python, *child, file.name],
                env=env,
                check=False,
                stderr=subprocess.PIPE,
                text=True,
                timeout=args.timeout,
            )
            last = "".join(done.stderr.splitlines()[-1:])
            error = f"status {done.returncode}: {last}" if done.returncode else ""
        findings = [json.loads(line) for line in file]
    if error:
        findings.append({"what": "end", "is_well": False, "text": error})
    for finding in findings:
        print(name, *finding.values(), sep=" | ", flush=True)
    return {finding["what"]: finding for finding in findings}


def commit_of(tree: Path) -> str:
    """Commit of a clone."""
    command = ["git", "-C", str(tree), "rev-parse", "HEAD"]
    found = subprocess.run(command, check=False, capture_output=True, text=True)
    return found.stdout.strip() or "unknown"


def versions() -> str:
    import detectron2
    import torch

    python = platform.python_version()
    return (
        f"Made with d2_memfit at {commit_of(TOOLS.parent)[:7]}, Detectron2 "
        f"{detectron2.__version__}, PyTorch {torch.__version__} and Python {python}, on "
        f"{os.cpu_count()} CPU cores."
    )


if __name__ == "__main__":
    main()
