# Copyright (c) the d2_memfit developers.
"""MemfitTrainer and MemfitMixin, on the Coins photographs."""

from pathlib import Path

import pytest
import torch
from detectron2.engine import DefaultTrainer, hooks
from detectron2.utils.env import seed_all_rng
from test_docs import blocks
from tiny import ROOT, images, parameters, tiny_cfg

import d2_memfit
from d2_memfit import MemfitTrainer


@pytest.fixture
def cfg(coins, tmp_path):
    cfg = tiny_cfg("mask_rcnn", fpn=False)
    cfg.DATASETS.TRAIN, cfg.DATASETS.TEST = ("coins_train",), ("coins_val",)
    cfg.SOLVER.IMS_PER_BATCH = 2
    cfg.SOLVER.MAX_ITER = 3
    cfg.OUTPUT_DIR = str(tmp_path / "output")
    return cfg


class FixedData:
    """Overrides of a project: each batch is a function of how many were taken before."""

    seen = None

    @classmethod
    def build_train_loader(cls, cfg):
        def loader():
            batch = 0
            while True:
                yield images(cfg.SOLVER.IMS_PER_BATCH, first=batch % 4)
                batch += 1

        return loader()

    @classmethod
    def test(cls, cfg, model, evaluators=None):
        return {}

    def build_hooks(self):
        """What is sampled at random is a function of the iteration."""
        reseed = hooks.CallbackHook(before_step=lambda trainer: torch.manual_seed(trainer.iter))
        return [reseed, *super().build_hooks()]


class FixedTrainer(FixedData, MemfitTrainer):
    pass


class FixedDefaultTrainer(FixedData, DefaultTrainer):
    pass


def train(trainer_class, cfg):
    seed_all_rng(0)
    trainer = trainer_class(cfg)
    trainer.resume_or_load(resume=False)
    trainer.train()
    return trainer


def copy_of(cfg, **solver):
    cfg = cfg.clone()
    cfg.SOLVER.merge_from_list([x for item in solver.items() for x in item])
    return cfg


def momenta(trainer):
    return [s["momentum_buffer"] for s in trainer.optimizer.state.values()]


@pytest.mark.parametrize("grouping", [True, False])
def test_the_default_config_trains_as_detectron2_to_the_last_bit(cfg, tmp_path, grouping):
    """Without grouping, v0.6 draws numbers when it makes a trainer."""
    cfg.DATALOADER.ASPECT_RATIO_GROUPING = grouping
    cfg.DATASETS.TEST = ()
    results = []
    for i, trainer_class in enumerate((DefaultTrainer, DefaultTrainer, MemfitTrainer)):
        cfg.OUTPUT_DIR = str(tmp_path / str(i))  # the first one only warms up
        trainer = train(trainer_class, cfg)
        losses = [v for v, _ in trainer.storage.history("total_loss").values()]
        results.append((losses, parameters(trainer.model)))
    (_, (losses, expected), (our_losses, actual)) = results
    assert len(losses) == 3
    assert our_losses == losses
    assert all(torch.equal(actual[name], expected[name]) for name in expected)


def test_periods_and_learning_rate_count_optimizer_steps(cfg):
    evaluated = []

    class Trainer(FixedTrainer):
        @classmethod
        def test(cls, cfg, model, evaluators=None):
            evaluated.append(trainer.iter)
            return {}

    cfg.SOLVER.ACCUMULATION_STEPS = 4
    cfg.SOLVER.MAX_ITER = 6
    cfg.SOLVER.STEPS = (3,)
    cfg.SOLVER.CHECKPOINT_PERIOD = 2
    cfg.TEST.EVAL_PERIOD = 3
    trainer = Trainer(cfg)
    trainer.train()
    rates = [lr for lr, _ in trainer.storage.history("lr").values()]
    assert rates == pytest.approx([0.01] * 3 + [0.001] * 3)
    assert evaluated == [2, 6]
    files = [f for f in trainer.checkpointer.get_all_checkpoint_files() if "final" not in f]
    assert sorted(f[-11:] for f in files) == ["0000001.pth", "0000003.pth", "0000005.pth"]
    assert len(trainer.storage.history("total_loss").values()) == 6


def interrupt_after(num_iterations, trainer_class, cfg):
    """Train, and stop as Ctrl-C does; the last checkpoint is that of this iteration."""

    def stop(trainer):
        if trainer.iter + 1 == num_iterations:
            raise KeyboardInterrupt

    trainer = trainer_class(copy_of(cfg, CHECKPOINT_PERIOD=num_iterations))
    trainer.register_hooks([hooks.CallbackHook(after_step=stop)])
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    return trainer


