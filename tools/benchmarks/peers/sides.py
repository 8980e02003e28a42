# Copyright (c) the d2_memfit developers.
"""The sides of the race, each as its own documentation says.

Accelerate     https://huggingface.co/docs/accelerate/usage_guides/gradient_accumulation and
               https://huggingface.co/docs/accelerate/usage_guides/memory
transformers   https://huggingface.co/docs/transformers/main_classes/trainer
Lightning      https://lightning.ai/docs/pytorch/stable/advanced/training_tricks.html
mmengine       https://mmengine.readthedocs.io/en/latest/common_usage/save_gpu_memory.html
Composer       https://docs.mosaicml.com/projects/composer/en/stable/notes/auto_microbatching.html
"""

import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Optional

import torch
import torch.distributed as dist
from detectron2.engine import SimpleTrainer
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, DistributedSampler

from d2_memfit import AccumulatingTrainer
from d2_memfit.common.compat import create_ddp_model
from d2_memfit.config.settings import RecoveryOptions
from d2_memfit.engine.launch import launch

RANKS = int(os.environ.get("WORLD_SIZE", "1"))


class Job(NamedTuple):
    """A model, an optimizer, and the images of one pass, in order.

    Attributes:
        build: makes the model and its optimizer.
        images: dataset dicts for Detectron2's models, those of this rank.
        batch_size: images in a batch of the loader.
        steps: batches per optimizer step.
        folder: folder in which a side may write.
    """

    build: Callable[[], tuple[nn.Module, Optimizer]]
    images: Sequence[dict[str, Any]]
    batch_size: int
    steps: int
    folder: Path

    def loader(self, batch_size: Optional[int] = None) -> DataLoader[Any]:
        # Composer wants a distributed sampler on several ranks. Each rank has its own images.
        sampler: DistributedSampler[Any] = DistributedSampler(self.images, 1, 0, shuffle=False)  # type: ignore[arg-type]
        size = batch_size or self.batch_size
        return DataLoader(self.images, size, sampler=sampler, collate_fn=list)  # type: ignore[arg-type]


def detectron2(job: Job) -> None:
    def train() -> None:
        model, optimizer = job.build()
        model = create_ddp_model(model, broadcast_buffers=False)  # as in DefaultTrainer
        SimpleTrainer(model, job.loader(), optimizer).train(0, len(job.loader()))

    launch(train, 1)  # Detectron2's own needs GPUs for several ranks


