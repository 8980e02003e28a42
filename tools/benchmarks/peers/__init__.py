# Copyright (c) the d2_memfit developers.
"""A race: d2_memfit, plain Detectron2, and other libraries that accumulate or find batches.

All train Detectron2 models on the same photographs of coins, each as its own documentation says.
requirements/peers.txt says how to make the environment. Sections:

one_rank    what happens when a batch does not fit
two_ranks   the same on two ranks
gradients   the gradient that reaches the optimizer, against the full batch's
memory      memory that a step of 8 large images needs

Each section is a line of docs/benchmark.jsonl. From these lines the command writes the tables of
docs/BENCHMARK.md. --report measures nothing.
"""

import argparse
import copy
import json
import tempfile
from collections.abc import Callable
from datetime import date
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import detectron2
import torch
from detectron2.utils.events import EventStorage

import d2_memfit

from ..common import coins, machine
from ..gradients import NUM_IMAGES, family
from ..gradients import train as train_for_a_while
from .processes import race
from .report import write
from .sides import SIDES, Job

ROOT = Path(__file__).resolve().parents[3]
PEERS = ("accelerate", "transformers", "pytorch_lightning", "mmengine", "mosaicml")
SMALL, LARGE = (192, 256), (640, 864)
# 12 images in batches of 2. Both images of the fifth batch are large.
IMAGES = [*[SMALL] * 8, LARGE, LARGE, SMALL, SMALL]
STEP = [(480, 640)] * 8
CUTS = {"8 x 1": (1, 8), "3 + 3 + 2": (3, 3)}
NOT_UNDER_A_LIMIT = (
    *("transformers", "mmengine, activation_checkpointing"),
    "d2_memfit, split, exact techniques",
)
ONE_RANK = (  # these need a GPU or one rank, or have no remedy
    *("Lightning, scale_batch_size", "Accelerate", "d2_memfit"),
)
MODELS = ("RPN, every anchor sampled", "DETR-like")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument("--report", action="store_true", help="only write what was measured before")


def run(args: argparse.Namespace) -> None:
    file = ROOT / "docs" / "benchmark.jsonl"
    for name in [] if args.report else args.only:
        line = {
            "section": name,
            "date": date.today().isoformat(),
            "machine": machine(),
            "versions": {
                "d2_memfit": d2_memfit.__version__,
                "detectron2": detectron2.__version__,
                **{package: version(package) for package in PEERS},
            },
            "rows": SECTIONS[name](),
        }
        others = [x for x in file.read_text().splitlines() if json.loads(x)["section"] != name]
        file.write_text("".join(x + "\n" for x in [*others, json.dumps(line)]))
    write(ROOT)


def survival(ranks: int) -> list[dict[str, Any]]:
    """Rows about a batch that does not fit.

    The limit of a process is in the middle between two needs of plain Detectron2: both large images
    at once, and one of them with the gradients of another. On several ranks,
    DistributedDataParallel keeps the gradients once more.
    """
    one, both = (race("Detectron2", [[LARGE] * n], (n, 1)) for n in (1, 2))
    limit = (one.extra_gb + one.trained_gb + both.extra_gb) / 2 + (ranks - 1) * one.trained_gb
    rows = []
    for side in SIDES:
        if side in NOT_UNDER_A_LIMIT or (ranks > 1 and side in ONE_RANK):
            continue
        sizes = [IMAGES, *[[SMALL] * len(IMAGES)] * (ranks - 1)]
        found = race(side, sizes, (2, 1 if side == "Detectron2" else 2), limit)
        s = "s" if found.restarts > 1 else ""
        again = f" after {found.restarts} restart{s}" if found.restarts else ""
        row = {
            "side": side,
            "result": found.end + again,
            "images in steps": f"{sum(map(len, found.steps))} of {len(IMAGES) * ranks}",
            "images per step": max(map(len, found.steps), default=""),
            "limit, GB": f"{limit:.2f}",
            "error": f"`{shortened(found.error)}`" if found.error else "",
        }
        print(row, flush=True)
        rows.append(row)
    return rows


def shortened(error: str) -> str:
    wanted = "DefaultCPUAllocator: can't allocate memory"
    return wanted if wanted in error else error[:120].replace("|", "\\|")


def gradients() -> list[dict[str, Any]]:
    """Rows about the gradient of a step: norm(difference) / norm(full batch's), in float32."""
    rows: dict[str, dict[str, Any]] = {}
    with coins(160, 224) as (dicts, mapper):
        images = [mapper(d) for d in dicts]
    for name in MODELS:
        trained = train_for_a_while(family(name), images, 60)
        images_of_step = images[:NUM_IMAGES]
        full = gradient("Detectron2", trained, images_of_step, (NUM_IMAGES, 1))
        for side in SIDES:
            if "," in side:
                continue
            for words, cut in CUTS.items():
                own_cut = (NUM_IMAGES, 1) if side == "Detectron2" else cut
                found = gradient(side, trained, images_of_step, own_cut)
                row = rows.setdefault(side, {"side": side})
                row[f"{name.split(',')[0]}, {words}"] = f"{(found - full).norm() / full.norm():.1e}"
    return list(rows.values())


def gradient(
    side: str, trained: torch.nn.Module, images: list[Any], cut: tuple[int, int]
) -> torch.Tensor:
    """The gradient of one optimizer step as one vector."""
    model = copy.deepcopy(trained)  # a side may change it
    model.zero_grad(set_to_none=True)
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(parameters, lr=0.0)
    found: list[torch.Tensor] = []

    def keep(*_: Any) -> None:  # after the step, because Lightning runs the last backward in it
        found.append(torch.cat([p.grad.flatten() for p in parameters if p.grad is not None]))

    optimizer.register_step_post_hook(keep)
    function, arguments = SIDES[side]
    with EventStorage(), tempfile.TemporaryDirectory() as folder:
        function(Job(lambda: (model, optimizer), images, *cut, Path(folder)), **arguments)
    (result,) = found
    return result


def memory() -> list[dict[str, Any]]:
    """Rows about the peak of private memory in a step, in addition to the process before it."""
    rows = []
    for side in SIDES:
        if "_batch_size" in side:
            continue
        cut = (len(STEP), 1) if side == "Detectron2" else (1, len(STEP))
        found = race(side, [STEP], cut)
        rows.append({"side": side, "images at once": cut[0], "GB": f"{found.extra_gb:.2f}"})
        print(rows[-1], flush=True)
    return rows


SECTIONS: dict[str, Callable[[], list[dict[str, Any]]]] = {
    "one_rank": partial(survival, 1),
    "two_ranks": partial(survival, 2),
    "gradients": gradients,
    "memory": memory,
}
