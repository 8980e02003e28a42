# Copyright (c) the d2_memfit developers.
"""RF-DETR's own training, with estimates, batches that are cut to fit, and recovery."""

import copy
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple, Optional

import torch
from detectron2.utils.events import EventStorage
from rfdetr.config import MultiScale
from rfdetr.datasets.coco import compute_multi_scale_scales
from rfdetr.models import criterion as rfdetr_criterion
from rfdetr.models.lwdetr import build_criterion_from_config, build_model_from_config
from rfdetr.training import RFDETRModelModule
from rfdetr.utilities.tensors import NestedTensor
from torch import Tensor, nn

from d2_memfit import AccumulatingTrainer, Job, window_count
from d2_memfit.common.errors import ConfigError
from d2_memfit.common.patching import replaced_functions
from d2_memfit.engine.build import build_trainer

__all__ = ["Columns", "RfdetrLosses", "WindowModule", "job_of"]

# Of Lightning. Others have a loss scale, or are not mixed.
_NUMBER_FORMATS = {"32-true": torch.float32, "bf16-mixed": torch.bfloat16}


class Columns(NamedTuple):
    """A batch of rfdetr's loader in columns, which can be cut.

    Attributes:
        images: (3, height, width) each, padded to the batch's largest image.
        masks: (height, width) each, True in the padding.
        unpadded: for each image, whether no image of its batch has padding.
        targets: a dict per image.
    """

    images: list[Tensor]
    masks: list[Tensor]
    unpadded: list[bool]
    targets: list[dict[str, Tensor]]

    @classmethod
    def from_batch(cls, batch: tuple[NestedTensor, Any]) -> "Columns":
        images, targets = batch
        assert images.mask is not None  # it is None in exported models alone
        unpadded = [images.no_padding] * len(targets)
        return cls(list(images.tensors), list(images.mask), unpadded, list(targets))


class RfdetrLosses:
    """The ``loss_fn`` of RF-DETR: its criterion's losses with their weights, by name.

    They are divided by the objects of the window in place of those of the micro-batch.
    """

    def __init__(self, criterion: nn.Module) -> None:
        self._criterion: Any = criterion

    def __call__(self, model: nn.Module, batch: Columns) -> Mapping[str, Tensor]:
        unpadded = all(batch.unpadded)
        images = NestedTensor(torch.stack(batch.images), torch.stack(batch.masks), unpadded)
        outputs = model(images, batch.targets)
        criterion = self._criterion
        groups = 1 if criterion.sum_group_losses else criterion.group_detr
        num_objects = sum(len(target["labels"]) for target in batch.targets)
        num_boxes = window_count(num_objects * groups)
        losses = criterion(outputs, batch.targets, num_boxes=num_boxes)
        weights = criterion.weight_dict
        return {name: losses[name] * weights[name] for name in losses if name in weights}


class WindowModule(RFDETRModelModule):
    """rfdetr's Lightning module, whose training step runs its batch in micro-batches, and recovers.

    All the rest is Lightning's and rfdetr's: loading, clipping, steps, schedules, moving averages,
    logging, evaluation and checkpoints.

    Args:
        job: of :func:`job_of`, with micro-batch size, recovery and techniques.

    Raises:
        ConfigError: a setting of rfdetr does not go together with it.
    """

    def __init__(self, model_config: Any, train_config: Any, job: Job) -> None:
        super().__init__(model_config, train_config)
        self._job = job
        self._inner: Optional[AccumulatingTrainer] = None
        if model_config.use_grouppose_keypoints or train_config.compute_train_metrics:
            raise ConfigError("WindowModule trains no keypoints, and has no compute_train_metrics")

    def on_train_start(self) -> None:
        super().on_train_start()
        trainer, optimizer = self.trainer, self.trainer.optimizers[0]
        if trainer.accumulate_grad_batches > 1:
            raise ConfigError(
                "grad_accum_steps must be 1: raise batch_size, and let the job cut the batch"
            )
        if trainer.world_size > 1:
            raise ConfigError("WindowModule trains on one device: set devices=1")
        planned = self._job.precision(str(self.device)).dtype
        if _NUMBER_FORMATS.get(trainer.precision) != planned:
            raise ConfigError(
                f"rfdetr trains in {trainer.precision}, and the job in {planned}: set amp_dtype to "
                "'bf16' or None before the job is made"
            )
        self._inner = build_trainer(
            self._job,
            self.model,
            data_loader=(),
            optimizer=optimizer,
            loss_fn=RfdetrLosses(self.criterion),
        )
        if self._inner.optimizer is not optimizer:
            raise ConfigError("the job changes rfdetr's optimizer: plan with allow=['exact']")
        self.model = self._inner.model

    def training_step(self, batch: tuple[Any, Any], batch_idx: int) -> Tensor:
        assert self._inner is not None
        lightnings = torch.autocast(self.device.type, enabled=False)  # it would go on in a backward
        with lightnings, EventStorage(self.global_step):
            losses = self._inner.accumulate(Columns.from_batch(batch))
        weights = self.criterion.weight_dict  # rfdetr logs its losses without them
        log = partial(self.log, on_epoch=True, batch_size=len(batch[1]))
        for name, value in losses.items():
            log(f"train/{name}", value / weights[name], on_step=False)
        total = sum(losses.values())
        log("train/loss", total, prog_bar=True, on_step=self.train_config.train_log_on_step)
        return torch.tensor(total, device=self.device)

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the training step has computed the gradients."""

    def optimizer_zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: they would be lost. The next training step replaces them."""


