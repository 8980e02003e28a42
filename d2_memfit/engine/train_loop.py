# Copyright (c) the d2_memfit developers.
"""The training loop: one window of images, one optimizer step."""

import logging
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Optional, Union

import torch
from detectron2.utils import comm
from detectron2.utils.events import get_event_storage
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ..common import compat
from ..common.checks import check_positive_int
from ..common.errors import ConfigError, OutOfMemoryError
from ..common.snapshot import Snapshot
from ..config.settings import NormalizerOptions, Precision, RecoveryOptions, check_arguments
from ..job import LossFn, losses_of
from . import ranks
from .counts import Counts
from .ending import worker_deaths_wait
from .oom_log import observed
from .ranks import RankReport
from .retry import Cutter, Recovery, WindowRetries, run_all
from .run_state import ResumableTrainer
from .window import MicroBatch, Window, WindowStorage

logger = logging.getLogger(__name__)


class AccumulatingTrainer(ResumableTrainer):
    """A ``SimpleTrainer`` with several forwards per iteration and one optimizer step.

    ``run_step`` runs ``accumulation_steps`` batches of the loader one after another. It then steps
    with the mean gradient over all their images, on all ranks. Each micro-batch is weighted by its
    images, so micro-batches may have different sizes.

    With one micro-batch per iteration and no recovery, results equal those of Detectron2's
    ``SimpleTrainer`` and ``AMPTrainer`` to the last bit, and DDP reduces gradients during the
    backward. Otherwise ranks reduce gradients once, after their last backward.

    With ``recovery``, each rank runs images that do not fit again in smaller pieces.

    The model takes a batch and returns a loss or a dict of losses. On several ranks it is wrapped
    in ``DistributedDataParallel``. Batches may be of any kind. Lists of dataset dicts, and equally
    long columns such as (images, targets), can be cut. In your own loop, call ``run_step`` within
    an ``EventStorage``.

    Args:
        model, data_loader, optimizer: as for ``SimpleTrainer``.
        accumulation_steps: batches from the loader per optimizer step.
        precision: a :class:`Precision`, or the name of one: "float32", "float16", "bfloat16".
        micro_batch_size: images in one forward; None for the loader's batches.
        recovery: what to do when memory runs out; None raises the error, as in Detectron2.
        normalizers: how counts are taken over all micro-batches and ranks; None for the default.
        loss_fn: called as ``loss_fn(model, batch)`` in place of ``model(batch)``. On several ranks
            the model is wrapped in DDP.
        clip_gradients: called once per iteration with the optimizer's parameters that have
            gradients, such as
            ``partial(torch.nn.utils.clip_grad_norm_, max_norm=0.1)``. The gradients are those of
            the whole effective batch, without a loss scale.
        gather_metric_period: iterations between metrics. Losses are checked in every iteration.

    Attributes:
        cutter: cuts windows into micro-batches.
        out_of_memory_observers: called when memory runs out, before anything is freed.
        stop_signal: a signal's number, which any rank may set.
        agreed_stop_signal: the same on all ranks, after a step.

    Raises:
        ConfigError: a number is not a positive integer; the device cannot compute in this
            precision; or one rank cannot run the model again alone.
    """

    def __init__(
        self,
        model: nn.Module,
        data_loader: Iterable[Any],
        optimizer: torch.optim.Optimizer,
        accumulation_steps: int = 1,
        precision: Union[Precision, str] = "float32",
        micro_batch_size: Optional[int] = None,
        recovery: Optional[RecoveryOptions] = None,
        normalizers: Optional[NormalizerOptions] = None,
        loss_fn: Optional[LossFn] = None,
        clip_gradients: Optional[Callable[[list[nn.Parameter]], Any]] = None,
        gather_metric_period: int = 1,
    ) -> None:
        check_positive_int("gather_metric_period", gather_metric_period)
        given = {"SOLVER.ACCUMULATION_STEPS": accumulation_steps}
        check_arguments({**given, "MEMFIT.MICRO_BATCH": micro_batch_size})
        if not isinstance(precision, Precision):
            precision = Precision(precision, next(model.parameters()).device)
        self.accumulation_steps = accumulation_steps
        self.precision = precision
        self.out_of_memory_observers: list[Callable[[], None]] = []
        self.cutter = Cutter(micro_batch_size)
        is_whole = accumulation_steps == 1 and micro_batch_size is None
        self._reduces_in_backward = is_whole and recovery is None
        self._bare_model = compat.without_ddp(model)
        self.recovery: Optional[Recovery] = None
        if recovery is not None:
            is_mixed = precision.dtype != torch.float32
            self.recovery = Recovery(recovery, self._bare_model, self.cutter, is_mixed)
        if isinstance(model, DistributedDataParallel) and not self._reduces_in_backward:
            ranks.check_ddp(model, recovers=recovery is not None)
        super().__init__(model, data_loader, optimizer)
        if self._reduces_in_backward:  # losses are divided as in Detectron2
            normalizers = NormalizerOptions("off")
        self.counts = Counts(self, normalizers or NormalizerOptions())
        self.loss_fn = loss_fn
        self.clip_gradients = clip_gradients
        self.gather_metric_period = gather_metric_period
        # Parts of the model whose state a forward changes. Without recovery, only they are saved.
        self._changing: Optional[list[nn.Module]] = None

    def run_step(self) -> None:
        """Run one iteration, whose number the event storage has."""
        self.undo: Optional[Callable[[], Any]] = lambda: None  # nothing is changed yet
        window = Window(self._data_loader_iter, self.accumulation_steps)
        reports = self._run(window)
        if not any(r.num_images for r in reports):
            logger.warning("Iteration %d: all images were skipped, and so is the step", self.iter)
            self.done = self.iter
            return
        compat.after_backward(self)
        if (self.iter + 1) % self.gather_metric_period == 0:
            ranks.write_metrics(reports)
        with self._explained("optimizer", window):
            if self.clip_gradients is not None:
                self.precision.scaler.unscale_(self.optimizer)  # the step knows that it was
                parameters = [p for g in self.optimizer.param_groups for p in g["params"]]
                self.clip_gradients([p for p in parameters if p.grad is not None])
            # The reduction was the last that ranks did together: from here on, each steps alone.
            with worker_deaths_wait():
                self.undo = None
                self.precision.step(self.optimizer, self.iter)
                self.done = self.iter

    def accumulate(self, batch: Any) -> dict[str, float]:
        """Compute a batch's gradients, for your own loop that clips and steps.

        They replace the gradients of the parameters. With DDP, they are those of all ranks'
        batches.

        Returns:
            The mean of each loss over all images.
        """
        self.model.zero_grad(set_to_none=True)  # it may have another optimizer's gradients
        reports = self._run(Window(iter([batch]), 1))
        ranks.write_metrics(reports)
        return ranks.mean_losses(reports)

    def _run(self, window: Window) -> list[RankReport]:
        """Run a window to the gradients of all ranks' images; return the reports of all ranks."""
        with self._explained("start", window):
            assert self.model.training, "[AccumulatingTrainer] model was changed to eval mode!"
            self.iter = get_event_storage().iter
            self.optimizer.zero_grad(set_to_none=True)
            weights = self.recovery.weights if self.recovery is not None else ()
            start = Snapshot(self._bare_model, weights, self._changing)
            self.undo = start.restore
        if self._reduces_in_backward:  # as in Detectron2
            run_all(window.take, lambda batch: self._backward(self._forward(batch), 1.0))
            reports = self._vote(window, RankReport())
        else:
            no_sync = getattr(self.model, "no_sync", nullcontext)()
            with WindowStorage(get_event_storage()) as storage, no_sync:
                reports = self._vote(window, self._accumulate(window, storage, start))
            storage.write()
            if self.recovery is not None:
                self.recovery.end_iteration([r.recovery for r in reports if r.recovery])
        if self.recovery is None and self._changing is None:
            self._changing = start.changed_modules()
        ranks.check_finite(reports, self.iter)  # on all ranks, before their gradients mix
        if not self._reduces_in_backward and any(r.num_images for r in reports):
            with self._explained("reduction", window):
                ranks.average_gradients(self.model, window, reports)
        return reports

    def _accumulate(self, window: Window, storage: WindowStorage, start: Snapshot) -> RankReport:
        """Accumulate a window's gradients on this rank, and report how that went."""
        report, retries = RankReport(), None
        if self.recovery is not None:
            retries = WindowRetries(self.recovery, self._bare_model, window, storage, start)
            report.recovery = retries.report

        def take() -> Optional[MicroBatch]:
            is_retried = report.recovery is not None and report.recovery.oom_events
            if is_retried and self.counts.is_one_piece and not window.micro_batches:
                self.counts.prepare(window, run_forwards)  # it is now cut
            return self.cutter.take(window)

        def run(micro_batch: MicroBatch) -> None:
            storage.num_images = micro_batch.num_images
            with self.counts.around(micro_batch):
                loss = self._forward(micro_batch)
                self._backward(loss, micro_batch.num_images / window.expected_images)
            if retries is None:
                micro_batch.keep_names_only()

        def run_forward(micro_batch: MicroBatch) -> None:
            with self.counts.around(micro_batch):
                self._forward(micro_batch)

        run_forwards = partial(run_all, partial(self.cutter.take, window), run_forward, retries)
        try:
            with self._explained("window", window):
                batches = self.resumable_batches
                if retries is not None and batches and not batches.layout["workers"]:
                    window.load_all()  # a second run must not draw this process's numbers again
                    retries.start = Snapshot(self._bare_model, retries.recovery.weights)
                self.counts.prepare(window, run_forwards)
                run_all(take, run, retries)
                if retries is not None:
                    retries.end_window()
        except (ConfigError, OutOfMemoryError) as e:
            self.model.zero_grad(set_to_none=True)
            report.error = type(e)(str(e))  # without the traceback, which holds tensors
        return report

    def _forward(self, micro_batch: MicroBatch) -> torch.Tensor:
        """The sum of a forward's losses. Each loss is kept in the micro-batch, too."""
        with observed(self.out_of_memory_observers):
            losses = self.counts.weighted(self.losses_of(self.model, micro_batch.batch))
            total: Any = sum(losses.values())
            micro_batch.losses = {name: loss.detach() for name, loss in losses.items()}
            return total

    def losses_of(self, model: nn.Module, batch: Any) -> Mapping[str, torch.Tensor]:
        """The losses of a forward, by name."""
        with self.precision.autocast():
            return losses_of(model, batch, self.loss_fn)

    def _backward(self, loss: torch.Tensor, weight: float) -> None:
        """Add the gradients of ``weight x loss`` to the window's."""
        with observed(self.out_of_memory_observers):
            self.precision.backward(loss * weight)

    def _vote(self, window: Window, mine: RankReport) -> list[RankReport]:
        """Complete this rank's report, and return those of all ranks.

        Raises:
            ConfigError, OutOfMemoryError: on every rank, if any cannot train or has no memory.
        """
        try:
            with self._explained("vote", window):
                if mine.error is None:
                    mine.add(window, self._bare_model)
        except OutOfMemoryError as e:
            mine = RankReport(error=OutOfMemoryError(str(e)))
        if not self._reduces_in_backward and comm.get_world_size() > 1:
            mine.has_gradient = [p.grad is not None for p in self.model.parameters()]
        mine.stop_signal = self.stop_signal
        reports = comm.all_gather(mine)
        self.agreed_stop_signal = max(r.stop_signal for r in reports)
        if errors := [r.error for r in reports if r.error is not None]:
            raise type(errors[0])("\n".join(dict.fromkeys(map(str, errors))))
        return reports

    def _explained(self, phase: str, window: Window) -> AbstractContextManager[None]:
        """Explain an out-of-memory error where nothing can be run again."""
        if self.recovery is None:
            return nullcontext()
        return self.recovery.oom_log.explained(phase, window.last_data)

    def _own_state(self) -> dict[str, Any]:
        return {**super()._own_state(), "cutter": self.recovery and self.recovery.learned}

    def state_dict(self) -> dict[str, Any]:
        state = {**super().state_dict(), **self.precision.state_dict()}
        if self.recovery is not None:
            state["recovery"] = dict(vars(self.recovery.totals))
        if counts := self.counts.state_dict():
            state["counts"] = counts
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self.precision.load_state_dict(state_dict)
        if self.recovery is not None and state_dict.keys() >= {"recovery", "run_state"}:
            own = dict(enumerate(state_dict["run_state"]["ranks"])).get(comm.get_rank())
            self.recovery.load(state_dict["recovery"], own and own["cutter"])
        self.counts.load_state_dict(state_dict.get("counts", {}))
