#!/usr/bin/env python3
# Copyright (c) the d2_memfit developers.
"""Run d2_memfit in public projects, and write docs/COMPATIBILITY.md.

tools/compatibility.py --projects FOLDER [--only NAME ...] [--output docs/COMPATIBILITY.md]

FOLDER has the projects' trees, named like their repositories. You can name several folders, such as
Detectron2's own projects/. Nothing is fetched, and no tree is changed. Each project runs in its own
process, with limits of time and memory. Projects that need a Detectron2 newer than v0.6 run with
--python-main. With --results, a later call runs only the projects of --only, and keeps the other
rows.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

TOOLS = Path(__file__).resolve().parent


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--projects", type=Path, nargs="+", required=True, metavar="FOLDER")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="rows of the table")
    parser.add_argument("--checks", nargs="+", metavar="CHECK", help="columns of the table")
    parser.add_argument("--output", type=Path, default=TOOLS.parent / "docs" / "COMPATIBILITY.md")
    parser.add_argument("--results", type=Path, help="JSON file that keeps all cells")
    parser.add_argument("--python-main", default=sys.executable, help="with Detectron2 main")
    parser.add_argument("--timeout", type=float, default=600, help="seconds for each check")
    parser.add_argument("--memory-gb", type=float, default=24, help="address space of a process")
    parser.add_argument("--verbose", action="store_true", help="show tracebacks")
    args = parser.parse_args()

    from compatibility_checks.checks import CHECKS
    from compatibility_checks.planning import PLANNING
    from compatibility_checks.projects import PROJECTS
    from compatibility_checks.table import page

    checks = [*CHECKS, *PLANNING]
    known = args.results is not None and args.results.exists()
    results: dict[str, Any] = json.loads(args.results.read_text()) if known else {}
    for project in PROJECTS:
        folder = next((f for f in args.projects if (f / project.tree).is_dir()), None)
        if folder is None:
            print(f"{project.name}: no tree {project.tree}", file=sys.stderr)
        if folder is None or (args.only and project.name not in args.only):
            continue
        found = results.setdefault(project.name, {"cells": {}})
        found["commit"] = commit_of(folder / project.tree)
        python = args.python_main if project.needs_main else sys.executable
        for name, cell in run(project.name, folder.resolve(), args.checks or checks, python, args):
            found["cells"][name] = cell
            print(f"{project.name} | {name} | {cell}", flush=True)
            if args.results is not None:
                args.results.write_text(json.dumps(results, indent=1))
    rows = [p for p in PROJECTS if p.name in results]
    cells = {name: found["cells"] for name, found in results.items()}
    commits = {name: found["commit"] for name, found in results.items()}
    args.output.write_text(page(rows, cells, checks, commits, versions()))


def run(name: str, folder: Path, checks: list[str], python: str, args: argparse.Namespace) -> Any:
    """Yield (check, cell). If a process ends early, another one runs the remaining checks."""
    from compatibility_checks.child import PREFIX

    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    paths = [str(TOOLS), str(TOOLS.parent), env.get("PYTHONPATH", "")]
    env["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    rest = list(checks)
    while rest:
        task = {
            "project": name,
            "folder": str(folder),
            "checks": rest,
            "memory_bytes": int(args.memory_gb * 2**30),
        }
        command = [python, "-m", "compatibility_checks.child", json.dumps(task)]
        limit = args.timeout * len(rest)
        why = f"not within {limit:.0f} s"
        try:
            process = subprocess.run(
                command, env=env, check=False, capture_output=True, text=True, timeout=limit
            )
            output, why = process.stdout, f"the process ended with {process.returncode}"
            if process.returncode or args.verbose:
                sys.stderr.write(process.stderr[-5000:])
        except subprocess.TimeoutExpired as e:
            output = e.stdout.decode() if e.stdout else ""
        for line in output.splitlines():
            message = json.loads(line[len(PREFIX) :]) if line.startswith(PREFIX) else {}
            if "check" in message:
                rest.remove(message["check"])
                yield message["check"], message["cell"]
        if rest:
            yield rest.pop(0), why


def commit_of(tree: Path) -> str:
    """Commit of a clone, or the content of a file TREE.commit next to another tree."""
    file = tree.with_name(f"{tree.name}.commit")
    if file.is_file():
        return file.read_text().strip()
    command = ["git", "-C", str(tree), "rev-parse", "HEAD"]
    found = subprocess.run(command, check=False, capture_output=True, text=True)
    return found.stdout.strip() or "unknown"


def versions() -> str:
    import detectron2
    import torch

    python = platform.python_version()
    return (
        f"Made with Detectron2 {detectron2.__version__}, PyTorch {torch.__version__} and Python "
        f"{python}, on {os.cpu_count()} CPU cores."
    )


if __name__ == "__main__":
    main()
