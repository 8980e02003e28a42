# Copyright (c) the d2_memfit developers.
"""Memory and time of what plans choose: a whole plan, blocks one by one, and a cost model."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from detectron2.config import CfgNode

from ..config import with_settings
from ..engine import AccumulatingTrainer
from ..errors import MemfitError
from ..iteration import CostModel, Padding
from ..job import Job, RecoveryOptions, WorstCase
from ..planner.device import DeviceModel, calibrate
from ..planner.estimates import DryJob, margin_of, steps
from ..planner.search import (
    BLOCKWISE,
    Choice,
    CostFit,
    Trials,
    choice_of,
    plan_memory,
    with_best_blocks,
)
from ..planner.writing import planned_config
from ..techniques import get_technique
from .peaks import under_budget
from .scale import TINY_MODEL, Record, Scale, attempt, largest_that_fits
from .steps import Steps, compared, measured_steps

__all__ = ["measure_blocks", "measure_crowded", "measure_plans"]

_GB = 2**30
_CHECKPOINT = BLOCKWISE[0]
_IMAGES = 4  # ordinary ones that fit at once, with a crowded one in the window
_ITERATIONS = 3  # after the first, a number of images is halved for good


def measure_plans(device: torch.device, scale: Scale) -> Iterator[Record]:
    """Measure plans with exact techniques for a Mask R-CNN, in float32 and in mixed precision.

    Half of an iteration's images fit into the budget at once. Times are predicted twice: with the
    device file that a user gets, and with the speeds of this card.
    """
    model = DeviceModel.choose(None, str(device))

    def half(num_images: int) -> DryJob:
        cfg = scale.step_cfg(2 * num_images, device, {"MEMFIT.MICRO_BATCH": num_images})
        return scale.dry_job(cfg)

    sizes = (8, 2, 1)[-1 if scale.case else 0 :]
    num_images, dry_job = largest_that_fits(half, sizes, device)
    budget_gb = _budget_gb(dry_job)
    cfg = scale.step_cfg(2 * num_images, device)
    own_speeds = DeviceModel(name="this card", **calibrate(device, scale.seconds / 5))
    mixed = with_settings(cfg, get_technique("MixedPrecision").enabling_settings(cfg))
    for precision, of_precision in (("float32", cfg), ("mixed", mixed)):
        run = partial(_train_plan, of_precision, budget_gb, model, own_speeds, device, scale)
        yield {"precision": precision, "budget_gb": budget_gb, **attempt(run, device)}


def _budget_gb(dry_job: DryJob) -> float:
    """Smallest budget into which a job's micro-batches fit."""
    return round(dry_job.total_bytes() / _GB / (1 - margin_of(dry_job.job)) + 0.02, 2)


