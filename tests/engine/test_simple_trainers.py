# Copyright (c) the d2_memfit developers.
import torch
from detectron2.engine import SimpleTrainer, hooks
from tiny import (
    every_anchor_counts,
    images,
    parameters,
    relative_difference,
    tiny_cfg,
    tiny_model,
)

from d2_memfit import AccumulatingTrainer
from d2_memfit.engine import RecoveryOptions
from d2_memfit.engine.simple_trainers import accumulate_in


class DefaultTrainer(SimpleTrainer):
    """As few-shot-object-detection's: it builds all, and is a SimpleTrainer."""

    def __init__(self, cfg, cut=8):
        model = tiny_model(cfg)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        data_loader = [images(cut, first=i) for _ in range(3) for i in range(0, 8, cut)]
        super().__init__(model, data_loader, optimizer)
        self.scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        self.register_hooks([hooks.LRScheduler(optimizer, self.scheduler)])

    def train(self):
        super().train(0, 3)


class Trainer(DefaultTrainer):
    """A project's."""

    def run_step(self):
        self.num_steps = getattr(self, "num_steps", 0) + 1
        super().run_step()


def trained(cut, **options):
    cfg = every_anchor_counts(tiny_cfg("proposal_network"))
    trainer = Trainer.__new__(Trainer)
    if options:
        accumulate_in(trainer, options)
    trainer.__init__(cfg, cut)
    trainer.train()
    return trainer


def test_it_accumulates_with_its_own_loader_hooks_and_methods():
    plain, trainer = trained(8), trained(2, accumulation_steps=4, recovery=RecoveryOptions())
    assert isinstance(trainer, Trainer)
    assert isinstance(trainer, AccumulatingTrainer)
    assert type(trainer).__name__ == "Trainer"
    assert trainer.num_steps == 3
    assert trainer.storage.latest()["effective_batch"][0] == 8
    assert trainer.optimizer.param_groups[0]["lr"] == plain.optimizer.param_groups[0]["lr"]
    assert trainer.state_dict().keys() >= {"iteration", "optimizer", "recovery"}
    expected = parameters(plain.model)
    moved = relative_difference(expected, parameters(tiny_model(tiny_cfg("proposal_network"))))
    assert relative_difference(parameters(trainer.model), expected) < 1e-5 * moved


def test_other_trainers_of_the_class_stay_as_they_are():
    trained(2, accumulation_steps=4)
    assert not isinstance(trained(8), AccumulatingTrainer)
    assert not issubclass(Trainer, AccumulatingTrainer)


def test_a_class_that_is_one_already_takes_the_options():
    class Own(DefaultTrainer, AccumulatingTrainer):
        pass

    trainer = Own.__new__(Own)
    accumulate_in(trainer, {"accumulation_steps": 4})
    trainer.__init__(tiny_cfg("proposal_network"), 2)
    trainer.train()
    assert trainer.storage.latest()["effective_batch"][0] == 8
