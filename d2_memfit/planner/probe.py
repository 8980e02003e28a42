"""The worst batch run for real, on the device that is there."""

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import repeat
from typing import Optional

import torch
from detectron2.config import CfgNode
from detectron2.utils.events import EventStorage

from ..engine.train_loop import AccumulatingTrainer
from ..errors import ConfigError
from ..memory import cuda_context_bytes, device_memory, is_out_of_memory, release_memory
from ..precision import Precision
from ..techniques import ready_to_evaluate
from . import job
from .allocators import DoesNotFit
from .device_model import DeviceModel, DeviceUse
from .dry_job import DryJob
from .worst_case import worst_detections, worst_proposals

__all__ = ["ProbedJob", "job_class", "run_for_real"]


def job_class(probe: bool, device: DeviceModel) -> type[DryJob]:
    """
    Raises:
        ConfigError: there is no GPU to be probed.
    """
    if probe and not (device.is_gpu and torch.cuda.is_available()):
        raise ConfigError("--probe runs the largest batch on a GPU, and no GPU is visible")
    return ProbedJob if probe else DryJob


class ProbedJob(DryJob):
    """A job whose memory is measured on this machine's GPU; only its time is predicted.

    A probe leaves nothing behind: random numbers, the limit of the allocator and what that holds
    ready are as before. Its peak statistics begin anew.

    What the GPU cannot hold is estimated.
    """

    def _find_uses(self, limit_bytes: Optional[int]) -> list[DeviceUse]:
        expected = super()._find_uses(None)
        device = torch.device("cuda", torch.cuda.current_device())
        uses: list[DeviceUse] = []
        out_of_memory = False
        try:
            with _limited(device, limit_bytes) as context_bytes:
                for _ in run_for_real(self, f"cuda:{device.index}"):
                    use = _use(device, context_bytes, expected[len(uses)].breakdown)
                    uses.append(use)
                    torch.cuda.reset_peak_memory_stats(device)
        except Exception as e:
            if not is_out_of_memory(e):
                raise
            out_of_memory = True
        finally:
            release_memory(device)
            torch._C._cuda_clearCublasWorkspaces()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)
        if not out_of_memory:
            return uses
        if limit_bytes is None:
            return expected
        raise DoesNotFit


def run_for_real(dry_job: DryJob, device: str) -> Iterator[None]:
    """Do what a job's dry run does, with weights of 0; it stops behind the iterations of training,
    and behind an evaluation, if there is one.

    Args:
        device: as in MODEL.DEVICE.
    """
    cfg, num_gpus = dry_job.cfg, dry_job.num_gpus
    devices = [] if device == "cpu" else [torch.device(device)]
    with torch.random.fork_rng(devices), ExitStack() as stack:
        torch.manual_seed(0)
        model, optimizer = job.build_with_values(cfg, device, num_gpus)
        for p in model.parameters():
            p.data.zero_()  # random ones can overflow
        trained = [p for p in model.parameters() if p.requires_grad]
        if num_gpus > 1:
            buckets = torch.empty(sum(map(torch.numel, trained)), device=device)
            if cfg.MEMFIT.OPTIMIZER.GRADIENT_BUCKET_VIEW:
                job.keep_gradients_in(buckets, trained)
        batch = dry_job.training_batch()
        stack.enter_context(EventStorage())
        with worst_proposals(model, cfg, batch):
            trainer = AccumulatingTrainer(
                model,
                repeat(batch),
                optimizer,
                accumulation_steps=min(len(dry_job.micro_batch_sizes()), 2),
                precision=Precision.from_cfg(_on(cfg, device)),
            )
            for _ in range(2):  # the second finds the optimizer's states there
                trainer.run_step()
        del trainer, batch
        yield
        if dry_job.evaluation is None:
            return
        batch = dry_job.evaluation_batch()
        model.eval()
        for context in (
            torch.no_grad(),
            ready_to_evaluate(model, cfg),
            worst_proposals(model, cfg, batch),
            worst_detections(model),
        ):
            stack.enter_context(context)
        model(batch)
        yield


@contextmanager
def _limited(device: torch.device, limit_bytes: Optional[int]) -> Iterator[int]:
    """While open, the process takes no more of the GPU. Yields what the context takes of that."""
    release_memory(device)
    context_bytes = cuda_context_bytes(device)
    total = torch.cuda.get_device_properties(device).total_memory
    # PyTorch before 2.7 does not say what the limit is; it is 1 unless somebody has set one.
    before = getattr(torch.cuda, "get_per_process_memory_fraction", lambda _: 1.0)(device)
    torch.cuda.reset_peak_memory_stats(device)
    try:
        if limit_bytes is not None:
            share = max(limit_bytes - context_bytes, 0) / total
            torch.cuda.set_per_process_memory_fraction(min(share, before), device)
        yield context_bytes
    finally:
        torch.cuda.set_per_process_memory_fraction(before, device)


def _use(device: torch.device, context_bytes: int, expected: Counter) -> DeviceUse:
    """What was measured, by the owners that the dry run knows."""
    memory = device_memory(device)
    breakdown = expected.copy()
    breakdown["beyond the dry run"] = memory.peak_allocated_bytes - sum(expected.values())
    return DeviceUse(
        memory.peak_allocated_bytes,
        memory.peak_reserved_bytes,
        memory.peak_reserved_bytes + context_bytes,
        breakdown,
    )


def _on(cfg: CfgNode, device: str) -> CfgNode:
    changed = cfg.clone()
    changed.defrost()
    changed.MODEL.DEVICE = device
    return changed
