#!/usr/bin/env python3
# Copyright (c) the d2_memfit developers.
"""Remake the figures of README.md and docs/, or say how old they are.

    tools/figures.py            remake the quick ones, and print the age of the others
    tools/figures.py --check    the same; exit with status 1 if a quick one was not what is made
    tools/figures.py --all      remake all of them, which takes hours

A figure is a picture, a file of data, or a page with tables that a command writes or prints. Its
age is the date of its last commit, and the number of commits to its sources since.
"""

import argparse
import io
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image

ROOT = Path(__file__).resolve().parents[1]
PLANNER = ("d2_memfit/planner", "d2_memfit/job", "d2_memfit/techniques")


class Figure(NamedTuple):
    """What one command makes.

    Attributes:
        files: the files, relative to the repository.
        command: a script and its arguments; "" is drawn by hand.
        sources: files and folders that the figure is made from, in addition to the script.
        is_quick: whether it takes seconds, so that each change remakes it.
        writes: whether the command writes the files; otherwise its tables are copied into the page.
    """

    files: tuple[str, ...]
    command: str
    sources: tuple[str, ...] = ()
    is_quick: bool = False
    writes: bool = True


def quick(files: tuple[str, ...], command: str) -> Figure:
    return Figure(files, command, is_quick=True)


def copied(page: str, command: str, *sources: str) -> Figure:
    return Figure((page,), command, sources, writes=False)


FIGURES = (
    quick(("docs/CONFIG.md",), "tools/make_config_reference.py"),
    quick(("docs/HOW_IT_WORKS.md",), "tools/make_map.py"),
    quick(("docs/crowded.png",), "tools/benchmark.py crowded --draw"),
    quick(
        ("docs/crowds.png", "docs/TECHNIQUES.md", "docs/RECOVERY.md"),
        "tools/benchmark.py crowds --draw",
    ),
    quick(("docs/BENCHMARK.md", "README.md"), "tools/benchmark.py peers --report"),
    Figure(
        ("docs/TECHNIQUES.md", "docs/knobs.png", "docs/OUT_OF_MEMORY.md"),
        "tools/make_knobs.py",
        PLANNER,
    ),
    Figure(("docs/plan_steps.png",), "tools/make_pictures.py steps", PLANNER),
    Figure(("docs/plan_page.png",), "tools/make_pictures.py plan_page", PLANNER),
    Figure(
        ("docs/memory_page.png",),
        "tools/make_pictures.py memory_page",
        ("d2_memfit/report", "d2_memfit/memory"),
    ),
    Figure(("README.md",), "tools/make_readme_table.py", PLANNER),
    Figure(("docs/PRESETS.md",), "tools/make_presets.py", PLANNER),
    Figure(
        ("docs/crowded.jsonl",),
        "tools/benchmark.py crowded",
        ("d2_memfit/engine", "d2_memfit/iteration"),
    ),
    Figure(
        ("docs/crowds.jsonl",),
        "tools/benchmark.py crowds",
        ("tools/benchmarks/crowds", "d2_memfit/techniques", "d2_memfit/engine"),
    ),
    Figure(
        ("docs/benchmark.jsonl",),
        "tools/benchmark.py peers",
        ("tools/benchmarks/peers", "d2_memfit/engine", "d2_memfit/iteration"),
    ),
    Figure(
        ("docs/HOW_ACCURATE.md",),
        "tools/benchmark.py runs --projects FOLDER --page docs/HOW_ACCURATE.md",
        ("tools/benchmarks/runs", *PLANNER),
    ),
    Figure(
        ("docs/COMPATIBILITY.md",),
        "tools/compatibility.py FOLDER",
        ("tools/compatibility_checks", "d2_memfit/engine"),
    ),
    copied("docs/ACCUMULATION.md", "tools/benchmark.py accumulation", "d2_memfit/engine"),
    copied("docs/ACCUMULATION.md", "tools/benchmark.py gradients", "d2_memfit/counts"),
    copied("docs/ACCUMULATION.md", "tools/benchmark.py other_loops", "d2_memfit/counts"),
    copied("docs/ACCUMULATION.md", "tools/benchmark.py overhead", "d2_memfit/iteration"),
    copied("docs/PLANNER.md", "tools/benchmark.py certificate", "d2_memfit/certificate"),
    copied("docs/HOW_ACCURATE.md", "tools/benchmark.py dry_runs", "d2_memfit/planner"),
    copied("docs/HOW_ACCURATE.md", "tools/benchmark.py estimates", "d2_memfit/planner"),
    copied("docs/HOW_ACCURATE.md", "tools/benchmark.py plans", "d2_memfit/planner"),
    copied("docs/PLANNER.md", "tools/benchmark.py selective", "d2_memfit/techniques"),
    copied("docs/HOW_ACCURATE.md", "tools/benchmark.py times", "d2_memfit/planner"),
    copied("docs/HOW_ACCURATE.md", "tools/benchmark.py zoo", "d2_memfit/planner"),
    copied("docs/RECOVERY.md", "tools/benchmark.py recovery", "d2_memfit/engine"),
    copied("docs/RELIABILITY.md", "tools/benchmark.py edges", "d2_memfit/planner"),
    copied("docs/TECHNIQUES.md", "tools/benchmark.py denoising", "d2_memfit/techniques"),
    copied("docs/TECHNIQUES.md", "tools/benchmark.py techniques", "d2_memfit/techniques"),
    Figure(("docs/how_it_works.svg", "docs/transaction.svg"), ""),
)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="status 1 if a quick one is stale")
    parser.add_argument("--all", action="store_true", help="remake the slow ones too")
    args = parser.parse_args()
    stale = []
    for figure in FIGURES:
        if figure.is_quick:
            stale += remade(figure, keep_old=args.check)
        elif args.all and figure.writes and "FOLDER" not in figure.command and figure.command:
            remade(figure)
        else:
            print(f"{age(figure)}: {', '.join(figure.files)}  {figure.command or 'by hand'}")
    for file in stale:
        print(f"{file} {'is stale: run tools/figures.py' if args.check else 'is remade'}")
    return int(args.check and bool(stale))


