# Copyright (c) the d2_memfit developers.
"""Jobs of trainers, of LazyConfigs and of pieces: what is planned is what is trained."""

import detectron2.data.transforms as T
import pytest
import torch
from detectron2.config import instantiate
from detectron2.data import build_detection_train_loader, detection_utils
from detectron2.engine import DefaultTrainer
from lazy_configs import lazy_config
from omegaconf import OmegaConf
from tiny import tiny_cfg, tiny_model
from torch import nn

from d2_memfit import Job, estimate_memory
from d2_memfit.common.errors import ConfigError
from d2_memfit.common.side_work import RandomState
from d2_memfit.config.lazy import cfg_of_lazy, overrides_of
from d2_memfit.engine.build import build_trainer
from d2_memfit.job import with_overrides


class AdamWTrainer(DefaultTrainer):
    """With an optimizer, a mapper and a model of its own, as projects have them."""

    @classmethod
    def build_optimizer(cls, cfg, model):
        return torch.optim.AdamW(model.parameters(), lr=1e-4)

    @classmethod
    def build_train_loader(cls, cfg):
        def mapper(d):
            image = T.AugInput(detection_utils.read_image(d["file_name"], format="BGR"))
            detection_utils.check_image_size(d, image.image)
            resize_then_crop(image)
            tensor = torch.as_tensor(image.image.transpose(2, 0, 1).copy())
            return {"image": tensor, "own_field": len(d["annotations"]), "height": 1, "width": 1}

        return build_detection_train_loader(cfg, mapper=mapper)


resize_then_crop = T.AugmentationList(
    [T.ResizeShortestEdge((100, 200), 400, "choice"), T.RandomCrop("absolute", (96, 160))]
)


def test_the_mapper_of_the_trainer_makes_the_batch_in_its_own_order():
    cfg = tiny_cfg("faster_rcnn", fpn=False)
    job = Job.from_trainer(AdamWTrainer, cfg, 1)
    batch = job.training_batch(2)
    assert [tuple(d["image"].shape) for d in batch] == [(3, 96, 160)] * 2
    assert [d["own_field"] for d in batch] == [100, 100]
    assert "coco_2017_train cannot be read" in job.batches.assumptions[0]
    assert Job.from_trainer(AdamWTrainer, cfg, 1, num_instances=5).batches.num_instances == 5


def test_making_a_batch_draws_no_random_numbers_of_the_job():
    before = RandomState()
    Job.from_trainer(AdamWTrainer, tiny_cfg("faster_rcnn", fpn=False), 1).training_batch(1)
    assert before.draws_the_same(RandomState())


def test_methods_that_are_no_class_methods_are_an_error():
    class Wrong(DefaultTrainer):
        def build_optimizer(self, cfg, model):
            raise AssertionError

    job = Job.from_trainer(Wrong, tiny_cfg("faster_rcnn", fpn=False), 1)
    with pytest.raises(ConfigError, match=r"Wrong.build_optimizer must be a classmethod"):
        job.build_optimizer(nn.Linear(1, 1))


def test_a_job_says_how_images_are_dealt_out():
    cfg = tiny_cfg("faster_rcnn", fpn=False)
    cfg.SOLVER.IMS_PER_BATCH, cfg.SOLVER.ACCUMULATION_STEPS, cfg.MEMFIT.MICRO_BATCH = 8, 2, 3
    job = Job.from_cfg(cfg, 2)
    assert (job.images_per_batch, job.window, job.ranks) == (4, 8, 2)
    assert job.largest_micro_batch == 3
    with pytest.raises(ConfigError, match="must be divisible by the number of ranks, 3"):
        Job.from_cfg(cfg, 3)


def test_a_job_is_not_changed_by_its_settings():
    job = Job.from_cfg(tiny_cfg("faster_rcnn", fpn=False), 1)
    other = job.with_settings({"MEMFIT.MICRO_BATCH": 1})
    assert other.cfg.MEMFIT.MICRO_BATCH == 1
    assert job.cfg.MEMFIT.MICRO_BATCH is None
    with pytest.raises(AttributeError, match="immutable"):
        job.cfg.MEMFIT.MICRO_BATCH = 2


def test_a_batch_can_be_given():
    cfg = tiny_cfg("faster_rcnn", fpn=False)
    cfg.SOLVER.IMS_PER_BATCH = 3
    images = Job.from_cfg(cfg, 1).training_batch(2)
    job = Job.from_cfg(cfg, 1, batch=images)
    batch = job.training_batch()
    assert [d["image"].shape for d in batch] == [images[i % 2]["image"].shape for i in range(3)]
    assert len({d["image"].data_ptr() for d in batch}) == 3
    made = Job.from_cfg(cfg, 1, batch=lambda: images)
    assert made.batches.num_instances == len(images[0]["instances"])
    job = Job.from_cfg(cfg, 1, batch=([1, 2], [3, 4]))
    pairs = job.training_batch()
    assert pairs == ([1, 2, 1], [3, 4, 3])
    assert job.batches.num_instances is None
    targets = [{"labels": torch.ones(num)} for num in (2, 5, 3)]
    crowds = Job.from_cfg(cfg, 1, batch=([torch.ones(3, 8, 8)] * 3, targets))
    assert crowds.batches.num_instances == 5
    columns = (torch.arange(6.0).view(2, 3), torch.tensor([3, 4]))  # as a loader of PyTorch has
    rows, labels = Job.from_cfg(cfg, 1, batch=columns).training_batch()
    assert rows.shape == (3, 3)
    assert labels.tolist() == [3, 4, 3]
    with pytest.raises(ConfigError, match="batch must be a list with an item for each image"):
        Job.from_cfg(cfg, 1, batch=7).training_batch()


