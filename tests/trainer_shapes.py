# Copyright (c) the d2_memfit developers.
"""Trainers as public projects write them, on ranks that are not alike."""

import logging
from pathlib import Path

import torch
import torch.distributed as dist
from detectron2.checkpoint import DetectionCheckpointer
from detectron2.data import build_detection_train_loader
from detectron2.engine import DefaultTrainer, SimpleTrainer, TrainerBase, create_ddp_model, hooks
from detectron2.utils import comm
from detectron2.utils.env import seed_all_rng
from detectron2.utils.events import EventStorage, get_event_storage
from tiny import parameters
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from d2_memfit import AccumulatingTrainer, MemfitMixin, get_cfg
from d2_memfit.common.patching import replaced_functions


class Detector(nn.Module):
    """Its criterion adds the number of boxes up over ranks. Rank 1 may run out of memory."""

    fails = ""  # in the "forward", the "criterion" or the "backward"

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 4))

    def forward(self, batch):
        self._fail("forward", batch)
        boxes = torch.cat([d["boxes"] for d in batch])
        distance = (self.net(boxes) - torch.rand_like(boxes) / 10).abs().sum()
        self._fail("criterion", batch)
        count = torch.tensor([float(len(boxes))])
        if comm.get_world_size() > 1:
            dist.all_reduce(count)
        loss = distance / torch.clamp(count / comm.get_world_size(), min=1).item()
        if loss.requires_grad:
            loss.register_hook(lambda _: self._fail("backward", batch))
        return {"loss_boxes": loss}

    def _fail(self, phase, batch):
        is_here = comm.get_rank() == 1 and get_event_storage().iter == 1
        if is_here and phase == self.fails and len(batch) > 1:
            raise torch.OutOfMemoryError("CUDA out of memory. injected")


def load(d):
    """A mapper. One image in three has no boxes."""
    number = d["image_id"]
    rng = torch.Generator().manual_seed(number)
    noise = torch.rand(1) / 10  # an augmentation
    return {**d, "boxes": torch.rand(number % 3, 4, generator=rng) + noise}


class Parts:
    """What all projects here build."""

    @classmethod
    def build_model(cls, cfg):
        torch.manual_seed(0)
        return Detector()

    @classmethod
    def build_optimizer(cls, cfg, model):
        return torch.optim.AdamW(model.parameters(), lr=0.01)

    @classmethod
    def build_train_loader(cls, cfg):
        dicts = [{"image_id": i, "width": 9, "height": 9 + i % 2} for i in range(24)]
        return build_detection_train_loader(
            dicts, mapper=load, total_batch_size=cfg.SOLVER.IMS_PER_BATCH, num_workers=0
        )

    def build_writers(self):
        return []

    @classmethod
    def test(cls, cfg, model, evaluators=None):
        return {}


class PlainProject(Parts, DefaultTrainer):
    pass


class OwnCheckpointer(DetectionCheckpointer):
    pass


class AdelaiDet(Parts, DefaultTrainer):
    """Rank 0 has another checkpointer, which saves no trainer; its loop does not tidy up."""

    def build_hooks(self):
        built = super().build_hooks()
        for i, hook in enumerate(built):
            if isinstance(hook, hooks.PeriodicCheckpointer):
                parts = {"optimizer": self.optimizer, "scheduler": self.scheduler}
                self.checkpointer = OwnCheckpointer(self.model, self.cfg.OUTPUT_DIR, **parts)
                built[i] = hooks.PeriodicCheckpointer(self.checkpointer, hook.period)
        return built

    def resume_or_load(self, resume=True):
        checkpoint = self.checkpointer.resume_or_load("", resume=resume)
        self.start_iter = checkpoint.get("iteration", -1) + 1

    def train(self):
        with EventStorage(self.start_iter) as self.storage:
            self.before_train()
            for iteration in range(self.start_iter, self.max_iter):
                self.iter = iteration
                self.before_step()
                self.run_step()
                self.after_step()
            self.after_train()


class MaskDINO(Parts, DefaultTrainer):
    """As MaskDINO and DiffusionDet: ``__init__`` goes past that of DefaultTrainer."""

    def __init__(self, cfg):
        super(DefaultTrainer, self).__init__()
        cfg = DefaultTrainer.auto_scale_workers(cfg, comm.get_world_size())
        model = self.build_model(cfg)
        optimizer = self.build_optimizer(cfg, model)
        data_loader = self.build_train_loader(cfg)
        model = create_ddp_model(model, broadcast_buffers=False)
        self._trainer = SimpleTrainer(model, data_loader, optimizer)
        self.scheduler = self.build_lr_scheduler(cfg, optimizer)
        self.checkpointer = DetectionCheckpointer(model, cfg.OUTPUT_DIR, trainer=self)
        self.start_iter, self.max_iter, self.cfg = 0, cfg.SOLVER.MAX_ITER, cfg
        self.register_hooks(self.build_hooks())
        self.checkpointer = DetectionCheckpointer(model, cfg.OUTPUT_DIR, trainer=self)


