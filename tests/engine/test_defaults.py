# Copyright (c) the d2_memfit developers.
"""MemfitTrainer and MemfitMixin, on the Coins photographs."""

import multiprocessing
from pathlib import Path

import pytest
import torch
from detectron2.engine import DefaultTrainer, hooks
from detectron2.utils.env import seed_all_rng
from tiny import images, parameters, tiny_cfg

from d2_memfit import MemfitMixin, MemfitTrainer
from d2_memfit.errors import CheckpointError, ConfigError

pytestmark = pytest.mark.slow


@pytest.fixture
def cfg(coins, tmp_path):
    cfg = tiny_cfg("mask_rcnn", fpn=False)
    cfg.DATASETS.TRAIN = ("coins_train",)
    cfg.DATASETS.TEST = ("coins_val",)
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


def train(trainer_class, cfg, resume=False):
    seed_all_rng(0)
    trainer = trainer_class(cfg)
    trainer.resume_or_load(resume)
    trainer.train()
    return trainer


def copy_of(cfg, **solver):
    cfg = cfg.clone()
    cfg.SOLVER.merge_from_list([x for item in solver.items() for x in item])
    return cfg


def momenta(trainer):
    return [s["momentum_buffer"] for s in trainer.optimizer.state.values()]


def test_the_default_config_trains_as_detectron2_to_the_last_bit(cfg, tmp_path):
    cfg.MODEL = tiny_cfg("mask_rcnn", fpn=False).MODEL
    cfg.SOLVER.MAX_ITER = 5
    cfg.TEST.EVAL_PERIOD = 0

    class Plain(FixedData, DefaultTrainer):
        build_train_loader = DefaultTrainer.build_train_loader

    class Ours(FixedData, MemfitTrainer):
        build_train_loader = MemfitTrainer.build_train_loader

    results = []
    for name, trainer_class in (("warm up", Plain), ("plain", Plain), ("ours", Ours)):
        cfg.OUTPUT_DIR = str(tmp_path / name)
        trainer = train(trainer_class, cfg)
        losses = [v for v, _ in trainer.storage.history("total_loss").values()]
        results.append((losses, parameters(trainer.model)))
    (_, (losses, expected), (our_losses, actual)) = results
    assert len(losses) == 5
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


def test_a_project_keeps_its_own_parts(cfg):
    class ItsTrainer(FixedData, DefaultTrainer):
        """A trainer as projects write it."""

        def __init__(self, cfg, note):
            super().__init__(cfg)
            self.note = note

        @classmethod
        def build_model(cls, cfg):
            model = super().build_model(cfg)
            model.its_own = True
            return model

        @classmethod
        def build_optimizer(cls, cfg, model):
            return torch.optim.AdamW(model.parameters(), lr=1e-4)

        def build_hooks(self):
            self.inner_trainer_of_hooks = self._trainer
            return [*super().build_hooks(), hooks.CallbackHook(after_step=self.count)]

        def count(self, trainer):
            self.steps = getattr(self, "steps", 0) + 1

    class Trainer(MemfitMixin, ItsTrainer):
        pass

    cfg.SOLVER.ACCUMULATION_STEPS = 2
    torch.manual_seed(0)
    trainer = Trainer(cfg, note="kept")
    trainer.train()
    assert trainer.note == "kept"
    assert trainer.model.its_own
    assert isinstance(trainer.optimizer, torch.optim.AdamW)
    assert trainer.steps == 3
    assert trainer.inner_trainer_of_hooks is trainer._trainer
    assert trainer.storage.history("effective_batch").latest() == 4


def test_the_mixin_must_come_first(cfg):
    with pytest.raises(TypeError, match="MemfitMixin must be the first base class of Trainer"):

        class Trainer(DefaultTrainer, MemfitMixin):
            pass

    with pytest.raises(TypeError, match="first argument of FixedTrainer must be the config"):
        FixedTrainer(None)


