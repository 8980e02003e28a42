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
from collections.abc import Iterator
from pathlib import Path
from typing import Any

TOOLS = Path(__file__).resolve().parent


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--projects", type=Path, nargs="+", required=True, metavar="FOLDER")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="rows of the table")
    parser.add_argument("--output", type=Path, default=TOOLS.parent / "docs" / "COMPATIBILITY.md")
    parser.add_argument("--results", type=Path, help="JSON file that keeps all findings")
    parser.add_argument("--python-main", default=sys.executable, help="with Detectron2 main")
    parser.add_argument("--timeout", type=float, default=1800, help="seconds for each project")
    parser.add_argument("--memory-gb", type=float, default=200, help="address space of a process")
    parser.add_argument("--verbose", action="store_true", help="show tracebacks")
    args = parser.parse_args()

    from compatibility_checks.projects import PROJECTS
    from compatibility_checks.table import page

    known = args.results is not None and args.results.exists()
    results: dict[str, Any] = json.loads(args.results.read_text()) if known else {}
    for project in PROJECTS:
        folder = next((f for f in args.projects if (f / project.tree).is_dir()), None)
        if folder is None:
            print(f"{project.name}: no tree {project.tree}", file=sys.stderr)
        if folder is None or (args.only and project.name not in args.only):
            continue
        python = args.python_main if project.needs_main else sys.executable
        findings = {f["what"]: f for f in run(project.name, folder.resolve(), python, args)}
        commit = commit_of(folder / project.tree)
        results[project.name] = {"commit": commit, "findings": findings}
        if args.results is not None:
            args.results.write_text(json.dumps(results, indent=1))
    rows = [p for p in PROJECTS if p.name in results]
    findings = {name: result["findings"] for name, result in results.items()}
    commits = {name: result["commit"] for name, result in results.items()}
    args.output.write_text(page(rows, findings, commits, versions()))


def run(name: str, folder: Path, python: str, args: argparse.Namespace) -> Iterator[Any]:
    """Yield the doctor's findings; the last one, "end", if its process ended early."""
    from compatibility_checks.child import PREFIX

    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    paths = [str(TOOLS), str(TOOLS.parent), env.get("PYTHONPATH", "")]
    env["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    memory_bytes = int(args.memory_gb * 2**30)
    task = {"project": name, "folder": str(folder), "memory_bytes": memory_bytes}
    command = [python, "-m", "compatibility_checks.child", json.dumps(task)]
    why = ""
    try:
        process = subprocess.run(
            command, env=env, check=False, capture_output=True, text=True, timeout=args.timeout
        )
        output = process.stdout
        if process.returncode:
            why = f"the process ended with {process.returncode}"
        if process.returncode or args.verbose:
            sys.stderr.write(process.stderr[-5000:])
    except subprocess.TimeoutExpired as e:
        output, why = e.stdout.decode() if e.stdout else "", f"not within {args.timeout:.0f} s"
    for line in output.splitlines():
        if line.startswith(PREFIX):
            finding = json.loads(line[len(PREFIX) :])
            print(
                f"{name} | {finding['is_well']} | {finding['what']}: {finding['text']}", flush=True
            )
            yield finding
    if why:
        print(f"{name} | {why}", flush=True)
        yield {"what": "end", "is_well": False, "text": why}


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