class UnbiasedTeacher(MaskDINO):
    """It runs the steps itself."""

    def run_step(self):
        self._trainer.iter = self.iter
        losses = self.model(next(self._trainer._data_loader_iter))
        self.optimizer.zero_grad()
        sum(losses.values()).backward()
        self.optimizer.step()


class OwnInner(SimpleTrainer):
    """An inner trainer of a project."""


class FewShot(Parts, SimpleTrainer):
    """A trainer that is a SimpleTrainer, as few-shot-object-detection's DefaultTrainer."""

    build_hooks = DefaultTrainer.build_hooks
    build_lr_scheduler = DefaultTrainer.build_lr_scheduler

    def __init__(self, cfg):
        model = self.build_model(cfg)
        optimizer = self.build_optimizer(cfg, model)
        if comm.get_world_size() > 1:
            devices = [comm.get_local_rank()]
            model = DistributedDataParallel(model, device_ids=devices, broadcast_buffers=False)
        super().__init__(model, self.build_train_loader(cfg), optimizer)
        self.scheduler = self.build_lr_scheduler(cfg, optimizer)
        self.checkpointer = DetectionCheckpointer(
            model, cfg.OUTPUT_DIR, optimizer=optimizer, scheduler=self.scheduler
        )
        self.start_iter, self.max_iter, self.cfg = 0, cfg.SOLVER.MAX_ITER, cfg
        self.register_hooks(self.build_hooks())

    resume_or_load = AdelaiDet.resume_or_load

    def train(self):
        TrainerBase.train(self, self.start_iter, self.max_iter)


PROJECTS = {
    "DefaultTrainer": PlainProject,
    "another checkpointer on rank 0": AdelaiDet,
    "past DefaultTrainer": MaskDINO,
    "SimpleTrainer": FewShot,
    "own run_step": UnbiasedTeacher,
}


def on_a_cpu(init):
    return lambda self, module, **kwargs: init(self, module, **{**kwargs, "device_ids": None})


def class_of(shape):
    more = (AccumulatingTrainer,) if shape == "SimpleTrainer" else ()
    return type("Trainer", (MemfitMixin, PROJECTS[shape], *more), {})


def cfg_of(output_dir, **keys):
    cfg = get_cfg()
    cfg.MODEL.DEVICE, cfg.MODEL.WEIGHTS, cfg.OUTPUT_DIR = "cpu", "", str(output_dir)
    Path(output_dir).mkdir(parents=True, exist_ok=True)  # as default_setup does
    cfg.DATASETS.TRAIN = cfg.DATASETS.TEST = ()
    cfg.DATALOADER.NUM_WORKERS = 0
    cfg.SOLVER.IMS_PER_BATCH, cfg.SOLVER.MAX_ITER, cfg.SOLVER.CHECKPOINT_PERIOD = 4, 4, 2
    cfg.SOLVER.STEPS = ()
    cfg.merge_from_list([x for item in keys.items() for x in item])
    return cfg


def train(rank, shape, output_dir, keys, fails="", first=0, last=4):
    """Train a shape from iteration ``first`` to ``last``; return weights and optimizer's states."""
    logging.getLogger("detectron2").setLevel(logging.WARNING)
    seed_all_rng(rank + first)
    cfg = cfg_of(output_dir, **keys)
    name = shape.removeprefix("plain ")
    with replaced_functions(([DistributedDataParallel], {"__init__": on_a_cpu})):
        trainer = (PROJECTS[name] if name != shape else class_of(shape))(cfg)
    trainer.resume_or_load(resume=first > 0)
    assert trainer.start_iter == first
    model = trainer.model.module if comm.get_world_size() > 1 else trainer.model
    model.fails = fails

    def end(trainer):
        if trainer.iter + 1 == last < cfg.SOLVER.MAX_ITER:
            raise KeyboardInterrupt

    trainer.register_hooks([hooks.CallbackHook(after_step=end)])
    try:
        trainer.train()
    except KeyboardInterrupt:
        assert last < cfg.SOLVER.MAX_ITER
    states = [s["exp_avg"] for s in trainer.optimizer.state.values()]
    return parameters(model), states
