# Copyright (c) the d2_memfit developers.
"""Time and memory of training against plain Detectron2: accumulation, recovery or techniques.

The model is Detectron2's Mask R-CNN R50-FPN with random weights. The images are photographs of
coins with bit masks, each with up to 24 objects. All sides take turns in one run. Times are medians
of an iteration, for each image in it; ratios are relative to the first row.

The peak is that of an iteration, counted byte by byte over all tensors, with parameters, gradients
and momentum. Activations are the tensors that a forward keeps for its backward. Memory that
operators allocate for themselves does not count.

recovery discards a forward in its last row, as if there was no memory for the backward; the time of
this forward does not count. It ends with two ranks, which communicate over gloo.
"""

import argparse
import statistics
import time
from functools import partial
from itertools import cycle
from typing import Any

import torch
from detectron2.engine import SimpleTrainer
from detectron2.modeling import build_model
from detectron2.utils import comm
from detectron2.utils.events import EventStorage
from pages import markdown_table

from d2_memfit import AccumulatingTrainer, Job
from d2_memfit.common import MB
from d2_memfit.common.compat import create_ddp_model
from d2_memfit.config.load import load_cfg
from d2_memfit.config.settings import RecoveryOptions
from d2_memfit.engine.launch import launch
from d2_memfit.engine.window import MicroBatch
from d2_memfit.memory import OwnerMeter
from d2_memfit.techniques.registry import TECHNIQUES, apply_techniques, get_technique

from .common import CONFIG, coins, machine

HAS_GPU = torch.cuda.is_available()
STEPS = 4
OTHER_TIERS = ("MixedPrecision", "SmallerRoiBatch", "MoreFrozenStages")
# With random weights, boxes stay near their anchors, so that there are as many proposals as in
# training.
SMALL_ACTIVATIONS = ("MODEL.PIXEL_STD", [300.0, 300.0, 300.0])
SPLIT = partial(AccumulatingTrainer, recovery=RecoveryOptions())
HEADER = ["", "peak MiB", "ratio", "activations MiB", "ratio", "s per image", "ratio"]

Images = list[dict[str, Any]]


class Side:
    """One side of a comparison.

    Args:
        create_trainer: called with a model, a loader and an optimizer.
        batch: the images of each batch.
        techniques: names of those that are on.
        images: in an iteration, if not those of a batch.
    """

    def __init__(
        self, create_trainer: Any, batch: Images, techniques: Any = (), images: int = 0
    ) -> None:
        torch.manual_seed(0)
        cfg = load_cfg(CONFIG, [*SMALL_ACTIVATIONS, *settings(techniques)])
        cfg.MODEL.DEVICE = "cuda" if HAS_GPU else "cpu"
        model = apply_techniques("model", build_model(cfg), cfg)
        # A rate of 0: all rounds compute the same.
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9)
        optimizer = apply_techniques("optimizer", optimizer, cfg)
        self.trainer = create_trainer(model, cycle([batch]), optimizer)
        self.images = images or len(batch)
        self.seconds: list[float] = []

    def round(self) -> None:
        """Measure an iteration; on a CPU the time that this process computes."""
        torch.manual_seed(0)
        with EventStorage():
            start = now()
            self.trainer.run_step()
            self.seconds.append(now() - start - getattr(self.trainer, "discarded_s", 0.0))

    def figures(self) -> list[float]:
        """MiB of the peak of an iteration and of what a forward keeps, and seconds of an image."""
        kept = []
        with OwnerMeter(self.trainer.model, self.trainer.optimizer) as meter:
            of_other_sides = meter.live["other"]

            def look(*_: object) -> None:
                owners = [o for o in meter.live if o.startswith(("activations", "inputs"))]
                kept.append(sum(meter.live[owner] for owner in owners))

            hook = self.trainer.model.register_forward_hook(look)
            with EventStorage():
                self.trainer.run_step()
            hook.remove()
        peak = meter.peak_bytes - of_other_sides
        return [peak / MB, kept[0] / MB, statistics.median(self.seconds[1:]) / self.images]


class FailingTrainer(AccumulatingTrainer):
    """Runs out of memory at the end of each iteration's first forward."""

    discarded_s = 0.0

    def run_step(self) -> None:
        self.cutter.images = None
        super().run_step()

    def _forward(self, micro_batch: MicroBatch) -> torch.Tensor:
        start = now()
        loss = super()._forward(micro_batch)
        if micro_batch.num_images > 1:
            self.discarded_s = now() - start
            raise torch.OutOfMemoryError("as if there was no memory for the backward")
        return loss


def now() -> float:
    if HAS_GPU:
        torch.cuda.synchronize()
    return time.perf_counter() if HAS_GPU else time.process_time()