def test_there_is_one_pool_of_loader_workers(cfg):
    class Trainer(MemfitTrainer):
        test = FixedData.test

    cfg.DATALOADER.NUM_WORKERS = 2
    cfg.DATALOADER.ASPECT_RATIO_GROUPING = False  # then v0.6 starts workers in the constructor
    others = set(multiprocessing.active_children())
    workers = []
    trainer = Trainer(cfg)
    trainer.register_hooks(
        [
            hooks.CallbackHook(
                after_step=lambda _: workers.append(
                    len(set(multiprocessing.active_children()) - others)
                )
            )
        ]
    )
    trainer.train()
    assert workers == [2, 2, 2]


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
    straight = train(FixedDefaultTrainer, cfg)
    rates = [[lr for lr, _ in t.storage.history("lr").values()] for t in (straight, resumed)]
    assert rates[1] == rates[0][2:]  # from the first iteration on


def test_a_config_for_plain_detectron2_is_replaced_until_someone_edits_it(cfg, log):
    file = Path(cfg.OUTPUT_DIR) / "detectron2_config.yaml"
    for text in ("", "# for my camera\n"):
        if text:
            file.write_text(file.read_text() + text)
        cfg.SOLVER.MAX_ITER = 1 if text else 2
        FixedTrainer(cfg).train()
        assert ("MAX_ITER: 1" in file.read_text()) is False
        assert (f"{file} was not written by a training, and stays as it is" in log.text) is bool(
            text
        )
    assert file.read_text().endswith("# for my camera\n")


def test_plain_detectron2_resumes_our_checkpoints(cfg):
    ours = interrupt_after(2, FixedTrainer, copy_of(cfg, ACCUMULATION_STEPS=2))
    resumed = FixedDefaultTrainer(cfg)
    resumed.resume_or_load(resume=True)
    assert resumed.start_iter == 2
    expected = parameters(ours.model)
    assert all(torch.equal(p, expected[name]) for name, p in parameters(resumed.model).items())
    resumed.train()


def test_a_checkpoint_with_python_objects_is_told_how_to_convert(cfg, tmp_path):
    file = tmp_path / "objects.pth"
    torch.save({"model": {}, "path": tmp_path}, file)
    cfg.MODEL.WEIGHTS = str(file)
    with pytest.raises(CheckpointError, match=r"Python objects .*weights_only=False"):
        FixedTrainer(cfg).resume_or_load(resume=False)
    torch.save({"model": torch.load(file, weights_only=False)["model"]}, file)
    FixedTrainer(cfg).resume_or_load(resume=False)


def recipe(**solver):
    """An 8-GPU recipe with a learning rate for 16 images."""
    cfg = tiny_cfg(fpn=False)
    cfg.SOLVER.REFERENCE_WORLD_SIZE = 8
    cfg.SOLVER.IMS_PER_BATCH = 16
    cfg.SOLVER.BASE_LR = 0.02
    cfg.SOLVER.MAX_ITER = 90000
    cfg.SOLVER.STEPS = (60000, 80000)
    cfg.SOLVER.WARMUP_ITERS = 1000
    return copy_of(cfg, **solver)


@pytest.mark.parametrize(
    ("num_ranks", "accumulation_steps", "images_per_batch", "scale"),
    [(1, 8, 2, 1), (4, 2, 8, 1), (1, 4, 2, 1 / 2), (8, 2, 16, 2)],
)
def test_a_rank_with_k_accumulation_steps_scales_a_recipe_as_k_ranks(
    num_ranks, accumulation_steps, images_per_batch, scale
):
    cfg = recipe(ACCUMULATION_STEPS=accumulation_steps)
    scaled = MemfitTrainer.auto_scale_workers(cfg, num_ranks).SOLVER
    assert images_per_batch == scaled.IMS_PER_BATCH
    assert accumulation_steps == scaled.ACCUMULATION_STEPS
    assert pytest.approx(0.02 * scale) == scaled.BASE_LR
    assert 90000 / scale == scaled.MAX_ITER
    assert (60000 / scale, 80000 / scale) == scaled.STEPS
    assert 1000 / scale == scaled.WARMUP_ITERS


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("SOLVER.ACCUMULATION_STEPS", 0),
        ("MEMFIT.MICRO_BATCH", 0),
        ("MEMFIT.BUDGET_GB", "6 gigs"),
        ("MEMFIT.OOM.POLICY", "ignore"),
    ],
)
def test_a_value_that_cannot_work_is_named_before_anything_is_built(cfg, key, value, tmp_path):
    cfg.merge_from_list([key, value])
    with pytest.raises(ConfigError, match=key) as e:
        FixedTrainer(cfg)
    assert str(value) in str(e.value)
