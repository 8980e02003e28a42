# Copyright (c) the d2_memfit developers.
"""Savings and costs of each technique: each alone, and the exact ones also one after another.

The model is Detectron2's Mask R-CNN R50-FPN with random weights. The images are photographs of
coins with bit masks, each with up to 24 objects. Plain is Detectron2's SimpleTrainer. All sides
take turns in one run. Times are medians; ratios are relative to plain.

The peak is that of an iteration, counted byte by byte over all tensors, with parameters, gradients
and momentum. Activations are the tensors that a forward keeps for its backward. Memory that
operators allocate for themselves does not count. Techniques for other parts of a job (loader,
several ranks, evaluation, image sizes) have their own tests and figures.

The second table measures only the labelling of anchors: 268,569 anchors, those of an image of 800 x
1344 pixels, and 300 instances.

Then, what each setting of the recipe changes is estimated, and written into docs/TECHNIQUES.md and
docs/OUT_OF_MEMORY.md. --guide does only that, in a minute.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from itertools import repeat
from typing import Any

import torch
from detectron2.engine import SimpleTrainer
from detectron2.modeling import build_model
from detectron2.modeling.matcher import Matcher
from detectron2.structures import Boxes, pairwise_iou
from detectron2.utils.events import EventStorage

from d2_memfit import AccumulatingTrainer, Job
from d2_memfit.common.units import MB
from d2_memfit.config.load import load_cfg, with_settings
from d2_memfit.memory import OwnerMeter, TensorMeter
from d2_memfit.techniques.crowds import pairwise_iou_in_chunks
from d2_memfit.techniques.registry import TECHNIQUES, get_technique

from . import guide
from .common import CONFIG, Side, coins, machine, markdown_table, take_turns

NUM_ANCHORS = 268_569  # of an FPN on an image of 800 x 1344 pixels
NUM_INSTANCES = 300

OTHER_TIERS = ["MixedPrecision", "SmallerRoiBatch", "MoreFrozenStages"]
# With random weights, boxes stay near their anchors, so that there are as many proposals as in
# training.
SMALL_ACTIVATIONS = ("MODEL.PIXEL_STD", [300.0, 300.0, 300.0])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--size", type=int, nargs=2, default=[800, 1344], help="height, width")
    parser.add_argument("--images", type=int, default=2, help="images in an iteration")
    parser.add_argument("--rounds", type=int, default=5, help="measurements of each side")
    parser.add_argument("--only", nargs="+", metavar="TECHNIQUE", help="names of techniques")
    parser.add_argument("--guide", action="store_true", help="measure nothing")


def run(args: argparse.Namespace) -> None:
    if not args.guide:
        measure(args)
    guide.write()


def measure(args: argparse.Namespace) -> None:
    print(f"Mask R-CNN R50-FPN, {args.images} images of {args.size[0]} x {args.size[1]} pixels.")
    print(f"{machine()}.\n")
    with coins(*args.size) as (dicts, mapper):
        images = [mapper(d) for d in dicts[: args.images]]
    exact = [n for n in exact_techniques_of_one_rank() if n in (args.only or [n])]
    others = [n for n in OTHER_TIERS if n in (args.only or [n])]
    print(training(images, args.rounds, exact, others), "\n")
    print(matching(args.rounds))


def exact_techniques_of_one_rank() -> list[str]:
    """The exact techniques for a model on one device."""
    names = [t.name for t in TECHNIQUES if t.tier == "exact" and t.part == "model"]
    if not torch.cuda.is_available():
        names.remove("ActivationOffload")  # the host is the device
    return names


def training(images: list[dict[str, Any]], rounds: int, names: list[str], others: list[str]) -> str:
    def new_side(trainer: Callable[..., Any], names: list[str]) -> Side:
        return Side(trainer, repeat(images), opts=[*SMALL_ACTIVATIONS, *settings(names)])

    amp = partial(AccumulatingTrainer, precision="fp16" if torch.cuda.is_available() else "bf16")

    sides = {
        "plain Detectron2": new_side(SimpleTrainer, []),
        "d2_memfit (gradients freed before the forward)": new_side(AccumulatingTrainer, []),
        **{name: new_side(AccumulatingTrainer, [name]) for name in names},
    }
    for i in range(2, len(names) + 1):
        sides[f"the first {i} together"] = new_side(AccumulatingTrainer, names[:i])
    for name in others:
        sides[name] = new_side(amp if name == "MixedPrecision" else AccumulatingTrainer, [name])
    take_turns(sides.values(), rounds)
    rows = []
    base = None
    for name, side in sides.items():
        seconds = statistics.median(side.seconds) / len(images)
        peak, activations = memory(side)
        base = base or (peak, activations, seconds)
        ratios = [f"{v / b:.2f}" for v, b in zip((peak, activations, seconds), base)]
        values = [f"{peak / MB:.0f}", f"{activations / MB:.0f}", f"{seconds:.2f}"]
        rows.append([name, *(x for pair in zip(values, ratios) for x in pair)])
    header = ["", "peak MiB", "ratio", "activations MiB", "ratio", "s per image", "ratio"]
    return markdown_table(header, rows)


def settings(names: list[str]) -> list[Any]:
    cfg = load_cfg(CONFIG, ["INPUT.MASK_FORMAT", "bitmask"])
    with coins(64, 64) as (dicts, mapper):
        job = Job.from_cfg(cfg, 1, batch=[mapper(dicts[0])])
    model = build_model(with_settings(cfg, {"MODEL.DEVICE": "cpu"}))
    on = [get_technique(name).settings(job, model) for name in names]
    return [x for item in on for pair in item.items() for x in pair]


def memory(side: Side) -> tuple[int, int]:
    """Peak of an iteration, and bytes that a forward keeps."""
    trainer = side.trainer
    kept = []
    with OwnerMeter(trainer.model, trainer.optimizer) as meter:
        of_other_sides = meter.live["other"]

        def look(*_: object) -> None:
            owners = [owner for owner in meter.live if owner.startswith(("activations", "inputs"))]
            kept.append(sum(meter.live[owner] for owner in owners))

        hook = trainer.model.register_forward_hook(look)
        with EventStorage():
            trainer.run_step()
        hook.remove()
    return meter.peak_bytes - of_other_sides, kept[0]


def matching(rounds: int) -> str:
    generator = torch.Generator().manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"

    def boxes(num: int) -> Boxes:
        corner = torch.rand(num, 2, generator=generator) * 1000
        extent = torch.rand(num, 2, generator=generator) * 200 + 1
        return Boxes(torch.cat([corner, corner + extent], dim=1)).to(device)

    instances = boxes(NUM_INSTANCES)
    anchors = boxes(NUM_ANCHORS)
    matcher = Matcher([0.3, 0.7], [0, -1, 1], allow_low_quality_matches=True)
    chunk_size = 4096  # what plans try
    in_chunks = pairwise_iou_in_chunks(chunk_size, pairwise_iou)
    sides = {
        "Detectron2": lambda: matcher(pairwise_iou(instances, anchors)),
        f"chunks of {chunk_size}": lambda: matcher(in_chunks(instances, anchors)),
    }
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(rounds + 1):
        for name, label in sides.items():
            start = time.perf_counter()
            label()[0].sum().item()  # waits for the device
            seconds[name].append(time.perf_counter() - start)
    rows = []
    base = None
    for name, label in sides.items():
        with TensorMeter() as meter:
            label()
        figures = meter.peak_bytes, statistics.median(seconds[name][1:])
        base = base or figures
        peak_ratio, time_ratio = (value / b for value, b in zip(figures, base))
        peak = f"{figures[0] / MB:.0f}"
        seconds_ = f"{figures[1]:.3f}"
        rows.append([name, peak, f"{peak_ratio:.3f}", seconds_, f"{time_ratio:.2f}"])
    return markdown_table(["labelling of anchors", "peak MiB", "ratio", "s", "ratio"], rows)
