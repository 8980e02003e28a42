# Copyright (c) the d2_memfit developers.
"""A check of a job's estimate against a computed training step on real images."""

import copy
from dataclasses import dataclass
from typing import Any

import torch
from detectron2.checkpoint import DetectionCheckpointer
from detectron2.data import DatasetCatalog
from detectron2.utils.events import EventStorage

from ..common.files import is_file
from ..common.side_work import alone, no_information, unchanged_random_state
from ..common.units import GB, MB
from ..errors import ConfigError
from ..job import (
    Job,
    Parts,
    empty_files,
    losses_of,
    need_of,
    num_instances_of,
    readable_loader,
    size_of,
    tensors_of,
)
from ..memory import TensorMeter, available_host_bytes
from ..planner.compiled_operators import compiled_operators
from ..planner.device import DeviceModel
from ..planner.errors import one_line_errors
from ..planner.estimate import DryJob
from ..planner.stand_ins import cuda_as_cpu
from ..planner.steps import build_with_values
from .patient import Untested

__all__ = ["RealStep", "estimate_against_real_step", "worst_real_images"]

_ITERATIONS = 2  # the optimizer's states exist from the second on


@dataclass(frozen=True)
class RealStep:
    """An estimate of training, and a measured step on real images.

    Attributes:
        estimated_bytes: peak of the tensors of the largest micro-batch, by a dry run.
        measured_bytes: peak of the tensors of a micro-batch of real images.
        image_size: height and width in pixels to which the real images are padded.
        num_instances: annotated objects in each of them.
        at_least: reasons why a job may need more than estimated; empty if the worst case is known.
    """

    estimated_bytes: int
    measured_bytes: int
    image_size: tuple[int, int]
    num_instances: tuple[int, ...]
    at_least: tuple[str, ...]

    @property
    def error(self) -> float:
        """Estimated bytes / measured bytes - 1. Below 0, the estimate is too low."""
        return self.estimated_bytes / self.measured_bytes - 1

    def __str__(self) -> str:
        return (
            f"{self.estimated_bytes / MB:.1f} MB estimated, {self.measured_bytes / MB:.1f} "
            f"MB measured with real images ({self.error:+.1%})"
        )


def estimate_against_real_step(job: Job) -> RealStep:
    """Compare a job's estimate with a training step on real images, computed on the CPU.

    The dry run has the job's largest invented batch, and the most proposals possible. The real step
    has annotated images of the dataset, and the proposals that the model makes with the weights of
    the first iteration. It may need less, above all with random weights. It must not need more.
    Both have stand-ins for operators that are compiled for a GPU.

    Args:
        job: a job that a CPU can compute.

    Raises:
        ConfigError: the training dataset cannot be read, or the model does not run on a CPU.
        Untested: a real step needs more memory than is available.
    """
    at_once = {"MEMFIT.MICRO_BATCH": None, "SOLVER.ACCUMULATION_STEPS": 1, "MODEL.DEVICE": "cpu"}
    job = job.with_settings(at_once)
    with one_line_errors():
        images = worst_real_images(job.parts, job.geometry.largest_micro_batch)
        dry_job = DryJob(job, DeviceModel.load("cpu"), evaluates=False)
        estimated_bytes = sum(dry_job.training.peak().values())
        if estimated_bytes > available_host_bytes():
            raise Untested(f"not tested: {estimated_bytes / GB:.1f} GB of RAM are needed")
        measured_bytes = _measure(job, images)
    return RealStep(
        estimated_bytes,
        measured_bytes,
        size_of(images),
        tuple(len(d.get("instances", ())) if isinstance(d, dict) else 0 for d in images),
        dry_job.at_least,
    )


def _measure(job: Job, batch: list[object]) -> int:
    """Peak bytes of the tensors of some iterations, including the batch."""
    with (
        alone(),
        no_information(),
        unchanged_random_state(),
        EventStorage(),
        cuda_as_cpu(compiled_operators()),  # as in a dry run
        TensorMeter() as meter,
    ):
        torch.default_generator.manual_seed(0)
        model, optimizer = build_with_values(job, "cpu")
        if is_file(job.cfg.MODEL.WEIGHTS):  # nothing is downloaded
            DetectionCheckpointer(model).load(job.cfg.MODEL.WEIGHTS)
        for group in optimizer.param_groups:
            group["lr"] = 0.0  # random weights would diverge
        precision = job.precision("cpu")
        for _ in range(_ITERATIONS):
            model.zero_grad(set_to_none=True)
            with precision.autocast():
                loss: Any = sum(losses_of(model, batch, job.parts.loss_fn).values())
            precision.backward(loss)
            del loss
            precision.step(optimizer)
        return meter.peak_bytes + sum(t.nbytes for t in tensors_of(batch))


def worst_real_images(parts: Parts, num_images: int) -> list[Any]:
    """Read and map the most crowded images and the largest ones; return the largest results."""
    loader = readable_loader(parts)
    added = {k: value for k, value in loader.first.items() if k not in ("height", "width")}
    with empty_files():
        dicts = [d for name in loader.names for d in DatasetCatalog.get(name)]
        crowded = sorted(dicts, key=num_instances_of)[-num_images:]
        large = sorted(dicts, key=lambda d: d.get("height", 0) * d.get("width", 0))[-num_images:]
        candidates = list({id(d): d for d in (*crowded, *large)}.values())
        tried = [loader.mappers[0]({**added, **copy.deepcopy(d)}) for d in candidates]
    images = [image for image in tried if image is not None]
    if len(images) < num_images:
        names = ", ".join(loader.names)
        raise ConfigError(f"{names} has {len(images)} images, and {num_images} are needed")
    return sorted(images, key=need_of)[-num_images:]
