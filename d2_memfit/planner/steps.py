# Copyright (c) the d2_memfit developers.
"""Dry runs of training steps and of an image's evaluation, all with one model and optimizer."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Callable

import torch
from detectron2 import layers
from detectron2.layers import mask_ops
from detectron2.utils.events import EventStorage
from torch import nn
from torch.optim import Optimizer

from ..common.compat import default_group_replaced
from ..common.errors import MemfitError
from ..common.patching import Group, with_original
from ..common.side_work import no_information, unchanged_random_state
from ..config.settings import Precision
from ..job import Job, is_image, losses_of, tensors_of
from ..memory import TensorMeter
from ..techniques.registry import TIERS, get_technique, ready_to_evaluate
from .dry_run import DryRun
from .matching import fast_matching
from .meta import make_fake
from .stand_ins import casts_of_cuda, compiled_operators, cuda_as_cpu
from .timeline import Timeline
from .values import LARGE_BYTES, WithoutValues
from .worst_outputs import detect_most, worst_case

__all__ = ["Session", "build_with_values", "infer", "iterate", "that_work"]


class Session:
    """A job's model and optimizer without values, after their first iteration.

    They are built once. Each dry run is of one batch; it leaves them as it found them.

    Args:
        job: the job.
        like_gpu: whether device-dependent code runs as on a GPU, or as on a CPU.
        foreach: whether the optimizer steps on all parameters at once, unless the job says so.

    Attributes:
        model: the model, with the job's techniques.
        gradient_bytes: bytes of all gradients.
        fixed_bytes: the same with parameters, buffers, optimizer states and DDP's buckets.
    """

    def __init__(self, job: Job, like_gpu: bool = True, foreach: bool = True) -> None:
        self._job, self._like_gpu = job, like_gpu
        with self._started():
            with WithoutValues():
                self.model, self._optimizer = build_with_values(job, "cpu")
            for group in self._optimizer.param_groups:  # as PyTorch does for parameters on a GPU
                if foreach and group.get("foreach", False) is None and not group.get("fused"):
                    group["foreach"] = True
            with ready_to_evaluate(self.model, job.cfg, announce=False):
                pass  # raises if a technique does not work with the model
            self._run = DryRun(self.model, self._optimizer)
            self._trained = [p for p in self.model.parameters() if p.requires_grad]
            self.gradient_bytes = sum(p.nbytes for p in self._trained)
            with self._run:
                if job.ranks > 1:
                    numbers = sum(map(torch.numel, self._trained))
                    self._buckets = make_fake(torch.empty(numbers))
                    self._run.own("DDP buckets", self._buckets)
                self._make_gradients()
                self._optimizer.step()
        self._begin_timeline()
        self.fixed_bytes = sum(change.num_bytes for change in self._run.timeline.changes())

    def train(self, *micro_batches: Any, accumulates: bool = False) -> Timeline:
        """Make a dry run of an iteration in which optimizer states and DDP's buckets exist.

        Args:
            micro_batches: the micro-batches of one iteration.
            accumulates: whether gradients of earlier micro-batches exist.
        """
        precision = self._job.precision("cpu")
        with self._running(micro_batches, [casts_of_cuda()] if self._like_gpu else ()) as run:
            self.model.train()
            if not accumulates:
                self.model.zero_grad(set_to_none=True)

            def begin(phase: str) -> None:
                run.phase = phase
                if phase == "optimizer":  # whose step then leaves small weights, which have values
                    make_fake([p.grad for p in self._trained])

            note = run.timeline.notes.append
            iterate(self._job, self.model, self._optimizer, precision, micro_batches, begin, note)
        return self._begin_timeline()

    def evaluate(self, batch: Any) -> Timeline:
        """Make a dry run of an evaluation between two training iterations."""
        groups = [layers, mask_ops], {"paste_masks_in_image": _paste_like_gpu}
        with self._running([batch], [groups] if self._like_gpu else []) as run:
            run.phase = "evaluation"
            run.counts = "device" if self._like_gpu else "both"
            with TensorMeter() as host:
                host.counts = "host"
                infer(self.model, self._job, batch, run.timeline.notes.append)
            run.timeline.host_bytes = host.peak_bytes if self._like_gpu else 0
            run.counts = "device"
        return self._begin_timeline()

    @contextmanager
    def _started(self, stand_ins: Sequence[Group] = ()) -> Iterator[None]:
        last = EventStorage(self._job.cfg.SOLVER.MAX_ITER - 1)  # a burn-in is over by then
        with _as_on_gpu(stand_ins), no_information(), last:
            torch.default_generator.manual_seed(0)  # and no generator of a GPU
            yield

    @contextmanager
    def _running(
        self, micro_batches: Sequence[Any], stand_ins: Sequence[Group]
    ) -> Iterator[DryRun]:
        """A dry run whose inputs are on the device. Gradients exist before and after it."""
        self._begin_timeline()
        inputs = tensors_of(micro_batches)
        with self._started(stand_ins), self._run as run, fast_matching(self.model):
            run.phase = "setup"
            make_fake([t for t in inputs if t.nbytes >= LARGE_BYTES and is_image(t)])
            run.own("inputs", inputs)
            try:
                yield run
            finally:
                run.phase = "setup"
                self._make_gradients()

    def _make_gradients(self) -> None:
        for p in self._trained:
            p.grad = make_fake(torch.zeros_like(p))
            self._run.own("gradients", p.grad)

    def _begin_timeline(self) -> Timeline:
        """Begin a timeline with what is left of the one before, which is returned."""
        before = self._run.timeline
        self._run.timeline = Timeline(before.left())
        return before


def iterate(
    job: Job,
    model: nn.Module,
    optimizer: Optimizer,
    precision: Precision,
    micro_batches: Sequence[Any],
    begin: Callable[[str], Any] = str,
    note: Callable[[str], Any] = str,
) -> None:
    """Run a training iteration with the most proposals possible.

    Args:
        begin: called with the name of each phase.
        note: called with lines about parts that may be larger.
    """
    for batch in micro_batches:
        begin("forward")
        with worst_case(model, note), precision.autocast():
            loss: Any = sum(losses_of(model, batch, job.parts.loss_fn).values())
        begin("backward")
        precision.backward(loss * (1 / len(micro_batches)))
        del loss
    begin("optimizer")
    precision.step(optimizer)


def infer(model: nn.Module, job: Job, batch: Any, note: Callable[[str], Any] = str) -> None:
    """Run an evaluation's forward with the most proposals and detections possible."""
    model.eval()
    ready = ready_to_evaluate(model, job.cfg, announce=False)
    with torch.no_grad(), ready, worst_case(model, note):
        detect_most(model, batch, note)


