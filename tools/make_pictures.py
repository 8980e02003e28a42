#!/usr/bin/env python3
# Copyright (c) the d2_memfit developers.
"""Draw the pictures of the documentation from what is in the repository.

    tools/make_pictures.py [NAME ...]

steps        docs/plan_steps.png: who has the memory before a plan, and after each of its steps
plan_page    docs/plan_page.png: the page of `d2-memfit plan --html`
memory_page  docs/memory_page.png: the page of d2-memfit plot, of a short run on Coins

All of them take some minutes on one core. The pages need Chromium.
"""

import argparse
from pathlib import Path

from pictures import pages, steps

DOCS = Path(__file__).resolve().parents[1] / "docs"
PICTURES = {
    "steps": (steps.draw, "plan_steps.png"),
    "plan_page": (pages.draw_plan_page, "plan_page.png"),
    "memory_page": (pages.draw_memory_page, "memory_page.png"),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", choices=[*PICTURES, "all"], default="all")
    parser.add_argument("--to", type=Path, default=DOCS, help="folder for them")
    args = parser.parse_args()
    for name in PICTURES if "all" in args.names else args.names:
        draw, file = PICTURES[name]
        draw(args.to / file)
        print(args.to / file)


if __name__ == "__main__":
    main()
