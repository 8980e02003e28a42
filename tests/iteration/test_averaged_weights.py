# Copyright (c) the d2_memfit developers.
"""The average of a model's weights: its values, its place in evaluations and in checkpoints."""

import copy
import gc
import weakref

import pytest
import torch
from detectron2.checkpoint import DetectionCheckpointer
from injection import InjectedTrainer, Injector, iterate
from resumed import coins_cfg, train, train_on_rank
from tiny import images, parameters, tiny_cfg, tiny_model
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from d2_memfit import AccumulatingTrainer, MemfitTrainer
from d2_memfit.engine import MemfitCheckpointer, evaluating
from d2_memfit.iteration import AveragedWeights, average_of
from d2_memfit.settings import RecoveryOptions

pytestmark = pytest.mark.slow

DECAY = 0.75


def trainer_of(model=None, num_batches=6, trainer_class=AccumulatingTrainer, **options):
    model = tiny_model(tiny_cfg("faster_rcnn", fpn=False)) if model is None else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    loader = [images(2, first=2 * i) for i in range(num_batches)]
    return trainer_class(model, loader, optimizer, ema_decay=DECAY, **options)


def averaged(model):
    """The parameters of an evaluation."""
    with evaluating(tiny_cfg("faster_rcnn", fpn=False), model):
        return parameters(model)


def equal(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)


def check_average(trainer):
    """It is PyTorch's own, with an update after each of three iterations."""
    expected = AveragedModel(
        trainer.model, multi_avg_fn=get_ema_multi_avg_fn(DECAY), use_buffers=True
    )
    for i in range(3):
        iterate(trainer, first=i)
        expected.update_parameters(trainer.model)
    trained = parameters(trainer.model)
    assert equal(averaged(trainer.model), parameters(expected.module))
    assert not equal(averaged(trainer.model), trained)
    assert equal(parameters(trainer.model), trained)


def test_buffers_are_averaged_and_frozen_weights_are_not_kept_twice():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    model[0].requires_grad_(False)
    average = AveragedWeights(model, DECAY)
    average.update(model)
    model[1].running_mean.fill_(4.0)
    average.update(model)
    with average.in_model(model), average.in_model(model):  # an evaluation that saves
        assert model[1].running_mean.tolist() == [1.0] * 4
    assert model[1].running_mean.tolist() == [4.0] * 4
    assert sum(t.numel() for t in average.tensors()) == 4 * 4 + 1


def test_what_was_saved_in_an_evaluation_goes_on_with_the_trained_weights():
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    average, loaded = AveragedWeights(model, DECAY), AveragedWeights(other, DECAY)
    for value in (0.0, 4.0):
        nn.init.constant_(model.weight, value)
        average.update(model)
    with average.in_model(model):
        other.load_state_dict(model.state_dict())
        loaded.load_state_dict(copy.deepcopy(average.state_dict()), other)
    assert other.weight.tolist() == [[4.0] * 2] * 2
    with loaded.in_model(other):
        assert other.weight.tolist() == [[1.0] * 2] * 2
    assert other.weight.tolist() == [[4.0] * 2] * 2


def test_each_optimizer_step_updates_it_once():
    check_average(trainer_of(accumulation_steps=2, micro_batch_size=1))


def test_a_window_that_is_run_again_counts_once():
    trainer = trainer_of(trainer_class=InjectedTrainer, recovery=RecoveryOptions())
    trainer.injector = Injector({700})  # in the first backward
    check_average(trainer)
    assert trainer.cutter.images == 1


def test_before_the_first_step_there_is_none():
    trainer = trainer_of()
    tiny = tiny_model(tiny_cfg("faster_rcnn", fpn=False), seed=5)
    trainer.model.load_state_dict(tiny.state_dict())  # as weights are, after the trainer is made
    assert equal(averaged(trainer.model), parameters(tiny))
    iterate(trainer)
    assert equal(averaged(trainer.model), parameters(trainer.model))