def that_work(job: Job, names: Sequence[str]) -> Iterator[str]:
    """The techniques that can be applied to the model and the optimizer of a job.

    They are applied in the order of training: a frozen module, for example, is another one.
    """
    with _as_on_gpu(), no_information(), WithoutValues():
        model, optimizer = build_with_values(job, "cpu")
        parts = {"model": model, "evaluation": model, "optimizer": optimizer}
        techniques = map(get_technique, names)
        for technique in sorted(techniques, key=lambda t: TIERS.index(t.tier), reverse=True):
            with suppress(MemfitError):
                if technique.part in parts:
                    value = technique.suggest(job, model)
                    technique.apply(parts[technique.part], value)
                yield technique.name


def build_with_values(job: Job, device: str) -> tuple[nn.Module, Optimizer]:
    """Build model and optimizer on a device, the optimizer with one rank's share."""
    model = job.build_model(device).train()  # as trainers do
    without_zero = job.with_settings({"MEMFIT.OPTIMIZER.ZERO": False})  # it needs other ranks
    optimizer = without_zero.build_optimizer(model)
    if job.cfg.MEMFIT.OPTIMIZER.ZERO:
        _keep_share(optimizer, job.ranks)
    return model, optimizer


@contextmanager
def _as_on_gpu(stand_ins: Sequence[Group] = ()) -> Iterator[None]:
    """Run the code for a GPU, in one thread: little is computed, so more threads do not help."""
    num_threads = torch.get_num_threads()
    # Otherwise PyTorch's first call of a TorchScript function has other operators than later ones.
    as_it_is = torch.jit.optimized_execution(False)
    on_cpu = cuda_as_cpu(*compiled_operators(), *stand_ins)
    with default_group_replaced(None), on_cpu, unchanged_random_state(), as_it_is:
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


@with_original
def _paste_like_gpu(
    _: Any, masks: torch.Tensor, boxes: Any, image_shape: tuple[int, int], threshold: float = 0.5
) -> torch.Tensor:
    """In place of Detectron2's ``paste_masks_in_image``, whose path depends on the device."""
    num, (height, width) = len(masks), image_shape
    result = make_fake(torch.empty(num, height, width, dtype=torch.bool))
    bytes_of_all = num * height * width * mask_ops.BYTES_PER_FLOAT
    num_chunks = math.ceil(bytes_of_all / mask_ops.GPU_MEM_LIMIT)
    for chunk in torch.arange(num).chunk(max(num_chunks, 1)):
        grid = make_fake(torch.empty(len(chunk), height, width, 2)).to(masks.dtype)
        pasted = nn.functional.grid_sample(masks[chunk, None], grid, align_corners=False)
        del grid
        result[chunk] = pasted[:, 0] >= threshold
    return result
