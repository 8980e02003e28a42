# Copyright (c) the d2_memfit developers.
"""Savings and costs of each technique: each alone, and the exact ones also one after another.

The model is Detectron2's Mask R-CNN R50-FPN with random weights. The images are photographs of
coins with bit masks, each with up to 24 objects. Plain is Detectron2's SimpleTrainer. All sides
take turns in one run. Times are medians; ratios are relative to plain.

The peak is that of an iteration, counted byte by byte over all tensors, with parameters, gradients
and momentum. Activations are the tensors that a forward keeps for its backward. Memory that
operators allocate for themselves does not count. Techniques for other parts of a job (loader,
several ranks, evaluation, image sizes) have their own tests and figures.

Then the table of docs/OUT_OF_MEMORY.md is written. --guide does only that, in a minute.
"""

import argparse
import statistics
from collections.abc import Callable
from functools import partial
from itertools import repeat
from typing import Any

import torch
from detectron2.engine import SimpleTrainer
from detectron2.utils.events import EventStorage
from pages import markdown_table

from d2_memfit import AccumulatingTrainer
from d2_memfit.common.units import MB
from d2_memfit.config.load import load_cfg
from d2_memfit.memory import OwnerMeter
from d2_memfit.techniques import TECHNIQUES, get_technique

from . import guide
from .common import CONFIG, Side, coins, machine, take_turns

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
    print(training(images, args.rounds, exact, others))


def exact_techniques_of_one_rank() -> list[str]:
    """The exact techniques for a model on one device."""
    names = [name for name, t in sorted(TECHNIQUES) if t.tier == "exact" and t.part == "model"]
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
    on = [get_technique(name).enabling_settings(cfg) for name in names]
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