def test_plain_detectron2_loads_the_average_and_a_resumed_run_the_trained_weights(tmp_path):
    trainer = trainer_of()
    iterate(trainer, 3)
    MemfitCheckpointer(trainer.model, str(tmp_path), trainer=trainer).save("model_0000002")
    file = str(tmp_path / "model_0000002.pth")
    average, trained = averaged(trainer.model), parameters(trainer.model)

    plain = tiny_model(tiny_cfg("faster_rcnn", fpn=False), seed=5)
    DetectionCheckpointer(plain).load(file)
    assert equal(parameters(plain), average)

    other = trainer_of(tiny_model(tiny_cfg("faster_rcnn", fpn=False), seed=5))
    MemfitCheckpointer(other.model, trainer=other).load(file)
    assert equal(parameters(other.model), trained)
    assert equal(averaged(other.model), average)

    without = AccumulatingTrainer(plain, [], torch.optim.SGD(plain.parameters(), 0.01))
    MemfitCheckpointer(plain, trainer=without).load(file)
    assert equal(parameters(plain), trained)


def test_a_checkpoint_of_another_checkpointer_is_resumed_too(tmp_path):
    trainer = trainer_of()
    iterate(trainer, 3)
    DetectionCheckpointer(trainer.model, str(tmp_path), trainer=trainer).save("model")
    other = trainer_of(tiny_model(tiny_cfg("faster_rcnn", fpn=False), seed=5))
    DetectionCheckpointer(other.model, trainer=other).load(str(tmp_path / "model.pth"))
    assert equal(parameters(other.model), parameters(trainer.model))
    assert equal(averaged(other.model), averaged(trainer.model))


def files_of(run, folder, keys, iterations=4, at=2):
    """The last checkpoints of a run, and of one that was resumed."""
    keys = {"MEMFIT.EMA_DECAY": DECAY, "SOLVER.ACCUMULATION_STEPS": 1, **keys}
    straight = coins_cfg(folder / "straight", "faster_rcnn", **keys)
    straight.SOLVER.MAX_ITER = iterations
    run(straight, 0, iterations)
    resumed = coins_cfg(folder / "resumed", "faster_rcnn", **keys)
    resumed.SOLVER.MAX_ITER = iterations
    run(resumed, 0, at)
    run(resumed, at, iterations)
    names = [folder / name / "model_final.pth" for name in ("straight", "resumed")]
    return [torch.load(name, weights_only=True) for name in names]


def check_same(one, other):
    assert equal(one["model"], other["model"])
    averages = [file["trainer"]["_trainer"]["ema"]["weights"] for file in (one, other)]
    assert equal(*averages)
    names = {name.removeprefix("module.").replace("/", ".") for name in averages[0]}
    assert "backbone.res2.0.conv1.weight" in names


def test_a_resumed_run_has_the_same_average(coins, tmp_path):
    check_same(*files_of(train, tmp_path, {"MEMFIT.OOM.POLICY": "split"}))


def test_two_ranks_have_the_same_average(coins, tmp_path, two_ranks):
    def run(*args):
        two_ranks.run(train_on_rank, coins, *args)

    check_same(*files_of(run, tmp_path, {"SOLVER.IMS_PER_BATCH": 4}))


def test_a_run_evaluates_the_average(coins, tmp_path):
    weights = []

    class Trainer(MemfitTrainer):
        @classmethod
        def test(cls, cfg, model, evaluators=None):
            weights.append(parameters(model))
            return {}

    cfg = coins_cfg(tmp_path, "faster_rcnn", **{"MEMFIT.EMA_DECAY": DECAY})
    cfg.SOLVER.ACCUMULATION_STEPS, cfg.SOLVER.MAX_ITER = 1, 2
    trainer = Trainer(cfg)
    trainer.train()
    saved = torch.load(tmp_path / "model_final.pth", weights_only=True)["model"]
    (evaluated,) = weights
    assert all(torch.equal(saved[name], evaluated[name]) for name in evaluated)
    assert not equal(evaluated, parameters(trainer.model))


def test_it_is_freed_with_its_model():
    model = nn.Linear(2, 2)
    AveragedWeights(model, DECAY).keep_for(model)
    tensor = weakref.ref(average_of(model).tensors()[0])
    del model
    gc.collect()
    assert tensor() is None
