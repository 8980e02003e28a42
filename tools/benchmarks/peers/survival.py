# Copyright (c) the d2_memfit developers.
"""The behaviour of each side when a batch does not fit into the process's memory.

Mask R-CNN R50-FPN trains on 16 images per rank, in batches of 2, with 2 batches per step. The two
images of the seventh batch on the first rank have twice the height and width. The kernel limits
each process (RLIMIT_DATA) to its memory before training and a little more. This is enough for the
small batches and for one of the large images, but not for both at once.

Detectron2, without accumulation, steps after each batch. An image counts for a step if its backward
has ended since the last step. If a side finishes, its weights are compared with those of the same
side without a limit: norm of the difference, over the norm of what that training changed.
"""

from pathlib import Path

import torch

from .process import run_worker
from .results import Results
from .sides import EVERY, MMENGINE_CHECKPOINTED, OURS_EXACT, Side
from .worker import Spec

SIDES = [side for side in EVERY if side not in (MMENGINE_CHECKPOINTED, OURS_EXACT)]
NUM_IMAGES = 16
BATCH_SIZE = 2
ACCUMULATION_STEPS = 2
SMALL, LARGE = (320, 432), (640, 864)
LARGE_AT = (12, 13)
EXTRA_GB = {1: 1.6, 2: 1.65}  # by ranks; two ranks also hold what DDP sends


def measure(results: Results, sides: list[Side], num_ranks: int, time_limit_s: float) -> None:
    """Measure all sides. A run that exceeds ``time_limit_s`` counts as hanging."""
    small = [SMALL] * NUM_IMAGES
    first = [LARGE if i in LARGE_AT else SMALL for i in range(NUM_IMAGES)]
    sizes = [first, *[small] * (num_ranks - 1)]
    for side in sides:
        if results.find("survival", side=side.name, ranks=num_ranks):
            continue
        folder = results.path.parent / f"survival, {side.name}, {num_ranks}"
        steps = ACCUMULATION_STEPS if side.accumulates else 1
        unlimited = Spec(side.name, sizes, BATCH_SIZE, steps, str(folder / "unlimited"))
        limited = unlimited._replace(
            output_dir=str(folder / "limited"), extra_gb=EXTRA_GB[num_ranks]
        )
        outcome = run_worker(limited, time_limit_s)
        error = None
        if outcome.end == "finished":
            reference = run_worker(unlimited, time_limit_s)
            if reference.end != "finished":
                raise RuntimeError(
                    f"{side.name} without a limit {reference.end}: {reference.error}"
                )
            error = weights_error(folder)
        last = [passes[-1] if passes else [] for passes in outcome.passes]
        results.add(
            "survival",
            side=side.name,
            ranks=num_ranks,
            end=outcome.end,
            error=outcome.error,
            images=[len({i for step in steps for i in step}) for steps in last],
            restarts=max(0, *(len(passes) - 1 for passes in outcome.passes)),
            weights_error=error,
            time_limit_s=time_limit_s,
        )
        for weights in folder.glob("*/*.pth"):
            weights.unlink()


def weights_error(folder: Path) -> float:
    """Error of the limited run's weights, relative to the change by training without a limit."""

    def weights(run: str, file: str) -> torch.Tensor:
        state = torch.load(folder / run / file, weights_only=True)
        return torch.cat([v.double().flatten() for v in state.values()])

    reference = weights("unlimited", "final.pth")
    moved = (reference - weights("unlimited", "initial.pth")).norm()
    return ((weights("limited", "final.pth") - reference).norm() / moved).item()