def d2_memfit(job: Job, splits: bool = False) -> None:
    def train() -> None:
        model, optimizer = job.build()
        model = create_ddp_model(model, broadcast_buffers=False)
        recovery = RecoveryOptions(output_dir=str(job.folder)) if splits else None
        trainer = AccumulatingTrainer(
            model, job.loader(), optimizer, accumulation_steps=job.steps, recovery=recovery
        )
        trainer.train(0, -(-len(job.loader()) // job.steps))

    launch(train, 1)


def accelerate(job: Job, finds: bool = False) -> None:
    from accelerate import Accelerator
    from accelerate.data_loader import prepare_data_loader
    from accelerate.utils import find_executable_batch_size

    accelerator = Accelerator(gradient_accumulation_steps=job.steps, cpu=True)

    def inner_training_loop(batch_size: int) -> None:
        accelerator.free_memory()
        accelerator.gradient_accumulation_steps = job.batch_size * job.steps // batch_size
        model, optimizer = accelerator.prepare(*job.build())
        # As `prepare` does, but each rank's images are its own already.
        for batch in prepare_data_loader(job.loader(batch_size), num_processes=1, process_index=0):
            with accelerator.accumulate(model):
                accelerator.backward(sum(model(batch).values()))
                optimizer.step()
                optimizer.zero_grad()

    if finds:
        find_executable_batch_size(inner_training_loop, starting_batch_size=job.batch_size)()
    else:
        inner_training_loop(job.batch_size)


class Wrapper(nn.Module):
    """Detectron2's model as transformers' Trainer calls one."""

    def __init__(self, detector: nn.Module) -> None:
        super().__init__()
        self.detector = detector

    def forward(self, images: list[Any]) -> dict[str, Any]:
        return {"loss": sum(self.detector(images).values())}


def transformers(job: Job, finds: bool = False) -> None:
    from transformers import Trainer, TrainingArguments

    class OwnImages(Trainer):
        def get_train_dataloader(self) -> DataLoader[Any]:
            loader = job.loader(self._train_batch_size)
            loader.collate_fn = lambda batch: {"images": batch}
            return loader

    detector, optimizer = job.build()
    arguments = TrainingArguments(
        output_dir=str(job.folder),
        per_device_train_batch_size=job.batch_size,
        gradient_accumulation_steps=job.steps,
        auto_find_batch_size=finds,
        num_train_epochs=1,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,  # the others do not clip
        use_cpu=True,
        ddp_backend="gloo" if RANKS > 1 else None,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    images: Any = job.images
    OwnImages(Wrapper(detector), arguments, None, images, optimizers=(optimizer, None)).train()


def lightning(job: Job, finds: bool = False) -> None:
    import pytorch_lightning
    from pytorch_lightning.tuner.tuning import Tuner

    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)

    class Module(pytorch_lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.batch_size = job.batch_size  # the finder changes it
            self.detector, self.own_optimizer = job.build()

        def training_step(self, batch: list[Any]) -> Any:
            return sum(self.detector(batch).values())

        def configure_optimizers(self) -> Optimizer:
            return self.own_optimizer

        def train_dataloader(self) -> DataLoader[Any]:
            return job.loader(self.batch_size)

    def trainer(steps: int) -> Any:
        several: dict[str, Any] = {"strategy": "ddp"} if RANKS > 1 else {}
        return pytorch_lightning.Trainer(
            max_epochs=1,
            accumulate_grad_batches=steps,
            use_distributed_sampler=False,  # each rank's images are its own already
            default_root_dir=job.folder,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            accelerator="cpu",
            devices=RANKS,
            **several,
        )

    module = Module()
    effective = job.batch_size * job.steps
    if finds:
        Tuner(trainer(1)).scale_batch_size(module)
        module.batch_size = min(module.batch_size, effective)
    trainer(effective // module.batch_size if finds else job.steps).fit(module)


def mmengine(job: Job, checkpointed: Sequence[str] = ()) -> None:
    from mmengine.model import BaseModel
    from mmengine.runner import Runner

    class Model(BaseModel):
        def __init__(self) -> None:
            super().__init__()
            self.detector = detector

        def forward(self, *images: Any, mode: str) -> Any:
            return self.detector(list(images))

    detector, optimizer = job.build()
    cfg: dict[str, Any] = {"activation_checkpointing": list(checkpointed)} if checkpointed else {}
    if RANKS > 1:  # its launcher and its default wrapper would ask for GPUs
        dist.init_process_group("gloo")
        cfg["model_wrapper_cfg"] = {"type": "MMDistributedDataParallel", "device_ids": None}
    Runner(
        model=Model(),
        work_dir=str(job.folder),
        train_dataloader=job.loader(),
        train_cfg={"by_epoch": True, "max_epochs": 1},
        optim_wrapper={
            "type": "OptimWrapper",
            "optimizer": optimizer,
            "accumulative_counts": job.steps,
        },
        default_hooks={"checkpoint": None},
        randomness={"seed": 0},
        experiment_name=job.folder.name,
        log_level="ERROR",
        launcher="pytorch" if RANKS > 1 else "none",
        cfg=cfg,
    ).train()


def composer(job: Job) -> None:
    from composer import ComposerModel, DataSpec, Trainer

    class Model(ComposerModel):
        def __init__(self) -> None:
            super().__init__()
            self.detector = detector

        def forward(self, batch: list[Any]) -> Any:
            return self.detector(batch)

        def loss(self, outputs: dict[str, torch.Tensor], batch: list[Any]) -> Any:
            return sum(outputs.values())

    def split(batch: list[Any], size: int) -> list[list[Any]]:
        return [batch[i : i + size] for i in range(0, len(batch), size)]

    detector, optimizer = job.build()
    loader = job.loader(job.batch_size * job.steps)  # its batch is the effective one
    Trainer(
        model=Model(),
        train_dataloader=DataSpec(loader, split_batch=split, get_num_samples_in_batch=len),
        optimizers=optimizer,
        max_duration="1ep",
        seed=0,
        device_train_microbatch_size=job.batch_size,
        device="cpu",
        progress_bar=False,
        log_to_console=False,
    ).fit()


STAGES = [f"detector.backbone.bottom_up.{stage}" for stage in ("res4", "res5")]
# The function of each side, and its arguments in addition to the job.
SIDES: dict[str, tuple[Callable[..., None], dict[str, Any]]] = {
    "Detectron2": (detectron2, {}),
    "Accelerate": (accelerate, {}),
    "Accelerate, find_executable_batch_size": (accelerate, {"finds": True}),
    "transformers": (transformers, {}),
    "transformers, auto_find_batch_size": (transformers, {"finds": True}),
    "Lightning": (lightning, {}),
    "Lightning, scale_batch_size": (lightning, {"finds": True}),
    "mmengine": (mmengine, {}),
    "mmengine, activation_checkpointing": (mmengine, {"checkpointed": STAGES}),
    "Composer": (composer, {}),
    "d2_memfit": (d2_memfit, {}),
    "d2_memfit, split": (d2_memfit, {"splits": True}),
    "d2_memfit, split, exact techniques": (d2_memfit, {"splits": True}),
}