def test_a_lazy_config_is_a_job_with_its_own_optimizer_mapper_and_batch():
    cfg = lazy_config(accumulation_steps=2)
    job = Job.from_lazy(cfg, 2)
    assert (job.window, job.images_per_batch) == (4, 2)
    assert isinstance(job.build_optimizer(job.build_model()), torch.optim.AdamW)
    sizes = {tuple(d["image"].shape[1:]) for d in job.training_batch(2)}
    assert max(map(max, sizes)) == 100
    assert "model" not in cfg.optimizer.params  # the config is as before
    assert isinstance(instantiate(cfg.model), nn.Module)


def test_keys_of_a_lazy_config_have_their_places():
    places = overrides_of({"MEMFIT.MICRO_BATCH": 1, "MEMFIT.CHECKPOINT.MODULES": ["backbone"]})
    assert places == {
        "train.memfit.micro_batch": 1,
        "train.memfit.checkpoint.modules": ["backbone"],
    }
    job = Job.from_lazy(lazy_config(), 1).with_settings({"SOLVER.IMS_PER_BATCH": 6})
    assert job.parts.cfg.dataloader.train.total_batch_size == job.images_per_batch == 6
    with pytest.raises(ConfigError, match=r"INPUT.MASK_FORMAT has no place in a LazyConfig"):
        overrides_of({"INPUT.MASK_FORMAT": "polygon"})
    keys = cfg_of_lazy(with_overrides(lazy_config(), places))
    assert keys.MEMFIT.CHECKPOINT.MODULES == ["backbone"]
    with pytest.raises(ConfigError, match="the LazyConfig has no optimizer"):
        cfg_of_lazy(OmegaConf.create({"model": {}}))


def test_a_lazy_config_that_is_read_only_can_be_planned():
    cfg = lazy_config()
    OmegaConf.set_readonly(cfg, True)
    job = Job.from_lazy(cfg, 1).with_settings({"MEMFIT.MICRO_BATCH": 1})
    assert job.parts.cfg.train.memfit.micro_batch == 1
    assert job.build_optimizer(job.build_model())
    assert OmegaConf.is_readonly(cfg)


def test_pieces_are_a_job_and_a_job_is_a_trainer():
    cfg = tiny_cfg("faster_rcnn", fpn=False)
    images = Job.from_cfg(cfg, 1).training_batch(4)
    job = Job(
        model=lambda: tiny_model(cfg),
        optimizer=lambda model: torch.optim.AdamW(model.parameters()),
        train_loader=lambda: [images] * 2,
        images_per_batch=4,
        micro_batch_size=2,
        accumulation_steps=2,
        device="cpu",
        memfit={"oom": {"policy": "split"}},
        batch=images,
    )
    trainer = build_trainer(job)
    assert trainer.cutter.images == 2
    assert trainer.recovery is not None
    trainer.train(0, 1)
    assert estimate_memory(job, device="cuda").micro_batch_size == 2
    with pytest.raises(ConfigError, match=r"made from pieces has no key INPUT.MASK_FORMAT"):
        job.with_settings({"INPUT.MASK_FORMAT": "polygon"})
    with pytest.raises(ConfigError, match="has no MapDataset of Detectron2"):
        Job(
            model=torch.nn.Identity, optimizer=torch.optim.SGD, train_loader=lambda: [images]
        ).training_batch()


def test_the_clipping_of_a_lazy_config_is_done():
    """As detrex's trainer does it, which is none of Detectron2's."""
    clip = {"enabled": True, "params": {"max_norm": 1e-3, "norm_type": 2}}
    cfg = lazy_config(clip_grad=clip)
    images = Job.from_cfg(tiny_cfg("faster_rcnn", fpn=False), 1, num_instances=3).training_batch(2)
    trainer = build_trainer(Job.from_lazy(cfg, 1), data_loader=[images])
    trainer.train(0, 1)
    norms = [p.grad.norm() for p in trainer.model.parameters() if p.grad is not None]
    assert torch.stack(norms).norm() == pytest.approx(1e-3, rel=1e-3)
    cfg.train.clip_grad.enabled = False
    assert build_trainer(Job.from_lazy(cfg, 1), data_loader=[images]).clip_gradients is None
