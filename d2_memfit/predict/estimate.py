# Copyright (c) the d2_memfit developers.
"""Estimates of the memory of a trained model, without the device."""

from dataclasses import dataclass, replace
from typing import Optional

from ..common import GB
from ..job import Job, size_of
from ..memory import segments_expand
from ..planner.device import DeviceModel
from ..planner.errors import one_line_errors
from ..planner.steps import Session
from ..planner.timeline import Workspace

__all__ = ["InferenceEstimate", "estimate_inference"]

_OTHERS = ("gradients", "optimizer", "DDP buckets")  # owners in training


@dataclass(frozen=True)
class InferenceEstimate:
    """Memory for one image of the largest size, with the most objects possible.

    Attributes:
        device: description of the device.
        image_size: height and width in pixels of the model's input.
        peak_allocated_gb: ``torch.cuda.max_memory_allocated``, in GB of 2^30 bytes.
        device_total_gb: device memory of the process, context included.
    """

    device: str
    image_size: tuple[int, int]
    peak_allocated_gb: float
    device_total_gb: float

    def __str__(self) -> str:
        height, width = self.image_size
        return (
            f"Needs {self.device_total_gb:.2f} GB of the device, including its context, for one "
            f"image of {height} x {width} pixels after resizing\n"
            f"{self.peak_allocated_gb:.2f} GB peak allocated\nOn {self.device}"
        )


def estimate_inference(job: Job, device_name: Optional[str] = None) -> InferenceEstimate:
    """Estimate inference by a dry run of one image.

    Args:
        device_name: as for :func:`~d2_memfit.estimate_memory`.

    Raises:
        ConfigError: the job has no test loader, or its model does not run.
    """
    device = DeviceModel.choose(device_name, job.cfg.MODEL.DEVICE)
    with one_line_errors():
        batch = job.batches.evaluation()
        timeline = Session(job, device.is_gpu, device.foreach).evaluate(batch)
    events = timeline.events
    kept = [e for e in events if isinstance(e, Workspace) or e.allocation.owner not in _OTHERS]
    use = device.use(replace(timeline, events=kept), segments_expand(job.budget_gb is not None))
    return InferenceEstimate(
        device=device.description,
        image_size=size_of(batch),
        peak_allocated_gb=use.allocated_bytes / GB,
        device_total_gb=use.total_bytes / GB,
    )
