# Copyright (c) the d2_memfit developers.
"""Measurements of the largest batch on this machine's GPU."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Optional

import torch
from detectron2.config import CfgNode
from detectron2.utils.events import EventStorage

from ...common.side_work import unchanged_random_state
from ...compat.pytorch import clear_cublas_workspaces
from ...errors import ConfigError
from ...job import Job
from ...memory import (
    DeviceMemory,
    cuda_context_bytes,
    device_memory,
    is_out_of_memory,
    release_memory,
)
from ..device import DeviceModel, DeviceUse, DoesNotFit
from . import steps
from .dry_job import DryJob

__all__ = ["ProbedJob", "job_class", "run_for_real"]


def job_class(probe: bool, device: DeviceModel) -> type[DryJob]:
    """The class for the dry runs, probed or not.

    Raises:
        ConfigError: there is no GPU to probe.
    """
    if probe and not (device.is_gpu and torch.cuda.is_available()):
        raise ConfigError("--probe runs the largest batch on a GPU, and no GPU is visible")
    return ProbedJob if probe else DryJob


class ProbedJob(DryJob):
    """A job whose memory is measured on this machine's GPU; only its time is predicted.

    A probe restores random numbers, the allocator's limit and its cache. It resets the peak
    statistics. Tensors that exist before it do not count.
    """

    def __init__(self, job: Job, device: DeviceModel, *args: Any, **kwargs: Any) -> None:
        name = torch.cuda.get_device_name(_device_of(job.cfg))
        super().__init__(job, replace(device, description=name), *args, **kwargs)

    def _find_uses(self, limit_bytes: Optional[int]) -> list[DeviceUse]:
        expected = super()._find_uses(None)
        device = _device_of(self.job.cfg)
        uses: list[DeviceUse] = []
        too_large = False
        try:
            with _limited(device, limit_bytes) as before:
                for _ in run_for_real(self, str(device)):
                    uses.append(_use(device, before, expected[len(uses)].breakdown))
                    torch.cuda.reset_peak_memory_stats(device)
        except Exception as e:
            if not is_out_of_memory(e):
                raise
            too_large = True
        finally:
            _release(device)
        if limit_bytes is not None:  # the context grows while kernels are loaded
            too_large |= any(use.total_bytes > limit_bytes for use in uses)
        if not too_large:
            return uses
        if limit_bytes is not None:
            raise DoesNotFit
        why = "The GPU cannot hold the largest batch: estimated by a dry run"
        self.assumptions = (*self.assumptions, why)
        return expected

    def _other_segments_gb(self) -> None:
        """Not measured, and a predicted one is not to be compared with what was."""


def run_for_real(dry_job: DryJob, device: str) -> Iterator[None]:
    """Run a job's dry run with real computation, and with weights of 0.

    Yields after the training iterations, and after an evaluation if there is one.

    Args:
        device: as in MODEL.DEVICE.
    """
    job = dry_job.job
    devices = [] if device == "cpu" else [torch.device(device)]
    last = EventStorage(job.cfg.SOLVER.MAX_ITER - 1)  # as in a dry run
    with unchanged_random_state(), torch.random.fork_rng(devices), last:
        torch.default_generator.manual_seed(0)
        model, optimizer = steps.build_with_values(job, device)
        for p in model.parameters():
            if p.dim() > 1:
                p.data.zero_()  # random weights can overflow; biases have a meaning
        trained = [p for p in model.parameters() if p.requires_grad]
        if job.ranks > 1:
            _buckets = torch.empty(sum(map(torch.numel, trained)), device=device)
        precision = job.precision(device)
        if precision.scaler is not None:  # the first steps must not be left out
            precision.scaler = torch.amp.GradScaler(precision.device_type, init_scale=1.0)
        micro_batches = [job.training_batch()] * min(len(job.geometry.micro_batch_sizes()), 2)
        for _ in range(2):  # the second finds the optimizer's states
            model.zero_grad(set_to_none=True)
            for _ in steps.iterate(model, optimizer, precision, micro_batches, job.parts.loss_fn):
                pass
        del micro_batches
        yield
        if dry_job.evaluation is not None:
            steps.infer(model, job, job.evaluation_batch())
            yield


def _device_of(cfg: CfgNode) -> torch.device:
    index = torch.device(cfg.MODEL.DEVICE).index
    return torch.device("cuda", torch.cuda.current_device() if index is None else index)


@contextmanager
def _limited(device: torch.device, limit_bytes: Optional[int]) -> Iterator[DeviceMemory]:
    """While open, limit the process's GPU memory, in addition to tensors that exist already.

    Yields the memory of these tensors.
    """
    torch.zeros(1, device=device)  # it makes the context
    _release(device)
    before = device_memory(device)
    total = torch.cuda.get_device_properties(device).total_memory
    # PyTorch before 2.7 does not say what the limit is; it is 1 unless somebody has set one.
    share_before = getattr(torch.cuda, "get_per_process_memory_fraction", lambda _: 1.0)(device)
    try:
        if limit_bytes is not None:
            limit = limit_bytes - cuda_context_bytes(device) + before.reserved_bytes
            share = min(max(limit, 0) / total, share_before)
            torch.cuda.set_per_process_memory_fraction(share, device)
        yield before
    finally:
        torch.cuda.set_per_process_memory_fraction(share_before, device)


def _use(device: torch.device, before: DeviceMemory, expected: Counter[str]) -> DeviceUse:
    """The measured memory, by the owners of the dry run."""
    memory = device_memory(device)
    allocated = memory.peak_allocated_bytes - before.allocated_bytes
    reserved = memory.peak_reserved_bytes - before.reserved_bytes
    breakdown = expected.copy()
    breakdown["beyond the dry run"] = allocated - sum(expected.values())
    context = cuda_context_bytes(device)
    outside = Counter({"between blocks": reserved - allocated, "context": context})
    return DeviceUse(allocated, reserved, reserved + context, breakdown, outside)


def _release(device: torch.device) -> None:
    """Free caches and cuBLAS workspaces, and reset the peaks."""
    clear_cublas_workspaces()
    release_memory(device)
    torch.cuda.reset_peak_memory_stats(device)