def settings(names: Any) -> list[Any]:
    """Keys and values that turn techniques on."""
    job = Job.from_cfg(load_cfg(CONFIG, ["INPUT.MASK_FORMAT", "bitmask"]), 1)
    model = job.build_model("cpu")
    on = [get_technique(name).settings(job, model) for name in names]
    return [x for item in on for pair in item.items() for x in pair]


def exact_techniques_of_one_rank() -> list[str]:
    """The exact techniques for a model on one device."""
    names = [t.name for t in TECHNIQUES if t.tier == "exact" and t.part == "model"]
    return [n for n in names if HAS_GPU or n != "ActivationOffload"]  # else the host is the device


def accumulation(images: Images) -> dict[str, Side]:
    accumulating = partial(AccumulatingTrainer, accumulation_steps=STEPS)
    return {
        "plain Detectron2, 1 image": Side(SimpleTrainer, images[:1]),
        "ours, 1 x 1": Side(AccumulatingTrainer, images[:1]),
        f"ours, {STEPS} x 1": Side(accumulating, images[:1], images=STEPS),
        f"plain Detectron2, {STEPS} images": Side(SimpleTrainer, images),
    }


def recovery(images: Images) -> dict[str, Side]:
    failing = partial(FailingTrainer, recovery=RecoveryOptions())
    return {
        "raise, 1 image": Side(AccumulatingTrainer, images[:1]),
        "split, 1 image": Side(SPLIT, images[:1]),
        "split, 1 + 1 images": Side(partial(SPLIT, micro_batch_size=1), images[:2]),
        "the same after a failure, less the discarded forward": Side(failing, images[:2]),
    }


def techniques(images: Images) -> dict[str, Side]:
    """Each technique alone, and the exact ones also one after another."""
    exact, pair = exact_techniques_of_one_rank(), images[:2]
    amp = partial(AccumulatingTrainer, precision="float16" if HAS_GPU else "bfloat16")
    found = {
        "plain Detectron2": Side(SimpleTrainer, pair),
        "d2_memfit (gradients freed before the forward)": Side(AccumulatingTrainer, pair),
        **{name: Side(AccumulatingTrainer, pair, [name]) for name in exact},
    }
    for i in range(2, len(exact) + 1):
        found[f"the first {i} together"] = Side(AccumulatingTrainer, pair, exact[:i])
    for name in OTHER_TIERS:
        trainer = amp if name == "MixedPrecision" else AccumulatingTrainer
        found[name] = Side(trainer, pair, [name])
    return found


TABLES = {"accumulation": accumulation, "recovery": recovery, "techniques": techniques}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("table", choices=TABLES)
    parser.add_argument("--size", type=int, nargs=2, default=[480, 640], help="height, width")
    parser.add_argument("--rounds", type=int, default=5, help="measurements of each side")


def run(args: argparse.Namespace) -> None:
    print(f"Mask R-CNN R50-FPN, {args.size[0]} x {args.size[1]} pixels. {machine()}.\n")
    with coins(*args.size) as (dicts, mapper):
        images = [mapper(d) for d in dicts[:STEPS]]
    print(table_of(TABLES[args.table](images), args.rounds))
    if args.table == "recovery" and torch.cuda.device_count() != 1:  # ranks cannot share a GPU
        launch(two_ranks, 2, dist_url="auto", args=(images, args.rounds))


def table_of(sides: dict[str, Side], rounds: int) -> str:
    for _ in range(
        rounds + 1
    ):  # in turn, so that other load on the machine affects all; to warm up
        for side in sides.values():
            side.round()
    figures = {name: side.figures() for name, side in sides.items()}
    first = next(iter(figures.values()))
    rows = []
    for name, (peak, kept, seconds) in figures.items():
        cells = [f"{peak:.0f}", f"{kept:.0f}", f"{seconds:.3f}"]
        ratios = [f"{value / base:.3f}" for value, base in zip((peak, kept, seconds), first)]
        rows.append([name, *(cell for pair in zip(cells, ratios) for cell in pair)])
    return markdown_table(HEADER, rows)


def two_ranks(images: Images, rounds: int) -> None:
    def with_ddp(create: Any) -> Any:
        return lambda model, *rest: create(create_ddp_model(model, broadcast_buffers=False), *rest)

    batch = images[comm.get_rank() :][:1]
    sides = {name: with_ddp(c) for name, c in (("raise", AccumulatingTrainer), ("split", SPLIT))}
    text = table_of({f"two ranks, {k}": Side(c, batch) for k, c in sides.items()}, rounds)
    if comm.is_main_process():
        print(f"\n{text}")
