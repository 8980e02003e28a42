# Copyright (c) the d2_memfit developers.
"""Memory over iterations under a limit that the kernel enforces: plain Detectron2 and d2_memfit.

Mask R-CNN R50-FPN with random weights trains on two photographs of coins per iteration. In two of
the iterations one of them is crowded: 2 x 2 photographs, with all their coins. The limit
(RLIMIT_DATA) leaves room for the ordinary batches, and for the crowded image alone, but not for its
batch. Each side trains in its own process, which reads the memory under the limit every 2 ms.

Writes docs/crowded.jsonl and docs/crowded.png.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from detectron2.engine import HookBase, SimpleTrainer
from detectron2.modeling import build_model
from detectron2.structures import BitMasks, Boxes, Instances
from torch.nn import functional as F

from d2_memfit import AccumulatingTrainer
from d2_memfit.common import GB
from d2_memfit.config.load import load_cfg
from d2_memfit.config.settings import RecoveryOptions
from d2_memfit.memory import enforce_budget, is_out_of_memory, process_memory, return_large_blocks

from .common import CONFIG, coins, machine, sampled_data_bytes

DOCS = Path(__file__).resolve().parents[2] / "docs"
SIDES = ("Detectron2", "d2_memfit")
ITERATIONS = 24
CROWDED_AT = (12, 20)
SIZE = (320, 432)  # height and width of a photograph
THUMBNAIL = (128, 160)
EXTRA_GB = 1.6  # room for training in addition to the process's memory before
BINS = 25  # bins of an iteration; each keeps its largest value


def add_arguments(_: argparse.ArgumentParser) -> None:
    pass


def run(_: argparse.Namespace) -> None:
    lines = [measure(side) for side in SIDES]
    (DOCS / "crowded.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    draw(lines, DOCS / "crowded.png")


def measure(side: str) -> dict[str, Any]:
    """Train one side in its own process."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-W", "ignore", "-m", "benchmarks.crowded", side, folder]
        subprocess.run(command, cwd=Path(__file__).parents[1], check=True)
        return json.loads((Path(folder) / "line.json").read_text())


def train(side: str, folder: Path) -> None:
    return_large_blocks()
    torch.manual_seed(0)
    cfg = load_cfg(CONFIG)
    cfg.MODEL.DEVICE = "cpu"
    cfg.MODEL.PIXEL_STD = [300.0, 300.0, 300.0]  # keeps activations of random weights small
    cfg.INPUT.MASK_FORMAT = "bitmask"
    model = build_model(cfg)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    with coins(*THUMBNAIL) as (dicts, mapper):  # one-time allocations of the process come first
        SimpleTrainer(model, [[mapper(dicts[0])]], optimizer).train(0, 1)
    optimizer.zero_grad(set_to_none=True)
    iterations = EndsOfIterations()
    with coins(*SIZE) as (dicts, mapper):
        photographs = [mapper(d) for d in dicts]
        budget_gb = process_memory().data_bytes / GB + EXTRA_GB
        enforce_budget(budget_gb, "cpu")
        if side == "Detectron2":
            trainer = SimpleTrainer(model, batches(photographs), optimizer)
        else:
            options = RecoveryOptions(output_dir=str(folder))
            trainer = AccumulatingTrainer(model, batches(photographs), optimizer, recovery=options)
        trainer.register_hooks([iterations])
        end = "all of them"
        start = time.perf_counter()
        with sampled_data_bytes() as samples:
            try:
                trainer.train(0, ITERATIONS)
            except Exception as e:
                if not is_out_of_memory(e):
                    raise
                end = " ".join(str(e).split())
    record = folder / "memfit_oom.jsonl"
    events = [json.loads(x) for x in record.read_text().splitlines()] if record.exists() else []
    line = {
        "side": side,
        "machine": machine(),
        "budget_gb": budget_gb,
        "iterations": len(iterations.ends),
        "end": end,
        "events": [{key: event[key] for key in ("iteration", "action")} for event in events],
        "memory": over_iterations(samples, start, iterations.ends),
    }
    (folder / "line.json").write_text(json.dumps(line))


