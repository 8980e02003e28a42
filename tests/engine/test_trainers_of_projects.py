# Copyright (c) the d2_memfit developers.
import pytest
import torch
from detectron2.engine import DefaultTrainer, SimpleTrainer, hooks
from tiny import every_anchor_counts, images, parameters, relative_difference, tiny_cfg, tiny_model

from d2_memfit import AccumulatingTrainer, MemfitMixin, MemfitTrainer


class OwnDefaultTrainer(SimpleTrainer):
    """As few-shot-object-detection's: it builds all, and is a SimpleTrainer."""

    def __init__(self, cfg):
        model = self.build_model(cfg)
        optimizer = self.build_optimizer(cfg, model)
        super().__init__(model, self.build_train_loader(cfg), optimizer)
        self.scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        self.start_iter, self.max_iter, self.cfg = 0, 3, cfg
        self.register_hooks([hooks.LRScheduler(optimizer, self.scheduler)])

    def train(self):
        super().train(self.start_iter, self.max_iter)

    @classmethod
    def build_model(cls, cfg):
        return tiny_model(cfg)

    @classmethod
    def build_optimizer(cls, cfg, model):
        return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    @classmethod
    def build_train_loader(cls, cfg):
        cut = cfg.SOLVER.IMS_PER_BATCH
        return [images(cut, first=i) for _ in range(3) for i in range(0, 8, cut)]


def cfg_of(tmp_path, ims_per_batch, **keys):
    cfg = every_anchor_counts(tiny_cfg("proposal_network"))
    cfg.OUTPUT_DIR = str(tmp_path)
    cfg.SOLVER.IMS_PER_BATCH = ims_per_batch
    cfg.SOLVER.ACCUMULATION_STEPS = 8 // ims_per_batch
    cfg.MEMFIT.OOM.POLICY = "split"
    return cfg


def test_a_trainer_that_is_a_simple_trainer_accumulates(tmp_path):
    class Trainer(MemfitMixin, OwnDefaultTrainer):
        pass

    cfg = cfg_of(tmp_path, 2)
    trainer = Trainer(cfg)
    trainer.train()
    assert isinstance(trainer, AccumulatingTrainer)
    assert trainer.storage.latest()["effective_batch"][0] == 8
    plain = OwnDefaultTrainer(cfg_of(tmp_path, 8))
    plain.train()
    moved = relative_difference(parameters(plain.model), parameters(tiny_model(cfg)))
    difference = relative_difference(parameters(trainer.model), parameters(plain.model))
    assert difference < 1e-5 * moved
    state = trainer.state_dict()
    assert "recovery" in state
    again = Trainer(cfg)
    again.load_state_dict(state)
    assert again.iter == trainer.iter


def test_one_that_names_simple_trainer_is_told_to_use_super(tmp_path):
    class Named(OwnDefaultTrainer):
        def __init__(self, cfg):
            model = self.build_model(cfg)
            loader = self.build_train_loader(cfg)
            SimpleTrainer.__init__(self, model, loader, self.build_optimizer(cfg, model))

    class Trainer(MemfitMixin, Named):
        pass

    with pytest.raises(TypeError, match=r"calls SimpleTrainer.__init__ by that name"):
        Trainer(cfg_of(tmp_path, 2))


def test_an_init_that_goes_past_the_mixin_is_an_error(tmp_path):
    """As DiffusionDet's, whose base was replaced."""

    class Trainer(MemfitTrainer):
        def __init__(self, cfg):
            super(DefaultTrainer, self).__init__()
            self.register_hooks([])

    with pytest.raises(TypeError, match=r"Trainer.__init__ does not call that of MemfitMixin"):
        Trainer(cfg_of(tmp_path, 2))
