# Copyright (c) the d2_memfit developers.
import pytest
import torch
from injection import FailingTrainer, InjectedTrainer, iterate
from tiny import images, tiny_cfg, tiny_model

from d2_memfit import AccumulatingTrainer
from d2_memfit.settings import RecoveryOptions


class MaskHead(torch.nn.Module):
    """Counts forwards as AdelaiDet's BoxInst does, and in other ways."""

    def __init__(self):
        super().__init__()
        self.register_buffer("_iter", torch.zeros([1]))
        self.register_buffer("mean", torch.zeros(1))
        self.num_calls = 0
        self.num_images = 0
        self.norm = torch.nn.BatchNorm1d(1)

    def forward(self, xs):
        self._iter += 1
        self.mean = 0.9 * self.mean + 0.1 * xs.mean()
        self.num_calls += 1
        self.num_images += 2 * len(xs)
        return self.norm(xs)


class CondInst(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.mask_head = MaskHead()
        self.iteration = 7

    def forward(self, batch):
        self.iteration += 1
        return self.mask_head(torch.tensor([[float(i["image_id"])] for i in batch])).sum()


def trainer_of(num_batches=8, **kwargs):
    model = CondInst()
    loader = [[{"image_id": 4 * b + i} for i in range(4)] for b in range(num_batches)]
    kind = kwargs.pop("kind", AccumulatingTrainer)
    return kind(model, loader, torch.optim.SGD(model.parameters(), lr=0.1), **kwargs)


NAMES = {"CondInst.iteration", "mask_head._iter", "mask_head.num_calls"}


def warnings(log):
    found = [r.getMessage() for r in log.records if "counts forwards" in r.getMessage()]
    return found, {text.split()[0] for text in found}


@pytest.mark.parametrize("options", [{"accumulation_steps": 2}, {"micro_batch_size": 2}])
def test_with_accumulation_each_counter_is_named_once(options, log):
    iterate(trainer_of(**options), 3)
    found, names = warnings(log)
    assert names == NAMES
    assert len(found) == 3


@pytest.mark.slow
def test_with_one_forward_per_iteration_nobody_is_named(log):
    iterate(trainer_of(), 3)
    iterate(trainer_of(recovery=RecoveryOptions()), 3)
    assert not warnings(log)[0]


def test_forwards_that_recovery_has_undone_do_not_count(log):
    options = {"kind": FailingTrainer, "recovery": RecoveryOptions()}
    trainer = trainer_of(**options, fails=lambda ids: trainer.iter == 1 and len(ids) > 2)
    iterate(trainer, 3)
    assert warnings(log)[1] == NAMES


@pytest.mark.slow
@pytest.mark.parametrize("family", ["mask_rcnn", "retinanet"])
def test_models_without_counters_are_not_named(family, log):
    cfg = tiny_cfg(family, fpn=False)
    cfg.MODEL.RESNETS.NORM = "BN"
    model = tiny_model(cfg)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    iterate(InjectedTrainer(model, [images(2), images(2)], optimizer, 2))
    assert not warnings(log)[0]
