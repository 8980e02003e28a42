# Copyright (c) the d2_memfit developers.
"""Dry runs of a training step and of an image's evaluation."""

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Callable, Optional

import torch
from detectron2 import layers
from detectron2.layers import mask_ops
from detectron2.structures import Boxes
from detectron2.utils.events import EventStorage
from torch import nn
from torch.optim import Optimizer

from ... import compat
from ...common.patching import Groups, source_files
from ...common.side_work import alone, no_information, unchanged_random_state
from ...config.precision import Precision
from ...job import Job, LossFn, losses_of, tensors_of
from ...memory import TensorMeter
from ...techniques import ready_to_evaluate
from ..dry_run import (
    DryRun,
    Timeline,
    WithoutValues,
    detect_most,
    make_fake,
    noted_calls,
    parts_with_roi_heads,
    worst_case,
)
from ..stand_ins import casts_of_cuda, compiled_operators, cuda_as_cpu, fast_matching

__all__ = [
    "build",
    "build_with_values",
    "evaluate",
    "infer",
    "iterate",
    "train",
]


def train(
    job: Job,
    micro_batches: Sequence[Any],
    like_gpu: bool = True,
    foreach: bool = True,
    accumulates: bool = False,
    few_on_objects: bool = False,
) -> Timeline:
    """Make a dry run of an iteration in which optimizer states and DDP's buckets exist.

    Args:
        micro_batches: the micro-batches of one iteration.
        like_gpu: whether device-dependent code runs as on a GPU, or as on a CPU.
        foreach: whether the optimizer steps on all parameters at once, unless the job says so.
        accumulates: whether gradients of earlier micro-batches exist.
        few_on_objects: as for :func:`~d2_memfit.planner.dry_run.worst_case`.
    """
    precision = job.precision("cpu")
    casts = casts_of_cuda() if like_gpu else ()
    with _started(job, micro_batches, foreach, casts) as (run, model, optimizer):
        run.timeline.has_roi_heads = bool(parts_with_roi_heads(model))
        scripted = _not_optimised(model, precision.dtype)
        if not accumulates:
            model.zero_grad(set_to_none=True)
        with noted_calls(model, run):
            note = run.timeline.notes.append
            loss_fn = job.parts.loss_fn
            phases = iterate(
                model, optimizer, precision, micro_batches, loss_fn, note, few_on_objects
            )
            for phase in phases:
                run.phase = phase
    if scripted:
        _optimised.update(scripted)
        return train(job, micro_batches, like_gpu, foreach, accumulates, few_on_objects)
    return run.timeline


def _not_optimised(model: nn.Module, dtype: torch.dtype) -> set[Any]:
    """TorchScript functions in a model's files that no dry run has called.

    PyTorch optimises them after their first call, once for each number format of autocast. So the
    first call has other operators.
    """
    values = [value for file in source_files(model.modules()) for value in vars(file).values()]
    scripted = [value for value in values if isinstance(value, torch.jit.ScriptFunction)]
    return {(function, dtype) for function in scripted} - _optimised


_optimised: set[Any] = set()


def iterate(
    model: nn.Module,
    optimizer: Optimizer,
    precision: Precision,
    micro_batches: Sequence[Any],
    loss_fn: Optional[LossFn] = None,
    note: Callable[[str], None] = lambda line: None,
    few_on_objects: bool = False,
) -> Iterator[str]:
    """Run an iteration with the most proposals possible; yield each phase before it begins.

    Args:
        note: called with a line about each part that may be larger in a real batch.
        few_on_objects: as for :func:`~d2_memfit.planner.dry_run.worst_case`.
    """
    for batch in micro_batches:
        yield "forward"
        with worst_case(model, note, few_on_objects), precision.autocast():
            loss: Any = sum(losses_of(model, batch, loss_fn).values())
        yield "backward"
        precision.backward(loss * (1 / len(micro_batches)))
        del loss
    yield "optimizer"
    precision.step(optimizer)


def evaluate(job: Job, batch: Any, like_gpu: bool = True, foreach: bool = True) -> Timeline:
    """Make a dry run of an evaluation between two training iterations."""
    paste = [([layers, mask_ops], {"paste_masks_in_image": _paste_like_gpu})] if like_gpu else []
    with _started(job, [batch], foreach, paste) as (run, model, _):
        run.timeline.forget_what_is_gone()  # the optimizer's step is not part of it
        run.phase = "evaluation"
        run.counts = "device" if like_gpu else "both"
        with TensorMeter() as host:
            host.counts = "host"
            infer(model, job, batch, run.timeline.notes.append)
        run.timeline.host_bytes = host.peak_bytes if like_gpu else 0
    return run.timeline


