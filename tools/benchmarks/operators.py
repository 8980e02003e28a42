# Copyright (c) the d2_memfit developers.
"""Plans by operator against plans by block: predicted times by budget, and measured ones.

By operator, a block can also keep the results of its products (convolutions, matrix products,
attention) and recompute the rest, with PyTorch's selective checkpoints. One dry run gives the bytes
and times of all choices, of which the knapsack takes the best. A share is one of what recomputing
all blocks saves. With --rounds, the choices at --share train in turn on the CPU.
"""

import argparse
import statistics
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import combinations
from typing import Any
from unittest.mock import patch

import torch
from torch.utils.checkpoint import create_selective_checkpoint_contexts
from torch.utils.flop_counter import flop_registry

from d2_memfit.cli.job_options import job_of, load_any_config
from d2_memfit.planner.device import DeviceModel
from d2_memfit.planner.dry_run import Allocate, BlockCall, Timeline, Work
from d2_memfit.planner.estimates import DryJob
from d2_memfit.planner.search import Trials, choice_of
from d2_memfit.planner.search.block_memory import blocks_of
from d2_memfit.planner.search.knapsack import Blocks, pack
from d2_memfit.techniques.support import recomputation

from .common import CONFIG, machine, markdown_table, take_turns
from .selective import ChoiceSide

_CHECKPOINT = "ActivationCheckpointing"
_PRODUCTS = ".products"  # after the name of a block that keeps them
_ATTENTION = "_scaled_dot_product_flash_attention"
for end in ("", "_backward"):  # the registry lacks the CPU's attention
    formula = flop_registry[getattr(torch.ops.aten, _ATTENTION + end)]
    flop_registry[getattr(torch.ops.aten, f"{_ATTENTION}_for_cpu{end}")] = formula


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config-file", default=CONFIG)
    parser.add_argument("--project", action="append", default=[], help="as for d2-memfit")
    parser.add_argument("--trainer", help="as for d2-memfit")
    parser.add_argument("--image-size", default="480,640")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--share", type=float, default=0.6, help="that is measured")
    parser.add_argument("--rounds", type=int, default=0, help="measurements of each side")
    parser.add_argument("opts", nargs="*")
    parser.set_defaults(coco=[], batch=None, num_gpus=1, json=False, instances=20)


def run(args: argparse.Namespace) -> None:
    job = job_of(args, load_any_config(args, (), print))
    trials = Trials(job, DeviceModel.load(args.device), DryJob, False)
    trials.limit_bytes = 2**62
    images = job.geometry.largest_micro_batch
    plain, every = choice_of((), images), choice_of([_CHECKPOINT], images)
    none, everything = trials.dry_job(plain), trials.dry_job(every)
    most, least = none.training_bytes(), everything.training_bytes()
    print(f"{args.config_file}, {images} images of {args.image_size} pixels, {args.device}.")
    print(f"None recomputed: {most / 2**30:.2f} GB. All: {least / 2**30:.2f} GB, time x ", end="")
    print(f"{everything.seconds() / none.seconds():.3f}. {machine()}.\n")
    by_block = blocks_of(none.training, trials.device)
    both = by_block, _by_operator(none.training, trials.device)
    others = most - by_block.bytes_at.max()
    seconds = by_block.forward_s + by_block.backward_s

    def packings(share: float, offloads: bool) -> list[Any]:
        limit = most - share * (most - least) - others
        return [pack(blocks, limit, offloads=offloads) for blocks in both]

    rows = []
    for share in (i / 10 for i in range(1, 10)):
        row = [f"{share:.1f}"]
        for offloads in (False, True)[: 1 + trials.device.is_gpu]:
            times = [p.seconds / seconds for p in packings(share, offloads)]
            row += [*(f"{time:.3f}" for time in times), f"{times[1] / times[0]:.3f}"]
        rows.append(row)
    header = ["by block, time x", "by operator", "ratio"]
    header += [f"{name}, with offload" for name in header] * trials.device.is_gpu
    print(markdown_table(["share saved", *header], rows), "\n", flush=True)
    if args.rounds:
        chosen = [p.recomputed for p in packings(args.share, False)]
        sides = {"none": ChoiceSide(trials, plain), "all": ChoiceSide(trials, every)}
        for name, modules in zip(("by block", "by operator"), chosen):
            names = tuple(name.removesuffix(_PRODUCTS) for name in modules)
            choice = choice_of([_CHECKPOINT], images, [(_CHECKPOINT, names)])
            sides[name] = ChoiceSide(trials, choice)
        marked = [name.removesuffix(_PRODUCTS) for name in chosen[1] if name.endswith(_PRODUCTS)]
        keeping = {sides["by operator"].model.get_submodule(name) for name in marked}
        _measure(sides, keeping, args.rounds)


def _measure(sides: dict[str, ChoiceSide], keeping: set[torch.nn.Module], rounds: int) -> None:
    plain_contexts = recomputation._contexts

    def contexts(module: torch.nn.Module) -> Any:
        if module not in keeping:
            return plain_contexts(module)
        caching, cached = create_selective_checkpoint_contexts(
            lambda _, operator, *args, **kwargs: operator.overloadpacket in flop_registry
        )
        return caching, nested(plain_contexts(module)[1], cached)

    @contextmanager
    def nested(outer: Any, inner: Any) -> Iterator[None]:
        with outer, inner:
            yield

    with patch.object(recomputation, "_contexts", contexts):
        take_turns(sides.values(), rounds)
    plain, rows = sides["none"], []
    for name, side in sides.items():
        pairs = zip(side.model.parameters(), plain.model.parameters())
        is_exact = all(
            p.grad is q.grad
            or (p.grad is not None and q.grad is not None and torch.equal(p.grad, q.grad))
            for p, q in pairs
        )
        span = f"{min(side.seconds):.2f} to {max(side.seconds):.2f}"
        seconds = statistics.median(side.seconds)
        ratio = seconds / statistics.median(plain.seconds)
        rows.append([name, f"{seconds:.2f}", span, f"{ratio:.3f}", "yes" if is_exact else "no"])
    print(markdown_table(["recomputed", "CPU s", "from, to", "time x", "same gradients"], rows))


def _by_operator(timeline: Timeline, device: DeviceModel) -> Blocks:
    """The knapsack's choices, among them blocks that keep their products."""
    calls = [*timeline.calls, *(_with_products(call, timeline) for call in timeline.calls)]
    both = blocks_of(replace(timeline, calls=calls), device)
    names = [f"{name.removesuffix(_PRODUCTS)}." for name in both.names]
    ordered = sorted(range(len(names)), key=lambda i: names[i])
    pairs = [(i, j) for i, j in combinations(ordered, 2) if names[j].startswith(names[i])]
    offloaded = both.offloaded_bytes.copy()
    offloaded[:, [name.endswith(_PRODUCTS) for name in both.names]] = 0
    return replace(both, offloaded_bytes=offloaded, overlaps=pairs)


def _with_products(call: BlockCall, timeline: Timeline) -> BlockCall:
    """A call that keeps its products as it keeps its outputs, and computes the rest again."""
    kinds = {operator.__name__ for operator in flop_registry}
    made = [e.allocation for e in timeline.events[call.begin : call.end] if isinstance(e, Allocate)]
    products = {a for a in made if a.operator in kinds}
    cheap = Counter({of: n for of, n in call.work.operators.items() if not of.kind})
    inputs, outputs = call.inputs | products, call.outputs | products
    name, work = call.name + _PRODUCTS, Work(cheap)
    return replace(call, name=name, work=work, inputs=inputs, outputs=outputs)
