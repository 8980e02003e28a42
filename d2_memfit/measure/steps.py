# Copyright (c) the d2_memfit developers.
"""Training of jobs with random pixels and weights, and the memory and time that it takes."""

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import partial
from itertools import repeat
from typing import Any, Optional

import torch
from detectron2.engine import SimpleTrainer
from detectron2.utils.env import seed_all_rng
from detectron2.utils.events import EventStorage

from ..common.units import GB
from ..engine import AccumulatingTrainer
from ..job import Job, WorstCase
from ..memory import on_host, release_memory
from ..planner.dry_run import worst_case
from ..planner.estimates import build_with_values, infer
from ..settings import NormalizerOptions, RecoveryOptions
from .items import Item, Record, Scale
from .peaks import limited, median_seconds, peaks_of, under_budget

__all__ = ["Steps", "measured", "recovered", "with_fragments"]

_ITERATIONS = 30  # with images of many sizes
_SECONDS = 2.0  # of steps that are timed


class Steps:
    """Steps of a trainer with random pixels and constant weights.

    Weights are random: with zeros a GPU would need less power, and be faster.

    Args:
        job: of :meth:`Item.job`, so that nothing overflows.
        make: called with a model, a loader and an optimizer, and a precision if it is not float32.
        windows: one list of dataset dicts for each step; None for the job's largest images in each.
    """

    def __init__(
        self,
        job: Job,
        device: torch.device,
        make: Callable[..., Any] = AccumulatingTrainer,
        windows: Optional[Iterable[list[dict[str, Any]]]] = None,
    ) -> None:
        seed_all_rng(0)
        self._job = job
        model, optimizer = build_with_values(job, str(device))
        for group in optimizer.param_groups:
            group["lr"] = 0.0
        precision = job.precision(str(device))
        if precision.scaler is not None:  # the first steps must not be left out
            precision.scaler = torch.amp.GradScaler(precision.device_type, init_scale=1.0)
        options = {} if precision.dtype == torch.float32 else {"precision": precision}
        if windows is None:
            windows = repeat(with_random_pixels(job.training_batch(job.geometry.window)))
        self.trainer = make(model, iter(windows), optimizer, **options)
        self._num_steps = 0

    def step(self) -> None:
        with EventStorage(), worst_case(self.trainer.model, lambda line: None):
            self.trainer.iter = self._num_steps
            self.trainer.run_step()
        self._num_steps += 1

    def evaluate(self) -> None:
        """Run an evaluation between two steps, with the most detections."""
        model = self.trainer.model
        for p in model.parameters():
            if p.dim() > 1:
                p.data.zero_()
        with on_host():
            batch = self._job.evaluation_batch()
        with EventStorage():
            infer(model, self._job, batch)


def with_random_pixels(batch: list[dict[str, Any]]) -> list[dict[str, Any]]:
    with on_host():
        pixels = [torch.randint(0, 256, d["image"].shape, dtype=torch.uint8) for d in batch]
    return [{**d, "image": image} for d, image in zip(batch, pixels)]


def measured(item: Item, job: Job, device: torch.device, scale: Scale) -> Record:
    """Measure memory and time of a job's iterations and evaluation, under its budget if any."""
    size = job.geometry.largest_micro_batch
    make: Callable[..., Any] = partial(AccumulatingTrainer, micro_batch_size=size)
    if item.name == "Detectron2":
        make = SimpleTrainer
    elif item.name.endswith("with recovery"):
        make = partial(AccumulatingTrainer, recovery=RecoveryOptions())
    limit = nullcontext() if job.budget_gb is None else under_budget(device, job.budget_gb)
    with limit, peaks_of(device) as peaks:
        steps = Steps(job, device, make)
        steps.step()  # it makes the optimizer's states, and loads kernels
        peaks.take()
        record: Record = {
            "images": job.geometry.window,
            "micro_batch": size,
            "budget_gb": job.budget_gb,
            "seconds": median_seconds(steps.step, device, _SECONDS, *scale.rounds),
            **peaks.take(),
        }
        if item.evaluates:
            steps.evaluate()
            record.update({f"evaluation_{key}": value for key, value in peaks.take().items()})
    return record


def with_fragments(item: Item, job: Job, device: torch.device, scale: Scale) -> Record:
    """Train with images of many sizes under the job's budget, with recovery; count the errors."""
    short = 96 if scale.case else 640
    generator = torch.Generator().manual_seed(0)

    def window() -> list[dict[str, Any]]:
        sides = torch.randint(short, short * 5 // 4, (2,), generator=generator).tolist()
        objects = int(torch.randint(1, 60, (), generator=generator))
        case = WorstCase((min(sides), max(sides) * 4 // 3), objects)
        return with_random_pixels(job.with_batch(case).training_batch(job.geometry.window))

    num_iterations = 3 if scale.case else _ITERATIONS
    windows = (window() for _ in range(num_iterations))
    untested = NormalizerOptions("off")  # the peaks are those of training alone
    recovering = partial(AccumulatingTrainer, recovery=RecoveryOptions(), normalizers=untested)
    assert job.budget_gb is not None
    with under_budget(device, job.budget_gb), peaks_of(device) as peaks:
        training = Steps(job, device, recovering, windows)
        recovery = training.trainer.recovery
        sizes: list[int] = []
        training.trainer.model.register_forward_pre_hook(lambda _, args: sizes.append(len(args[0])))
        for _ in range(num_iterations):
            sizes.clear()
            training.step()
        return {
            "budget_gb": job.budget_gb,
            "oom_events": recovery.oom_events,
            "retried_images": recovery.retried_images,
            "last_micro_batches": sizes,
            **peaks.take(),
        }


def recovered(item: Item, job: Job, device: torch.device, scale: Scale) -> Record:
    """Measure a batch that does not fit, and the same with enough memory."""
    job = job.with_batch(WorstCase((512, 512), 5))
    images = with_random_pixels(job.training_batch(8))

    def run(**options: Any) -> tuple[float, float, Any]:
        """Seconds of a step, its peak in GB, and the trainer's recovery."""
        release_memory(device)
        with peaks_of(device) as peak:
            steps = Steps(job, device, partial(AccumulatingTrainer, **options), repeat(images))
            steps.step()
            peak.take()
            seconds = median_seconds(steps.step, device, _SECONDS, *scale.rounds)
            return seconds, peak.take()["allocated_gb"], steps.trainer.recovery

    _, of_all_gb, _ = run()
    seconds, of_half_gb, _ = run(micro_batch_size=4)
    release_memory(device)
    with limited(device, int((of_half_gb + 3 * of_all_gb) / 4 * GB)):
        under_limit, _, recovery = run(recovery=RecoveryOptions())
    return {
        "images": len(images),
        "oom_events": recovery.oom_events,
        "micro_batch": recovery.cutter.images,
        "seconds_with_enough_memory": seconds,
        "seconds_under_the_limit": under_limit,
    }
