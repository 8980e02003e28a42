#!/usr/bin/env python3
# Copyright (c) the d2_memfit developers.
"""Write docs/GPU.md and plots from docs/gpu/*.json, which `d2-memfit measure-gpu` makes."""

import json
from pathlib import Path
from typing import Any

from d2_memfit.errors import ConfigError
from d2_memfit.measure.tables import draw, markdown

DOCS = Path(__file__).resolve().parents[1] / "docs"
PAGE = DOCS / "GPU.md"
FOLDER = DOCS / "gpu"

INTRODUCTION = """# Cards, measured

This page shows the cards that were measured, and how to measure yours. One command measures how
fast a GPU is. It compares the memory of jobs with their estimates, and measures the cost of
recovery, techniques and trainers. It needs no dataset, no weights and no compiled operator. It ends
after 8 minutes with the results that it has by then.

```
d2-memfit measure-gpu
```

What is measured, in this order, with random images:

- calibration: speeds of the card in each number format
- outside: context, loaded kernels, workspaces of cuBLAS and cuBLASLt, and NCCL's communicators
  where there are several GPUs; against the card's device file
- zoo: memory of 12 configs against their estimates
- plans: Mask R-CNN planned for a budget and trained under it, in float32 and with mixed precision:
  memory and seconds per iteration, predicted and measured
- blocks: the same with blocks that a plan chose to recompute or to offload
- crowded: out-of-memory errors with a crowded image in each window, with micro-batches of four
  images and with a cost model
- presets: 6 presets under the memory of their card
- recovery, techniques, plain: time and memory of recovery, of each technique, and of Detectron2's
  own trainer

In a checkout, `pytest -m gpu tests/gpu` tests whether d2_memfit is right on the GPU: steps,
accumulation, recovery, gradients and budgets.

The result is `<card>.json` with all figures, `<card>.md` and `<card>.png` that show them, and
`<card>.yaml`, which `--device` of `d2-memfit plan` takes. To add your card to this page, put the
JSON file into `docs/gpu/`, run `python tools/make_gpu_page.py`, and open a pull request.

Written by `python tools/make_gpu_page.py`.
"""
NOTHING = "No card measured yet."


def measured(folder: Path) -> dict[str, dict[str, Any]]:
    """Results in a folder, by file name without suffix.

    Raises:
        ConfigError: a file comes from a rehearsal.
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
