# Copyright (c) the d2_memfit developers.
"""Memory and time of training steps: with a technique, with a trainer, after a recovery."""

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from itertools import repeat
from typing import Any, Optional

import torch
from detectron2.utils.events import EventStorage

from ..config import with_settings
from ..engine import AccumulatingTrainer
from ..job import Job, RecoveryOptions, WorstCase
from ..memory import release_memory
from ..planner.dry_run import worst_proposals
from ..planner.estimates import build_with_values
from ..techniques import get_technique
from .compare import allocated_bytes, relative_difference
from .injection import iterate, seed_all
from .peaks import limited, median_seconds, peaks_of
from .scale import MASK_RCNN, TINY_MODEL, Record, Scale

__all__ = ["NO_EVALUATION", "SMALL_ACTIVATIONS", "Steps", "recover", "step_of", "train"]

_GB = 2**30
NO_EVALUATION = ("DATASETS.TEST", "()")
SMALL_ACTIVATIONS = ("MODEL.PIXEL_STD", [300.0] * 3)  # with random weights


def recover(device: torch.device, scale: Scale) -> Record:
    of_rehearsal = TINY_MODEL if scale.case else ()
    cfg = scale.cfg(MASK_RCNN, device, *SMALL_ACTIVATIONS, *of_rehearsal)
    job = Job.from_cfg(cfg, 1, batch=WorstCase((512, 512), 5))
    batch = _with_random_pixels(job.training_batch(8))

    def trainer(loader: Any, **options: Any) -> AccumulatingTrainer:
        seed_all()
        model, _ = build_with_values(job, str(device))
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)
        return AccumulatingTrainer(model, loader, optimizer, **options)

    peaks = {}
    for num_images in (1, 8):
        probe = trainer(repeat(batch[:num_images]))
        iterate(probe)
        probe.optimizer.zero_grad(set_to_none=True)
        with peaks_of(device) as peak:
            before = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
            iterate(probe)
            peaks[num_images] = peak.take()[0] - before
        del probe
        release_memory(device)
    enough = trainer(repeat(batch), micro_batch_size=4)
    iterate(enough, 3)
    seconds = median_seconds(partial(iterate, enough), device, scale.rounds)
    weights = {name: p.detach().cpu() for name, p in enough.model.named_parameters()}
    del enough
    release_memory(device)
    limited_trainer = trainer(repeat(batch), recovery=RecoveryOptions())
    # The optimizer's states are made in the first iteration, so that the limit has room for them.
    states = sum(p.numel() * p.element_size() for p in limited_trainer.model.parameters())
    with limited(device, (peaks[1] + 3 * peaks[8]) // 4 + states):
        iterate(limited_trainer, 3)
        recovered = median_seconds(partial(iterate, limited_trainer), device, scale.rounds)
    recovery = limited_trainer.recovery
    assert recovery is not None
    after = {name: p.detach().cpu() for name, p in limited_trainer.model.named_parameters()}
    return {
        "images": len(batch),
        "oom_events": recovery.oom_events,
        "micro_batch": recovery.size.images,
        "seconds_with_enough_memory": seconds,
        "seconds_under_the_limit": recovered,
        "relative_difference_of_weights": relative_difference(after, weights),
    }


def step_of(name: Optional[str], num_images: int, device: torch.device, scale: Scale) -> Record:
    """Measure a training step at full size with one technique."""
    opts = ("SOLVER.IMS_PER_BATCH", num_images, *NO_EVALUATION, *SMALL_ACTIVATIONS)
    cfg = scale.cfg(MASK_RCNN, device, *opts)
    dry_job = scale.dry_job(
        with_settings(cfg, get_technique(name).enabling_settings(cfg) if name else {})
    )
    expected = allocated_bytes(dry_job.training, dry_job._uses()[0], device)
    with peaks_of(device) as peaks:
        runs = Steps(dry_job.job, device)
        runs.step()
        peaks.take()
        runs.step()
        allocated, _ = peaks.take()
    record = {
        "images": num_images,
        "gb": allocated / _GB,
        "estimated_gb": expected / _GB,
        "seconds": median_seconds(runs.step, device, scale.rounds),
        "predicted_seconds": dry_job.seconds(),
    }
    del runs
    release_memory(device)
    return record


class Steps:
    """Steps of a trainer with the largest images of a job, random pixels and constant weights.

    Weights are random: with zeros a GPU would need less power, and be faster.

    Args:
        job: with ``SMALL_ACTIVATIONS``, so that nothing overflows.
        make: called with a model, a loader and an optimizer, and a precision if it is not float32.
        num_images: in a batch of the loader; None is one micro-batch.
    """

    def __init__(
        self,
        job: Job,
        device: torch.device,
        make: Callable[..., Any] = AccumulatingTrainer,
        num_images: Optional[int] = None,
    ) -> None:
        seed_all()
        model, optimizer = build_with_values(job, str(device))
        for group in optimizer.param_groups:
            group["lr"] = 0.0
        precision = job.precision(str(device))
        if precision.scaler is not None:  # the first steps must not be left out
            precision.scaler = torch.amp.GradScaler(precision.device_type, init_scale=1.0)
        options = {} if precision.dtype == torch.float32 else {"precision": precision}
        batch = _with_random_pixels(job.training_batch(num_images))
        self._trainer = make(model, repeat(batch), optimizer, **options)

    def step(self) -> None:
        with ExitStack() as stack:
            stack.enter_context(EventStorage())
            stack.enter_context(worst_proposals(self._trainer.model, lambda line: None))
            self._trainer.iter = 0
            self._trainer.run_step()

    def gradients(self) -> dict[str, torch.Tensor]:
        """Gradients, on the host, of a step that has the same random numbers in each call."""
        seed_all()
        self.step()
        parameters = self._trainer.model.named_parameters()
        return {name: p.grad.cpu() for name, p in parameters if p.grad is not None}


def _with_random_pixels(batch: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        {**d, "image": torch.randint(0, 256, d["image"].shape, dtype=torch.uint8)} for d in batch
    ]


def train(make: Callable[..., Any], num_images: int, device: torch.device, scale: Scale) -> Record:
    opts = ("SOLVER.IMS_PER_BATCH", num_images, *NO_EVALUATION, *SMALL_ACTIVATIONS)
    dry_job = scale.dry_job(scale.cfg(MASK_RCNN, device, *opts))
    with peaks_of(device) as peaks:
        steps = Steps(dry_job.job, device, make)
        steps.step()
        peaks.take()
        steps.step()
        allocated, reserved = peaks.take()
    seconds = median_seconds(steps.step, device, scale.rounds)
    del steps
    release_memory(device)
    return {"gb": allocated / _GB, "reserved_gb": reserved / _GB, "seconds": seconds}