@pytest.mark.parametrize("saves_optimizer", [True, False], ids=["as main", "as v0.6"])
def test_checkpoints_of_plain_detectron2_are_resumed(cfg, log, saves_optimizer):
    cfg.SOLVER.WARMUP_ITERS = 2
    plain = interrupt_after(2, FixedDefaultTrainer, cfg)
    file = plain.checkpointer.get_checkpoint_file()
    checkpoint = torch.load(file, weights_only=True)
    # The one difference between the two releases' checkpoints, whichever of them wrote this one.
    if saves_optimizer:
        inner = {"iteration": 1, "optimizer": plain.optimizer.state_dict()}
        checkpoint["trainer"]["_trainer"] = inner
    else:
        checkpoint["trainer"].pop("_trainer", None)
    torch.save(checkpoint, file)

    resumed = FixedTrainer(cfg)
    resumed.resume_or_load(resume=True)
    assert resumed.start_iter == 2
    expected = parameters(plain.model)
    assert all(torch.equal(p, expected[name]) for name, p in parameters(resumed.model).items())
    assert ("has no optimizer state" in log.text) is not saves_optimizer
    if saves_optimizer:
        assert all(map(torch.equal, momenta(resumed), momenta(plain)))
    resumed.train()
    assert resumed.iter == 3
    plain = FixedDefaultTrainer(cfg)
    plain.resume_or_load(resume=True)  # our checkpoint
    assert plain.start_iter == 3
    straight = train(FixedDefaultTrainer, cfg)
    rates = [[lr for lr, _ in t.storage.history("lr").values()] for t in (straight, resumed)]
    assert rates[1] == rates[0][2:]  # from the first iteration on


def test_a_config_for_plain_detectron2_is_replaced_until_someone_edits_it(cfg, log):
    file = Path(cfg.OUTPUT_DIR) / "detectron2_config.yaml"
    said = f"{file} was not written by a training, and stays as it is"
    for cfg.SOLVER.MAX_ITER in (3, 2):
        FixedTrainer(cfg).train()
        assert f"MAX_ITER: {cfg.SOLVER.MAX_ITER}\n" in file.read_text()
    assert said not in log.text
    edited = file.read_text() + "# for my camera\n"
    file.write_text(edited)
    cfg.SOLVER.MAX_ITER = 1
    FixedTrainer(cfg).train()
    assert said in log.text
    assert file.read_text() == edited


def test_a_rank_with_two_accumulation_steps_scales_a_recipe_as_two_ranks():
    cfg = tiny_cfg(fpn=False)
    solver = {"REFERENCE_WORLD_SIZE": 8, "IMS_PER_BATCH": 16, "BASE_LR": 0.02, "MAX_ITER": 90000}
    cfg = copy_of(cfg, **solver, STEPS=(60000,), WARMUP_ITERS=1000, ACCUMULATION_STEPS=2)
    scaled = MemfitTrainer.auto_scale_workers(cfg, 1).SOLVER
    assert (scaled.IMS_PER_BATCH, scaled.ACCUMULATION_STEPS, scaled.BASE_LR) == (2, 2, 0.005)
    assert (scaled.MAX_ITER, scaled.STEPS, scaled.WARMUP_ITERS) == (360000, (240000,), 4000)


def test_the_lines_of_the_page_keep_the_best(cfg, monkeypatch):
    """The class in docs/GETTING_STARTED.md, derived from one whose evaluations have some APs."""
    (code,) = (b for b in blocks(ROOT / "docs" / "GETTING_STARTED.md", "python") if "Best" in b)
    aps, names = iter((10.0, 30.0, 20.0)), {}

    class Evaluated(FixedTrainer):
        @classmethod
        def test(cls, cfg, model, evaluators=None):
            return {"bbox": {"AP": next(aps)}}

    monkeypatch.setattr(d2_memfit, "MemfitTrainer", Evaluated)
    exec(code, names)
    cfg.TEST.EVAL_PERIOD = 1
    train(names["Trainer"], cfg)
    for name, iteration in (("best", 1), ("final", 2)):
        file = f"{cfg.OUTPUT_DIR}/model_{name}.pth"
        assert torch.load(file, weights_only=True)["trainer"]["iteration"] == iteration