def _train_plan(
    cfg: CfgNode,
    budget_gb: float,
    model: DeviceModel,
    own_speeds: DeviceModel,
    device: torch.device,
    scale: Scale,
) -> Record:
    options: Any = {"device": model, "batch": scale.case, "evaluates": False}
    plan = plan_memory(cfg, budget_gb, allow=["exact"], **options)
    if not plan.fits:
        raise MemfitError(f"no plan fits; the smallest budget is {plan.smallest_budget_gb:.2f} GB")
    job = Job.from_cfg(planned_config(cfg, plan), 1, batch=scale.case)
    dry_job = DryJob(job, model, evaluates=False)
    window, images = job.geometry.window, job.geometry.micro_batch_sizes()[0]
    make = partial(AccumulatingTrainer, micro_batch_size=images)
    rounds = max(scale.rounds // 2, 1)
    with under_budget(device, budget_gb):
        record = measured_steps(dry_job, device, rounds, make, job.training_batch(window))
    return {
        "images": window,
        "micro_batch": images,
        "techniques": [s.name for s in plan.steps if s.name != "smaller micro-batches"],
        "predicted_by_own_speeds": DryJob(job, own_speeds, evaluates=False).seconds(),
        **record,
    }


def measure_blocks(device: torch.device, scale: Scale) -> Iterator[Record]:
    """Measure a Mask R-CNN with no block, all blocks and some blocks recomputed.

    The limit is between the memory of the first two.
    """
    model = DeviceModel.choose(None, str(device))

    def trials_of(num_images: int) -> Trials:
        # In a rehearsal, the weights of a whole model would take more than small images.
        settings, case = (TINY_MODEL, WorstCase((512, 512), 5)) if scale.case else ({}, None)
        job = Job.from_cfg(scale.step_cfg(num_images, device, settings), 1, batch=case)
        trials = Trials(job, model, evaluates=False)
        trials.limit_bytes = 2**62
        return trials

    def saved(num_images: int) -> DryJob:
        return trials_of(num_images).dry_job(choice_of((), num_images))

    num_images, _ = largest_that_fits(saved, (8, 2, 1), device)
    trials = trials_of(num_images)
    plain, every = choice_of((), num_images), choice_of([_CHECKPOINT], num_images)
    trials.limit_bytes = sum(trials.dry_job(c).least_bytes() for c in (plain, every)) // 2
    sides = {"saved": plain, "all recomputed": every}
    sides["some recomputed"] = with_best_blocks(trials, every, [num_images], [_CHECKPOINT])
    if device.type == "cuda":
        best = with_best_blocks(trials, every, [num_images], BLOCKWISE)
        sides["some recomputed or offloaded"] = best

    def run(choice: Choice) -> Record:
        modules = dict(choice.modules)
        blocks = {name: list(modules.get(name, ())) for name in BLOCKWISE}
        return {**blocks, **measured_steps(trials.dry_job(choice), device, scale.rounds)}

    first: Record = {}
    for name, choice in sides.items():
        record = attempt(partial(run, choice), device)
        first = first or record
        yield {"blocks": name, "images": num_images, **compared(record, first)}


def measure_crowded(device: torch.device, scale: Scale) -> Iterator[Record]:
    """Count the out-of-memory errors of a Mask R-CNN, cut by predicted bytes and by images.

    Four ordinary images fit into the budget. A window has eight images, of which one is larger and
    crowded.
    """
    short = 96 if scale.case else 384
    ordinary, crowded = _images(short, 10), _images(2 * short, 100)
    # The mask head of all proposals would take more than the images.
    few_proposals = {"MODEL.ROI_HEADS.BATCH_SIZE_PER_IMAGE": 128, "MEMFIT.MICRO_BATCH": _IMAGES}
    cfg = scale.step_cfg(2 * _IMAGES, device, few_proposals)
    model = DeviceModel.choose(None, str(device))
    job = Job.from_cfg(cfg, 1, batch=ordinary)
    budget_gb = _budget_gb(DryJob(job, model, evaluates=False))
    job = job.with_settings({"MEMFIT.BUDGET_GB": budget_gb})
    window = job.training_batch(2 * _IMAGES)
    window[1] = job.with_batch(crowded).training_batch(1)[0]
    fit = CostFit(job, model, Padding.of(steps.build(job)[0]))
    fit.run()
    cost_model = CostModel.from_cfg(with_settings(job.cfg, fit.settings()))
    sides: dict[str, dict[str, Any]] = {
        "by bytes": {"cost_model": cost_model},
        f"{_IMAGES} images": {"micro_batch_size": _IMAGES},
    }
    num_iterations = min(_ITERATIONS, scale.rounds)
    for name, options in sides.items():
        run = partial(train_under_budget, job, window, num_iterations, options, device)
        yield {"micro_batches": name, "budget_gb": budget_gb, **attempt(run, device)}


def _images(short: int, num_objects: int) -> WorstCase:
    return WorstCase((short, short * 4 // 3), num_objects)


def train_under_budget(
    job: Job,
    window: list[Any],
    num_iterations: int,
    options: dict[str, Any],
    device: torch.device,
) -> Record:
    """Train under the job's budget with recovery; count the errors.

    Args:
        options: options of the trainer, which say how the window is cut.
    """
    make = partial(AccumulatingTrainer, recovery=RecoveryOptions(), **options)
    training = Steps(job, device, make, window)
    recovery, sizes = training.trainer.recovery, []
    training.trainer.model.register_forward_pre_hook(lambda _, args: sizes.append(len(args[0])))
    assert job.budget_gb is not None
    with under_budget(device, job.budget_gb):
        for _ in range(num_iterations):
            sizes.clear()
            training.step()
    return {
        "oom_events": recovery.oom_events,
        "retried_images": recovery.retried_images,
        "last_micro_batches": sizes,
    }