def remade(figure: Figure, keep_old: bool = False) -> list[str]:
    """Run a figure's command; return the files that are not what they were.

    Args:
        keep_old: leave the files as they were.

    Raises:
        subprocess.CalledProcessError: the command failed.
    """
    before = {file: (ROOT / file).read_bytes() for file in figure.files}
    subprocess.run([sys.executable, "-W", "ignore", *figure.command.split()], cwd=ROOT, check=True)
    changed = []
    for file, old in before.items():
        new = (ROOT / file).read_bytes()
        is_same = same_picture(old, new) if file.endswith(".png") else old == new
        if not is_same:
            changed.append(file)
        if keep_old or is_same:
            (ROOT / file).write_bytes(old)
    return changed


def same_picture(old: bytes, new: bytes) -> bool:
    """Whether two pictures look alike: fonts differ a little between machines."""
    pixels = [Image.open(io.BytesIO(data)).convert("L") for data in (old, new)]
    if pixels[0].size != pixels[1].size:
        return False
    first, second = (np.asarray(x, float) for x in pixels)
    return bool(np.abs(first - second).mean() < 2)  # of 255


def age(figure: Figure) -> str:
    """Date of the last commit to the figure, and the commits to its sources since.

    In pages, only commits that change a figure in a table count.
    """
    is_page = figure.files[0].endswith(".md")
    in_tables = ["-G", r"^\|.*[0-9]"] if is_page else []
    files = figure.files[:1] if is_page else figure.files
    try:
        last = git("log", "-1", "--format=%H %cs", *in_tables, "--", *files).split()
    except subprocess.CalledProcessError:  # no commit, or no repository
        last = []
    if not last:
        return "not committed"
    sources = [*figure.sources, *figure.command.split()[:1]]
    since = git("rev-list", "--count", f"{last[0]}..HEAD", "--", *sources) if sources else "0"
    return f"{last[1]}, {since} commits of its sources since"


def git(*args: str) -> str:
    command = ["git", "-C", str(ROOT), *args]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
