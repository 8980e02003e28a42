# Copyright (c) the d2_memfit developers.
"""The smallest budget in which a step with 16 images of 800 pixels succeeds, found by bisection.

Mask R-CNN R50-FPN makes one step with 16 images of 800 x 1088, in a process that the kernel limits
(RLIMIT_DATA). All its private memory counts, including imports and parameters. The optimizer's
state exists before. Detectron2 takes the 16 images at once, because it does not accumulate. All
others take them one by one. The bisection ends when a sufficient budget is at most 5 % above an
insufficient one. Its start is found with steps of 2 images, which take an eighth of the time.
"""

import math
import shutil
from typing import Optional

import psutil

from .process import run_worker
from .results import Results
from .sides import ACCUMULATORS, MMENGINE_CHECKPOINTED, OURS_EXACT, OURS_SPLIT, Side
from .worker import Spec

SIDES = [*ACCUMULATORS, OURS_SPLIT, MMENGINE_CHECKPOINTED, OURS_EXACT]
SIZE = (800, 1088)
EFFECTIVE_BATCH = 16
PRECISION = 1.05
FEW_IMAGES = 2


def measure(
    results: Results, sides: list[Side], first_guess_gb: float, time_limit_s: float
) -> None:
    """Measure all sides. ``first_guess_gb`` is the start; a good one only saves time."""
    guess_gb = first_guess_gb
    for side in sorted(sides, key=lambda side: not side.accumulates):
        found = results.find("budget", side=side.name)
        if found is None:
            if side.accumulates:
                few, _ = smallest(results, side, FEW_IMAGES, guess_gb, 1.2, time_limit_s)
                guess = few or guess_gb
                wider = 1.04  # below PRECISION, for budgets are rounded
            else:  # the batch's activations are all there at once
                guess = min(guess_gb * EFFECTIVE_BATCH / 2, 0.97 * available_gb())
                wider = 1.2
            enough_gb, too_small_gb = smallest(
                results, side, EFFECTIVE_BATCH, guess, wider, time_limit_s
            )
            found = results.add(
                "budget", side=side.name, enough_gb=enough_gb, too_small_gb=too_small_gb
            )
        if side.accumulates and found["enough_gb"]:
            guess_gb = found["enough_gb"]


def smallest(
    results: Results,
    side: Side,
    images: int,
    guess_gb: float,
    wider: float,
    time_limit_s: float,
) -> tuple[Optional[float], float]:
    """The smallest sufficient budget for a step, and the largest insufficient one, in GB.

    None if no budget of this machine is sufficient.
    """
    enough, too_small = math.inf, 0.0
    for line in results.of("probe"):
        if (line["side"], line["images"]) == (side.name, images):
            if line["fits"]:
                enough = min(enough, line["budget_gb"])
            else:
                too_small = max(too_small, line["budget_gb"])
    while enough > PRECISION * too_small:
        if enough < math.inf and too_small:
            budget_gb = math.sqrt(enough * too_small)
        elif enough < math.inf:
            budget_gb = enough / wider
        else:
            budget_gb = too_small * wider or guess_gb
        budget_gb = round(budget_gb, 3)
        if budget_gb > available_gb():
            return None, too_small
        if fits(results, side, images, budget_gb, time_limit_s):
            enough = budget_gb
        else:
            too_small = budget_gb
    return enough, too_small


def available_gb() -> float:
    """Free RAM of the machine in GB; above it the kernel kills a process within its budget."""
    return psutil.virtual_memory().available / 2**30


def fits(results: Results, side: Side, images: int, budget_gb: float, time_limit_s: float) -> bool:
    """Whether one step covered all images."""
    folder = results.path.parent / f"budget, {side.name}, {budget_gb}"
    sizes = [[SIZE] * images]
    spec = Spec(side.name, sizes, *side.cut(images), str(folder), budget_gb)
    outcome = run_worker(spec, time_limit_s)
    if outcome.end == "hung":
        raise TimeoutError(
            f"{side.name} within {budget_gb} GB took more than {time_limit_s} s: set a longer "
            "--time-limit"
        )
    steps = outcome.passes[0][-1] if outcome.passes[0] else []
    does_fit = outcome.end == "finished" and [len(step) for step in steps] == [images]
    results.add(
        "probe",
        side=side.name,
        images=images,
        budget_gb=budget_gb,
        fits=does_fit,
        error=outcome.error,
        data_gb=round(outcome.data_gb, 3),
    )
    shutil.rmtree(folder)
    return does_fit
