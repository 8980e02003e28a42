# Copyright (c) the d2_memfit developers.
"""The pages that d2_memfit writes, as Chromium shows them."""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from .owners import RECIPE

ROOT = Path(__file__).resolve().parents[2]


def draw_plan_page(path: Path) -> None:
    """Draw `d2-memfit plan --html`, for 4 images in an iteration."""
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "plan.html"
        command = ["plan", "--config-file", RECIPE, "--card", "6GB", "--device", "cuda"]
        run("-m", "d2_memfit", *command, "--html", page, "SOLVER.IMS_PER_BATCH", 4)
        photograph(page, path, 1160, 1540)


def draw_memory_page(path: Path) -> None:
    """Draw what d2-memfit plot makes of a run that its budget is too small for."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run(ROOT / "projects" / "Coins" / "make_dataset.py", folder / "coins")
        run("-m", "pictures.monitored_run", folder)
        run("-m", "d2_memfit", "plot", folder / "run")
        photograph(folder / "run" / "memory.html", path, 1160, 1250)


def run(*command: object) -> None:
    subprocess.run(
        [sys.executable, "-W", "ignore", *map(str, command)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd=ROOT / "tools",
        check=True,
    )


def photograph(page: Path, path: Path, width: int, height: int) -> None:
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        sys.exit("error: there is no Chromium to open pages with")
    subprocess.run(
        [
            *(chromium, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"),
            *("--virtual-time-budget=5000", f"--window-size={width},{height}"),
            *(f"--screenshot={path.absolute()}", f"file://{page}"),
        ],
        stderr=subprocess.DEVNULL,
        check=True,
    )
