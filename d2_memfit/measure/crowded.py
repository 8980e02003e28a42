# Copyright (c) the d2_memfit developers.
"""Out-of-memory errors caused by one crowded image, with two ways to cut a window."""

from collections.abc import Iterator
from functools import partial
from itertools import repeat
from typing import Any

import torch

from ..config import with_settings
from ..engine import AccumulatingTrainer
from ..iteration import CostModel, Padding
from ..job import Job, RecoveryOptions, WorstCase
from ..planner.device import DeviceModel
from ..planner.dry_run import worst_proposals
from ..planner.estimates import steps
from ..planner.search import CostFit
from .attempt import attempt
from .injection import iterate, seed_all
from .peaks import under_budget
from .plans import budget_for
from .scale import MASK_RCNN, Record, Scale
from .timed_steps import NO_EVALUATION, SMALL_ACTIVATIONS

__all__ = ["measure_crowded"]

_IMAGES = 4  # ordinary ones that fit at once
_ITERATIONS = 3  # after the first, a number of images is halved for good
# The mask head of all proposals would take more than the images.
_FEW_PROPOSALS = ("MODEL.ROI_HEADS.BATCH_SIZE_PER_IMAGE", 128)


def measure_crowded(device: torch.device, scale: Scale) -> Iterator[Record]:
    """Count the out-of-memory errors of a Mask R-CNN, cut by predicted bytes and by images.

    Four ordinary images fit into the budget. A window has eight images, of which one is larger and
    crowded.
    """
    short = 96 if scale.case else 384
    ordinary, crowded = _images(short, 10), _images(2 * short, 100)
    opts = ("SOLVER.IMS_PER_BATCH", 2 * _IMAGES, *_FEW_PROPOSALS, *NO_EVALUATION)
    cfg = scale.cfg(MASK_RCNN, device, *opts, *SMALL_ACTIVATIONS)
    model = DeviceModel.choose(None, str(device))
    job = Job.from_cfg(with_settings(cfg, {"MEMFIT.MICRO_BATCH": _IMAGES}), 1, batch=ordinary)
    job = job.with_settings({"MEMFIT.BUDGET_GB": budget_for(job, model)})
    window = job.training_batch(2 * _IMAGES)
    window[1] = job.with_batch(crowded).training_batch(1)[0]
    fit = CostFit(job, model, Padding.of(steps.build(job)[0]))
    fit.run()
    cost_model = CostModel.from_cfg(with_settings(job.cfg, fit.settings()))
    sides: dict[str, dict[str, Any]] = {
        "by bytes": {"cost_model": cost_model},
        f"{_IMAGES} images": {"micro_batch_size": _IMAGES},
    }
    for name, options in sides.items():
        num_iterations = min(_ITERATIONS, scale.rounds)
        run = partial(_train, job, window, num_iterations, options, device)
        yield {"micro_batches": name, "budget_gb": job.budget_gb, **attempt(run, device)}


def _images(short: int, num_objects: int) -> WorstCase:
    size = (short, short * 4 // 3)
    return WorstCase(size, num_objects)


def _train(
    job: Job,
    window: list[Any],
    num_iterations: int,
    options: dict[str, Any],
    device: torch.device,
) -> Record:
    seed_all()
    model, optimizer = steps.build_with_values(job, str(device))
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    sizes: list[int] = []
    model.register_forward_pre_hook(lambda _, args: sizes.append(len(args[0])))
    trainer = AccumulatingTrainer(
        model, repeat(window), optimizer, recovery=RecoveryOptions(), **options
    )
    assert job.budget_gb is not None
    with under_budget(device, job.budget_gb), worst_proposals(model, lambda line: None):
        for iteration in range(num_iterations):
            sizes.clear()
            iterate(trainer, 1, first=iteration)
    assert trainer.recovery is not None
    return {
        "oom_events": trainer.recovery.oom_events,
        "retried_images": trainer.recovery.retried_images,
        "last_micro_batches": sizes,
    }