def job_of(
    model_config: Any,
    train_config: Any,
    num_objects: int,
    device: str = "cuda",
    memfit: Optional[Mapping[str, Any]] = None,
    **kwargs: Any,
) -> Job:
    """The job of a run with batches of ``train_config.batch_size`` images.

    They are squares of the largest of the run's scales, as rfdetr makes them by default.

    Args:
        num_objects: the most objects in an image.
        device: where it trains. Estimates and plans run nothing there.
        memfit, kwargs: other arguments of :class:`~d2_memfit.Job`, such as ``micro_batch_size``.
    """
    side = _largest_side(model_config, train_config)
    target = {
        "boxes": torch.tensor([[0.5, 0.5, 0.1, 0.1]]).repeat(num_objects, 1),
        "labels": torch.zeros(num_objects, dtype=torch.int64),
    }
    if model_config.segmentation_head:
        target["masks"] = torch.ones(num_objects, side, side, dtype=torch.bool)
    image, mask = torch.zeros(3, side, side), torch.zeros(side, side, dtype=torch.bool)
    losses = RfdetrLosses(build_criterion_from_config(model_config, train_config)[0])
    without_ties = {"_sample_target_masks_at_points": _without_ties}

    def losses_of_points(model: nn.Module, batch: Columns) -> Mapping[str, Tensor]:
        with replaced_functions(([rfdetr_criterion], without_ties)):
            return losses(model, batch)

    def build_model() -> nn.Module:
        model = build_model_from_config(model_config, train_config)
        if train_config.use_ema:  # estimates count the moving average, a callback of rfdetr's
            model.average = copy.deepcopy(model).requires_grad_(False)
        return model

    mixed = ("bf16",) if device == "cpu" else ("bf16", "auto")
    return Job(
        model=build_model,
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=train_config.lr),
        images_per_batch=train_config.batch_size,
        device=device,
        amp_dtype="bfloat16" if train_config.amp_dtype in mixed else None,
        batch=Columns([image], [mask], [True], [target]),
        loss_fn=losses_of_points,
        memfit=memfit,
        **kwargs,
    )


def _largest_side(model_config: Any, train_config: Any) -> int:
    if train_config.multi_scale is MultiScale.OFF:
        return model_config.resolution
    scales = compute_multi_scale_scales(
        model_config.resolution,
        train_config.expanded_scales,
        model_config.patch_size,
        model_config.num_windows,
    )
    return max(scales)


def _without_ties(sample: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """In a dry run, sample masks at points with values.

    Its points are all 0, halfway between pixels. rfdetr copies a mask for each such point, and
    points drawn at random have next to none.
    """

    def at_points(targets: Any, indices: Any, points: Tensor) -> Tensor:
        if not points.any():
            values = torch.linspace(0.3, 0.7, points.numel(), device=points.device)
            points = values.view_as(points)
        return sample(targets, indices, points)

    return at_points