def infer(
    model: nn.Module, job: Job, batch: Any, note: Callable[[str], None] = lambda line: None
) -> None:
    """Run an evaluation's forward with the most proposals and detections possible."""
    model.eval()
    ready = ready_to_evaluate(model, job.cfg, announce=False)
    with torch.no_grad(), ready, worst_case(model, note):
        detect_most(model, batch, note)


def build(job: Job) -> tuple[nn.Module, Optimizer]:
    """Build model and optimizer with the job's techniques, on the CPU and without values.

    Raises:
        ConfigError: a technique does not work with them.
    """
    with _as_on_gpu(), WithoutValues():
        model, optimizer = build_with_values(job, "cpu")
        with ready_to_evaluate(model, job.cfg, announce=False):
            return model, optimizer


def build_with_values(job: Job, device: str) -> tuple[nn.Module, Optimizer]:
    """Build model and optimizer on a device, the optimizer with one rank's share."""
    model = job.build_model(device, announce=False).train()  # as trainers do
    without_zero = job.with_settings({"MEMFIT.OPTIMIZER.ZERO": False})  # it needs other ranks
    optimizer = without_zero.build_optimizer(model, announce=False)
    if job.cfg.MEMFIT.OPTIMIZER.ZERO:
        _keep_share(optimizer, job.ranks)
    return model, optimizer


@contextmanager
def _started(
    job: Job, micro_batches: Sequence[Any], foreach: bool, stand_ins: Groups
) -> Iterator[tuple[DryRun, nn.Module, Optimizer]]:
    """A job after its first iteration, gradients included."""
    last = EventStorage(job.cfg.SOLVER.MAX_ITER - 1)  # a burn-in is over in the last iteration
    with _as_on_gpu(stand_ins), no_information(), last, ExitStack() as stack:
        torch.default_generator.manual_seed(0)  # and no generator of a GPU
        with WithoutValues():
            model, optimizer = build_with_values(job, "cpu")
        if foreach:
            _use_foreach(optimizer)
        run = stack.enter_context(DryRun(model, optimizer, tensors_of(micro_batches)))
        trained = [p for p in model.parameters() if p.requires_grad]
        if job.ranks > 1:
            buckets = make_fake(torch.empty(sum(map(torch.numel, trained))))
            run.own("DDP buckets", buckets)
        for p in trained:
            p.grad = make_fake(torch.zeros_like(p))
            run.own("gradients", p.grad)
        optimizer.step()
        stack.enter_context(fast_matching(model, run))
        yield run, model, optimizer


@contextmanager
def _as_on_gpu(stand_ins: Groups = ()) -> Iterator[None]:
    """Run the code for a GPU, in one thread: little is computed, so more threads do not help."""
    num_threads = torch.get_num_threads()
    with alone(), cuda_as_cpu(compiled_operators(), stand_ins), unchanged_random_state():
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(num_threads)


def _keep_share(optimizer: Optimizer, num_ranks: int) -> None:
    """Keep only one rank's parameters, distributed as by ``ZeroRedundancyOptimizer``.

    The largest come first, each to the rank with the smallest share.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    shares: list[list[nn.Parameter]] = [[] for _ in range(num_ranks)]
    for p in sorted(parameters, key=torch.numel, reverse=True):
        min(shares, key=lambda share: sum(map(torch.numel, share))).append(p)
    kept = {id(p) for p in max(shares, key=lambda share: sum(map(torch.numel, share)))}
    for group in optimizer.param_groups:
        group["params"] = [p for p in group["params"] if id(p) in kept]


def _use_foreach(optimizer: Optimizer) -> None:
    """Step on all parameters at once, as PyTorch does for parameters on a GPU."""
    for group in optimizer.param_groups:
        if group.get("foreach", False) is None and not group.get("fused"):
            group["foreach"] = True


def _paste_like_gpu(_: Callable[..., Any]) -> Callable[..., Any]:
    """A replacement of Detectron2's ``paste_masks_in_image``, whose path depends on the device."""

    def paste_masks_in_image(
        masks: torch.Tensor, boxes: Any, image_shape: tuple[int, int], threshold: float = 0.5
    ) -> torch.Tensor:
        boxes = boxes.tensor if isinstance(boxes, Boxes) else boxes
        num, (height, width) = len(masks), image_shape
        result = make_fake(torch.empty(num, height, width, dtype=torch.bool))
        bytes_of_all = num * height * width * mask_ops.BYTES_PER_FLOAT
        num_chunks = math.ceil(bytes_of_all / mask_ops.GPU_MEM_LIMIT)
        for chunk in torch.arange(num).chunk(max(num_chunks, 1)):
            pasted, _ = compat.paste_masks_on_grid(  # whose grid is large, and has no values either
                masks[chunk, None], make_fake(boxes[chunk]), height, width, skip_empty=False
            )
            result[chunk] = pasted >= threshold
        return result

    return paste_masks_in_image
