# Copyright (c) the d2_memfit developers.
"""Memory, time and gradients of blocks that a plan chooses to recompute or to offload."""

from collections.abc import Iterator
from functools import partial

import torch

from ..errors import MemfitError
from ..job import Job, WorstCase
from ..planner.device import DeviceModel
from ..planner.search import BLOCKWISE, Choice, Trials, choice_of, with_best_blocks
from .attempt import attempt
from .compare import allocated_bytes, relative_difference
from .peaks import median_seconds, peaks_of
from .scale import MASK_RCNN, TINY_MODEL, Record, Scale
from .timed_steps import NO_EVALUATION, SMALL_ACTIVATIONS, Steps

__all__ = ["measure_blocks"]

_GB = 2**30
_CHECKPOINT = BLOCKWISE[0]
_REHEARSAL = WorstCase((512, 512), 5)


def measure_blocks(device: torch.device, scale: Scale) -> Iterator[Record]:
    """Measure a Mask R-CNN with no block, all blocks and some blocks recomputed.

    The limit is between the memory of the first two. Gradients are compared with those of the first
    case. The first case is compared with another step of its own, because ROIAlign adds up in any
    order on a GPU.
    """
    trials, num_images = _trials(device, scale)
    plain, every = choice_of((), num_images), choice_of([_CHECKPOINT], num_images)
    trials.limit_bytes = sum(trials.dry_job(c).least_bytes() for c in (plain, every)) // 2
    sides = {"saved": plain, "all recomputed": every}
    sides["some recomputed"] = with_best_blocks(trials, every, [num_images], [_CHECKPOINT])
    if device.type == "cuda":
        best = with_best_blocks(trials, every, [num_images], BLOCKWISE)
        sides["some recomputed or offloaded"] = best
    expected: dict[str, torch.Tensor] = {}
    without: Record = {}
    for name, choice in sides.items():
        run = partial(_run, trials, choice, expected, device, scale)
        record = {"blocks": name, "images": num_images, **attempt(run, device)}
        without = without or record
        if "seconds" in record and "seconds" in without:
            record["time_factor"] = record["seconds"] / without["seconds"]
            predicted = record["predicted_seconds"] / without["predicted_seconds"]
            record["predicted_time_factor"] = predicted
        yield record


def _trials(device: torch.device, scale: Scale) -> tuple[Trials, int]:
    """Choose the largest number of images that fits, so that the GPU does not wait for the CPU."""
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 2**50
    for num_images in (8, 2, 1):
        opts = ("SOLVER.IMS_PER_BATCH", num_images, *NO_EVALUATION, *SMALL_ACTIVATIONS)
        job = Job.from_cfg(scale.cfg(MASK_RCNN, device, *opts), 1)
        if scale.case is not None:  # the weights of a whole one would take more than small images
            cfg = scale.cfg(MASK_RCNN, device, *opts, *TINY_MODEL)
            job = Job.from_cfg(cfg, 1, batch=_REHEARSAL)
        trials = Trials(job, DeviceModel.choose(None, str(device)), evaluates=False)
        trials.limit_bytes = 2**62
        needs = trials.dry_job(choice_of((), num_images)).total_bytes()
        if needs < free:
            return trials, num_images
    raise MemfitError(f"one image needs {needs / _GB:.2f} GB")


def _run(
    trials: Trials,
    choice: Choice,
    expected: dict[str, torch.Tensor],
    device: torch.device,
    scale: Scale,
) -> Record:
    """Measure one case; the first one stores its gradients in ``expected``."""
    dry_job, modules = trials.dry_job(choice), dict(choice.modules)
    with peaks_of(device) as peaks:
        steps = Steps(trials.job.with_settings(trials.settings(choice)), device)
        steps.step()
        peaks.take()
        steps.step()
        allocated, _ = peaks.take()
    record = {
        **{name: list(modules.get(name, ())) for name in BLOCKWISE},
        "gb": allocated / _GB,
        "estimated_gb": allocated_bytes(dry_job.training, dry_job.training_use(), device) / _GB,
        "seconds": median_seconds(steps.step, device, scale.rounds),
        "predicted_seconds": dry_job.seconds(),
    }
    with torch.backends.cudnn.flags(enabled=True, deterministic=True):
        if not expected:
            expected.update(steps.gradients())
        record["gradient_difference"] = relative_difference(steps.gradients(), expected)
    return record
