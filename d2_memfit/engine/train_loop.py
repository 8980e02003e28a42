"""The training loop: one window of images, one optimizer step."""

import contextlib
import logging
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any, Optional, Union

import torch
from detectron2.engine import SimpleTrainer
from detectron2.utils import comm
from detectron2.utils.events import get_event_storage
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from .. import compat
from ..config import check_positive_int
from ..errors import ConfigError
from .precision import Precision
from .reduce import average_gradients, image_share
from .storage import WindowStorage
from .window import MicroBatch, Window, check_finite, write_metrics

__all__ = ["AccumulatingTrainer"]

logger = logging.getLogger(__name__)


class AccumulatingTrainer(SimpleTrainer):
    """A ``SimpleTrainer`` whose iteration is one optimizer step behind several forwards.

    ``run_step`` takes ``accumulation_steps`` batches from the loader, sends them through the model
    one after another, and steps with the mean gradient over all their images, on all ranks. Each
    micro-batch counts by its images, so they need not be equal.

    With one micro-batch per iteration it computes what Detectron2's ``SimpleTrainer`` and
    ``AMPTrainer`` compute, to the last bit, and on several ranks DDP reduces gradients while the
    backward runs. With more, ranks do not communicate until their last backward is done; then they
    reduce the gradients once.

    The model may be any that takes a batch and returns a loss or a dict of losses, wrapped in
    ``DistributedDataParallel`` on several ranks.

    Args:
        model, data_loader, optimizer: as for ``SimpleTrainer``.
        accumulation_steps: batches from the loader behind one optimizer step.
        precision: a :class:`Precision`, or the name of one: "fp32", "fp16", "bf16".
        images_per_micro_batch: images in one forward; None for the loader's batches as they come.

    Raises:
        ConfigError: one of the numbers is not a positive integer, or the model's device cannot
            compute in this precision.
    """

    def __init__(
        self,
        model: nn.Module,
        data_loader: Iterable,
        optimizer: torch.optim.Optimizer,
        accumulation_steps: int = 1,
        precision: Union[Precision, str] = "fp32",
        images_per_micro_batch: Optional[int] = None,
    ) -> None:
        check_positive_int("SOLVER.ACCUMULATION_STEPS", accumulation_steps)
        if images_per_micro_batch is not None:
            check_positive_int("MEMFIT.MICRO_BATCH", images_per_micro_batch)
        if not isinstance(precision, Precision):
            precision = Precision(precision, next(model.parameters()).device)
        self.accumulation_steps = accumulation_steps
        self.precision = precision
        self.images_per_micro_batch = images_per_micro_batch
        if isinstance(model, DistributedDataParallel) and not self._one_forward_per_iteration:
            _check_ddp(model)
        super().__init__(model, data_loader, optimizer)

    def run_step(self) -> None:
        """One iteration."""
        assert self.model.training, "[AccumulatingTrainer] model was changed to eval mode!"
        window = Window(
            self._data_loader_iter, self.accumulation_steps, self.images_per_micro_batch
        )
        self.optimizer.zero_grad(set_to_none=True)  # first, so that the forward has their memory

        if self._one_forward_per_iteration:
            (micro_batch,) = window
            self._forward_backward(micro_batch, image_share(micro_batch.num_images, self.model))
            reports = comm.all_gather(window.report())
            check_finite(reports, self.iter)
        else:
            with WindowStorage(get_event_storage()) as storage, self._no_sync():
                for micro_batch in window:
                    storage.next_micro_batch(micro_batch.num_images)
                    weight = micro_batch.num_images / window.expected_images
                    self._forward_backward(micro_batch, weight)
            storage.write()
            reports = comm.all_gather(window.report(self.model.parameters()))
            check_finite(reports, self.iter)
            average_gradients(self.model, window, reports)

        compat.after_backward(self)
        write_metrics(reports)
        if not self.precision.step(self.optimizer):
            logger.warning(
                "Iteration %d: gradients overflowed float16. The step is skipped, and the loss "
                "scale is lowered to %g",
                self.iter,
                self.precision.scaler.get_scale(),
            )

    def _forward_backward(
        self, micro_batch: MicroBatch, weight: Union[float, torch.Tensor]
    ) -> None:
        """Add the gradients of ``weight x loss`` to those of the window."""
        with self.precision.autocast():
            losses = self.model(micro_batch.data)
            if isinstance(losses, torch.Tensor):
                losses = {"total_loss": losses}
            total = sum(losses.values())
        micro_batch.losses = {name: loss.detach() for name, loss in losses.items()}
        self.precision.backward(total * weight)

    @property
    def _one_forward_per_iteration(self) -> bool:
        return self.accumulation_steps == 1 and self.images_per_micro_batch is None

    def _no_sync(self) -> AbstractContextManager:
        """Keeps DDP from reducing gradients; it must be open in forward and backward."""
        is_ddp = isinstance(self.model, DistributedDataParallel)
        return self.model.no_sync() if is_ddp else contextlib.nullcontext()

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        if self.precision.scaler is not None:
            state["grad_scaler"] = self.precision.scaler.state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        if self.precision.scaler is None:
            return
        if "grad_scaler" in state_dict:
            self.precision.scaler.load_state_dict(state_dict["grad_scaler"])
        else:
            logger.warning(
                "The checkpoint has no grad_scaler (it was not trained in float16): the loss scale "
                "starts at %g",
                self.precision.scaler.get_scale(),
            )


def _check_ddp(model: DistributedDataParallel) -> None:
    """Say which of DDP's options do not go with gradients that it does not reduce itself."""
    if model.static_graph:
        raise ConfigError(
            "DistributedDataParallel(static_graph=True) cannot accumulate gradients: set "
            "static_graph False, or SOLVER.ACCUMULATION_STEPS 1"
        )
    if model._comm_hooks:
        logger.warning(
            "The communication hooks of DistributedDataParallel (such as fp16_compression) are not "
            "used: with accumulation, gradients are reduced once per iteration in their own type"
        )
