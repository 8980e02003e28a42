# Copyright (c) the d2_memfit developers.
"""Measurements of the largest batch on this machine's GPU."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from detectron2.utils.events import EventStorage

from ..common.compat import clear_cublas_workspaces
from ..common.side_work import unchanged_random_state
from ..job import Job
from ..memory import cuda_context_bytes, device_memory, is_out_of_memory, release_memory
from .device import DeviceUse
from .steps import build_with_values, infer, iterate

__all__ = ["measured_uses", "run_for_real"]


def measured_uses(job: Job, evaluates: bool, expected: Counter[str]) -> list[DeviceUse]:
    """Measure the memory of training, and of evaluation, on this machine's GPU.

    Random numbers and the allocator's cache are restored, and the peak statistics are reset.
    Tensors that exist already do not count.

    Args:
        expected: ``allocated_bytes`` by owner of a dry run.

    Returns:
        Nothing if the GPU cannot hold the batch.
    """
    index = torch.device(job.cfg.MODEL.DEVICE).index
    device = torch.device("cuda", torch.cuda.current_device() if index is None else index)
    torch.zeros(1, device=device)  # it makes the context
    _release(device)
    before, uses = device_memory(device), []
    try:
        for _ in run_for_real(job, str(device), evaluates):
            memory, context = device_memory(device), cuda_context_bytes(device)
            allocated = memory.peak_allocated_bytes - before.allocated_bytes
            reserved = memory.peak_reserved_bytes - before.reserved_bytes
            breakdown = expected.copy()
            breakdown["beyond the dry run"] = allocated - sum(expected.values())
            outside = Counter({"between blocks": reserved - allocated, "context": context})
            uses.append(DeviceUse(breakdown, outside))
            torch.cuda.reset_peak_memory_stats(device)
    except Exception as e:
        if not is_out_of_memory(e):
            raise
        uses = []
    finally:
        _release(device)
    return uses


def run_for_real(job: Job, device: str, evaluates: bool = True) -> Iterator[None]:
    """Run a job's largest batch with real computation, and with weights of 0.

    Yields after the training iterations, and after an evaluation if there is one.

    Args:
        device: as in MODEL.DEVICE.
    """
    devices = [] if device == "cpu" else [torch.device(device)]
    last = EventStorage(job.cfg.SOLVER.MAX_ITER - 1)  # as in a dry run
    with unchanged_random_state(), torch.random.fork_rng(devices), last:
        torch.default_generator.manual_seed(0)
        model, optimizer = build_with_values(job, device)
        for p in model.parameters():
            if p.dim() > 1:
                p.data.zero_()  # random weights can overflow; biases have a meaning
        trained = [p for p in model.parameters() if p.requires_grad]
        if job.ranks > 1:
            _buckets = torch.empty(sum(map(torch.numel, trained)), device=device)
        precision = job.precision(device)
        if precision.scaler.is_enabled():  # the first steps must not be left out
            precision.scaler = torch.amp.GradScaler(precision.device_type, init_scale=1.0)
        micro_batches: list[Any] = [job.training_batch()]
        micro_batches *= min(-(-job.window // job.largest_micro_batch), 2)
        for _ in range(2):  # the second finds the optimizer's states
            model.zero_grad(set_to_none=True)
            iterate(job, model, optimizer, precision, micro_batches)
        del micro_batches
        yield
        if evaluates and job.cfg.DATASETS.TEST:
            infer(model, job, job.batches.evaluation())
            yield


def _release(device: torch.device) -> None:
    """Free caches and cuBLAS workspaces, and reset the peaks."""
    clear_cublas_workspaces()
    release_memory(device)
    torch.cuda.reset_peak_memory_stats(device)
