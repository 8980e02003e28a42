#!/usr/bin/env python3
"""Write docs/GPU.md and the plots beside docs/gpu/*.json, which `d2-memfit measure-gpu` makes."""

import json
from pathlib import Path
from typing import Any

from d2_memfit.errors import ConfigError
from d2_memfit.measure.report import draw, markdown

DOCS = Path(__file__).resolve().parents[1] / "docs"
PAGE = DOCS / "GPU.md"
FOLDER = DOCS / "gpu"

INTRODUCTION = """# Cards, measured

This page shows the cards that were measured, and how to measure yours. One command checks whether
d2_memfit is right on a GPU, and how fast the card is. It compares the memory of jobs with their
estimates, and measures the cost of recovery, techniques and trainers. It needs no dataset, no
weights and no compiled operator. It ends after 8 minutes with the results that it has by then.

```
d2-memfit measure-gpu
```

The result is `<card>.json` with all figures, `<card>.md` and `<card>.png` that show them, and
`<card>.yaml`, which `--device` of `d2-memfit plan` takes. To add your card to this page, put the
JSON file into `docs/gpu/`, run `python tools/make_gpu_page.py`, and open a pull request.

Written by `python tools/make_gpu_page.py`.
"""
NOTHING = "No card measured yet."


def measured(folder: Path) -> dict[str, dict[str, Any]]:
    """What is in a folder, by the name of the file without its ending.

    Raises:
        ConfigError: a file is of a rehearsal.
    """
    results = {}
    for path in sorted(folder.glob("*.json")):
        results[path.stem] = json.loads(path.read_text())
        if results[path.stem]["machine"][0]["rehearsal"]:
            raise ConfigError(f"{path} is of a rehearsal on a CPU: this page shows GPUs")
    return results


def page(results: dict[str, dict[str, Any]]) -> str:
    cards = [f"{markdown(r)}\n![{name}](gpu/{name}.png)\n" for name, r in results.items()]
    return "\n".join([INTRODUCTION, *(cards or [f"{NOTHING}\n"])])


def main() -> None:
    results = measured(FOLDER)
    for name, result in results.items():
        draw(result, FOLDER / f"{name}.png")
    PAGE.write_text(page(results))


if __name__ == "__main__":
    main()
