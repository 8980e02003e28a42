#!/usr/bin/env python3
# Copyright (c) the d2_memfit developers.
"""Write the section "Measure your card" of docs/MACHINES.md, and plots, from docs/gpu/*.jsonl.

`d2-memfit measure-gpu` makes these files.
"""

from pathlib import Path

from pages import write_section

from d2_memfit.errors import ConfigError
from d2_memfit.measure.results import TITLES, Results, markdown, ratio

DOCS = Path(__file__).resolve().parents[1] / "docs"
PAGE = DOCS / "MACHINES.md"
FOLDER = DOCS / "gpu"

TITLE = "## Measure your card\n\n"
NO_CARD = """\
**No card has been measured yet**: d2_memfit was written on machines without a GPU. This section
says how to measure your card, and what was tested without one.

"""
HOW_TO = """```bash
d2-memfit measure-gpu --output my_card
```

It needs no dataset, no weights and no compiled operator. First it makes its estimates, on the CPU.
Then it measures for 8 minutes, or for the time of `--minutes`. Each item is measured in a new
process, by 3 to 6 steps. Each record is written at once, to `my_card/measured.jsonl`. To continue,
run the same command again. An error ends only one record.

For a rented card, make the estimates before, on any machine:

```bash
d2-memfit measure-gpu --output my_card --estimate h100     # no GPU; then copy the folder
d2-memfit measure-gpu --output my_card --minutes 9         # there, as often as needed
```

If you have a machine with a card for a few minutes only, without a network or a compiler,
[tools/gpu_call](../tools/gpu_call/README.md) prepares this, the tests that need a card, and more
measurements.

These groups are measured in this order, with random images:

| group | what is measured |
| --- | --- |
| calibration | speeds of the card in each number format |
| outside | context, loaded kernels, workspaces of cuBLAS and cuBLASLt, NCCL's communicators |
| zoo | 12 configs in float32, two images, with evaluation |
| plans | Mask R-CNN with 16 images, planned for and trained on budgets of 4 to 24 GB cards |
| recovery | a batch that does not fit |
| trainers | Detectron2's own trainer, d2_memfit's, and d2_memfit's with recovery |
| zoo amp | the configs of the zoo in mixed precision |
| techniques | each technique alone, with 2 images; and after the next two groups, with 8 images |
| transformers | ViTDet-B, Deformable DETR and RT-DETR in both precisions, from a checkout |
| presets | presets of Mask R-CNN R50-FPN under their budgets; at the end, those of X101-FPN |
| fragments | 30 iterations with images of many sizes under budgets, with and without offload |

Each record has peaks of allocated, active and reserved memory, memory outside the allocator,
allocation retries, and seconds per iteration. CUDA reports the memory outside the allocator for the
whole card, so nothing else may run on it.

The folder also contains `<card>.md`, `<card>.yaml` for the option `--device` of `d2-memfit plan`,
and `<card>.json`. The last one is one line with all ratios of expected to measured values: send it
in an issue.
To add your card to this section, copy `measured.jsonl` to `docs/gpu/<card>.jsonl`, run
`python tools/make_gpu_page.py`, and open a pull request.

"""
TRIED = """### Tested without a card

- `pytest tests/gpu` also runs the tests that need a card on a simulated one. Its tensors are on the
  CPU, its memory is counted, and a limit raises out-of-memory errors. This finds wrong names,
  arguments and order, but does not show the behaviour of CUDA.
- Injected faults, such as memory of a library or a budget that is not enforced, make the checks of
  these tests fail.
- `d2-memfit measure-gpu --device cpu` rehearses each group except transformers with a small job.
  The jobs of that group were estimated at full size, but none of their steps was computed.
- No CUDA kernel has run. `pytest -m gpu tests/gpu` on a card runs the same tests there.
"""


def measured(folder: Path) -> dict[str, Results]:
    """Results in a folder, by file name without suffix.

    Raises:
        ConfigError: a file comes from a rehearsal.
    """
    results = {}
    for path in sorted(folder.glob("*.jsonl")):
        results[path.stem] = Results.read(path)
        if results[path.stem].machine["rehearsal"]:
            raise ConfigError(f"{path} is of a rehearsal on a CPU: this section shows GPUs")
    return results


def text(results: dict[str, Results]) -> str:
    """The section."""
    cards = [f"{markdown(r)}\n![{name}](gpu/{name}.png)\n\n" for name, r in results.items()]
    parts = [NO_CARD, HOW_TO, TRIED] if not cards else [HOW_TO, *cards]
    return "".join([TITLE, *parts])


def draw(results: Results, path: Path) -> None:
    """Draw expected memory and time against what was measured."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, all_axes = pyplot.subplots(1, 3, figsize=(18, 6), layout="constrained")
    values = {"allocated_gb": "allocated, GB", "device_gb": "of the device, GB", "seconds": "s"}
    for axes, (value, title) in zip(all_axes, values.items()):
        for group, mark in zip(TITLES, "os^vDPX<>*"):
            points = [
                (measured[value], expected[value])
                for _, expected, measured in results.of_group(group)
                if ratio(expected, measured, value) is not None
            ]
            if points:
                axes.scatter(*zip(*points), marker=mark, label=group)
        most = max([1e-3, *axes.get_xlim(), *axes.get_ylim()])
        axes.plot([0, most], [0, most], color="gray", linewidth=1, label="equal")
        axes.legend()
        axes.set(title=title, xlabel="measured", ylabel="expected")
    figure.suptitle(results.machine["card"])
    figure.savefig(path, dpi=100)
    pyplot.close(figure)


def main() -> None:
    results = measured(FOLDER)
    for name, result in results.items():
        draw(result, FOLDER / f"{name}.png")
    write_section(PAGE, "measured", "make_gpu_page.py", text(results))


if __name__ == "__main__":
    main()