def batches(photographs: Sequence[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    for i in range(ITERATIONS + 1):  # SimpleTrainer of Detectron2 main asks for one more
        pair = [photographs[(2 * i + j) % len(photographs)] for j in range(2)]
        yield [crowd(pair[0]), pair[1]] if i in CROWDED_AT else pair


def crowd(photograph: dict[str, Any]) -> dict[str, Any]:
    """Make one image of 2 x 2 copies of a photograph."""
    image = photograph["image"]
    instances = photograph["instances"]
    height, width = image.shape[1:]
    everything = Instances((2 * height, 2 * width))
    boxes, masks = [], []
    for top in (0, height):
        for left in (0, width):
            boxes.append(instances.gt_boxes.tensor + torch.tensor([left, top] * 2))
            around = (left, width - left, top, height - top)
            masks.append(F.pad(instances.gt_masks.tensor, around))
    everything.gt_boxes = Boxes(torch.cat(boxes))
    everything.gt_masks = BitMasks(torch.cat(masks))
    everything.gt_classes = instances.gt_classes.repeat(4)
    size = {"height": 2 * height, "width": 2 * width}
    return {**photograph, "image": image.repeat(1, 2, 2), "instances": everything, **size}


class EndsOfIterations(HookBase):
    """Notes when each iteration ends, in seconds of ``time.perf_counter``."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def after_step(self) -> None:
        self.ends.append(time.perf_counter())


def over_iterations(
    samples: Sequence[tuple[float, int]], start: float, ends: Sequence[float]
) -> list[list[float]]:
    """Times in iterations, with the largest memory in GB at each.

    Args:
        samples: times and bytes.
        start: time at which the first iteration begins.
        ends: times at which iterations end.
    """
    last = samples[-1][0]
    times = [start, *ends, *([last] if last > ends[-1] else [])]
    at = np.interp([now for now, _ in samples], times, range(len(times)))
    most: dict[int, float] = {}
    for iteration, (_, num_bytes) in zip(at, samples):
        bin_ = int(iteration * BINS)
        most[bin_] = max(most.get(bin_, 0.0), num_bytes / GB)
    return [[bin_ / BINS, round(gb, 3)] for bin_, gb in sorted(most.items())]


def draw(lines: list[dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(
        len(lines), 1, sharex=True, sharey=True, figsize=(9, 5), layout="constrained"
    )
    for axes, line, color in zip(panels, lines, ("#D55E00", "#0072B2")):  # Okabe and Ito
        x, gb = zip(*line["memory"])
        axes.fill_between(x, gb, step="post", color=color, alpha=0.25)
        axes.step(x, gb, where="post", color=color, linewidth=1)
        axes.axhline(line["budget_gb"], color="black", linestyle="-.")
        for crowded in CROWDED_AT:
            axes.axvspan(crowded, crowded + 1, color="#999999", alpha=0.3, linewidth=0)
        axes.set_title(f"{line['side']}: {what_happens(line)}", loc="left", fontsize=11)
        axes.set_ylabel("GB")
        if line["end"] != "all of them":
            axes.plot(x[-1], gb[-1], marker="X", markersize=13, color="black", zorder=3)
        for event in line["events"]:
            text = event["action"].split(" and ")[0]
            place = {"xytext": (8, 12), "textcoords": "offset points", "va": "bottom"}
            at = (event["iteration"], line["budget_gb"])
            axes.annotate(text, at, **place, arrowprops={"arrowstyle": "->"})
    limit = max(line["budget_gb"] for line in lines)
    panels[0].set_ylim(0, limit * 1.25)
    panels[0].set_xlim(0, ITERATIONS)
    panels[0].annotate(f"the kernel's limit, {limit:.1f} GB", (0.2, limit), va="bottom", fontsize=9)
    panels[0].annotate("crowded image", (CROWDED_AT[0] + 1.1, 0.1), fontsize=9)
    panels[-1].set_xlabel("iteration")
    figure.savefig(path, dpi=110, metadata={"Software": None})
    pyplot.close(figure)


def what_happens(line: dict[str, Any]) -> str:
    if line["end"] == "all of them":
        return f"trains all {line['iterations']} iterations"
    return f"ends in iteration {line['iterations']}, out of memory"


if __name__ == "__main__":
    train(sys.argv[1], Path(sys.argv[2]))
