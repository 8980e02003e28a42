# Copyright (c) the d2_memfit developers.
"""MemfitTrainer and MemfitMixin, on the Coins photographs."""

import multiprocessing
import os
import signal
from pathlib import Path

import pytest
import torch
from detectron2.config import get_cfg as get_detectron2_cfg
from detectron2.engine import DefaultTrainer, hooks
from detectron2.utils.env import seed_all_rng
from tiny import images, parameters, read_metrics, tiny_cfg

from d2_memfit import AccumulatingTrainer, MemfitMixin, MemfitTrainer
from d2_memfit.errors import CheckpointError, ConfigError, DataError
from d2_memfit.evaluation import build_evaluator

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


class SignalledTrainer(FixedTrainer):
    def build_hooks(self):
        def send(trainer):
            if trainer.iter == 1:
                os.kill(os.getpid(), signal.SIGUSR2)

        return [hooks.CallbackHook(before_step=send), *super().build_hooks()]


def test_a_signal_ends_the_run_with_a_checkpoint_unless_the_key_is_false(cfg, tmp_path):
    with pytest.raises(SystemExit) as e:
        train(SignalledTrainer, cfg)
    assert e.value.code == 140
    assert (tmp_path / "output" / "last_checkpoint").read_text() == "model_0000001.pth"
    received = []
    former = signal.signal(signal.SIGUSR2, lambda number, frame: received.append(number))
    try:
        cfg.OUTPUT_DIR, cfg.MEMFIT.STOP_ON_SIGNALS = str(tmp_path / "goes_on"), False
        assert train(SignalledTrainer, cfg).iter == cfg.SOLVER.MAX_ITER
    finally:
        signal.signal(signal.SIGUSR2, former)
    assert received == [signal.SIGUSR2]


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


def test_one_base_class_and_one_key_make_a_project_accumulate(cfg):
    """On a config that knows nothing of d2_memfit, as a project makes it."""
    plain = get_detectron2_cfg()
    plain.merge_from_other_cfg(_without_memfit_keys(cfg))
    plain.SOLVER.ACCUMULATION_STEPS = 2
    trainer = train(MemfitTrainer_without_evaluation, plain)
    assert isinstance(trainer._trainer, AccumulatingTrainer)
    assert trainer.storage.history("effective_batch").latest() == 4


class MemfitTrainer_without_evaluation(MemfitTrainer):
    test = FixedData.test


def _without_memfit_keys(cfg):
    cfg = cfg.clone()
    del cfg["MEMFIT"]
    del cfg.SOLVER["ACCUMULATION_STEPS"]
    return cfg


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


@pytest.mark.parametrize("amp", [False, True], ids=["fp32", "fp16"])
def test_a_run_that_was_resumed_ends_as_one_that_was_not(cfg, tmp_path, amp):
    cfg.SOLVER.ACCUMULATION_STEPS = 4
    cfg.SOLVER.AMP.ENABLED = amp
    cfg.SOLVER.MAX_ITER = 6
    cfg.SOLVER.STEPS = (4,)
    cfg.SOLVER.WARMUP_ITERS = 2
    straight = train(FixedTrainer, cfg)
    cfg.OUTPUT_DIR = str(tmp_path / "resumed")
    torch.manual_seed(0)
    interrupt_after(3, FixedTrainer, cfg)
    resumed = train(FixedTrainer, cfg, resume=True)

    assert resumed.start_iter == 3
    assert resumed.iter == straight.iter == 6
    rates = [lr for lr, _ in straight.storage.history("lr").values()]
    assert [lr for lr, _ in resumed.storage.history("lr").values()] == rates[3:]
    expected, actual = parameters(straight.model), parameters(resumed.model)
    assert all(torch.equal(actual[name], expected[name]) for name in expected)
    assert len(momenta(straight)) == len(expected)
    assert all(map(torch.equal, momenta(resumed), momenta(straight)))
    if amp:
        states = [t._trainer.precision.scaler.state_dict() for t in (straight, resumed)]
        assert states[0] == states[1]


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


def test_resuming_without_a_checkpoint_says_so_and_starts_afresh(cfg, log):
    trainer = FixedTrainer(cfg)
    trainer.resume_or_load(resume=True)
    assert trainer.start_iter == 0
    assert f"no checkpoint in {cfg.OUTPUT_DIR} to resume: a new run starts" in log.text


@pytest.mark.parametrize("num_bytes", [0, 100, -1000])
def test_instead_of_a_truncated_checkpoint_the_one_before_is_resumed(cfg, log, num_bytes):
    trainer = train(FixedTrainer, copy_of(cfg, CHECKPOINT_PERIOD=2))
    file = trainer.checkpointer.get_checkpoint_file()
    with open(file, "rb+") as f:
        f.truncate(num_bytes if num_bytes >= 0 else f.seek(0, 2) + num_bytes)
    resumed = FixedTrainer(cfg)
    resumed.resume_or_load(resume=True)
    assert resumed.start_iter == 2
    assert f"cannot read the checkpoint {file}" in log.text
    assert "model_0000001.pth instead" in log.text


def test_weights_that_do_not_exist_are_named(cfg):
    cfg.MODEL.WEIGHTS = "no/such/weights.pth"
    with pytest.raises(DataError, match=r"no/such/weights\.pth cannot be read"):
        FixedTrainer(cfg).resume_or_load(resume=False)


def test_damaged_weights_in_the_current_folder_are_named(cfg, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("weights.pth").write_text("not weights")
    cfg.MODEL.WEIGHTS = "weights.pth"
    with pytest.raises(CheckpointError, match=r"cannot read the checkpoint weights\.pth"):
        FixedTrainer(cfg).resume_or_load(resume=False)


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
    [(1, 8, 2, 1), (2, 4, 4, 1), (4, 2, 8, 1), (1, 4, 2, 1 / 2), (8, 2, 16, 2), (1, 1, 2, 1 / 8)],
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


def test_a_scaled_recipe_is_not_scaled_again():
    once = MemfitTrainer.auto_scale_workers(recipe(ACCUMULATION_STEPS=4), 1)
    assert MemfitTrainer.auto_scale_workers(once, 1) == once
    assert DefaultTrainer.auto_scale_workers(once, 1) == once


def test_without_a_reference_nothing_is_scaled():
    cfg = recipe(REFERENCE_WORLD_SIZE=0, ACCUMULATION_STEPS=8, IMS_PER_BATCH=2)
    assert MemfitTrainer.auto_scale_workers(cfg, 1) is cfg


def test_a_recipe_that_cannot_be_divided_is_refused():
    for steps in (1, 8):
        with pytest.raises(ConfigError, match=r"by SOLVER\.REFERENCE_WORLD_SIZE, 8, got 12"):
            MemfitTrainer.auto_scale_workers(recipe(IMS_PER_BATCH=12, ACCUMULATION_STEPS=steps), 1)


def test_a_config_without_our_keys_scales_as_detectron2s():
    cfg = get_detectron2_cfg()
    cfg.SOLVER.REFERENCE_WORLD_SIZE = 8
    for num_ranks in (2, 8):
        expected = DefaultTrainer.auto_scale_workers(cfg, num_ranks)
        assert MemfitTrainer.auto_scale_workers(cfg, num_ranks) == expected


def test_the_trainer_uses_the_scaled_recipe(cfg):
    cfg.SOLVER.REFERENCE_WORLD_SIZE = 8
    cfg.SOLVER.IMS_PER_BATCH = 8
    cfg.SOLVER.ACCUMULATION_STEPS = 8
    trainer = train(FixedTrainer, cfg)
    assert trainer.storage.history("effective_batch").latest() == 8
    assert trainer.cfg.SOLVER.IMS_PER_BATCH == 1
    assert trainer.max_iter == 3


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("SOLVER.ACCUMULATION_STEPS", 0),
        ("SOLVER.ACCUMULATION_STEPS", -2),
        ("MEMFIT.MICRO_BATCH", 0),
        ("MEMFIT.MICRO_BATCH", 1.5),
        ("MEMFIT.AMP_DTYPE", "float8"),
        ("MEMFIT.BUDGET_GB", 0),
        ("MEMFIT.BUDGET_GB", "6 gigs"),
        ("MEMFIT.OOM.POLICY", "ignore"),
        ("MEMFIT.OOM.LAST_RESORT", "none"),
        ("SOLVER.IMS_PER_BATCH", 0),
    ],
)
def test_a_value_that_cannot_work_is_named_before_anything_is_built(cfg, key, value, tmp_path):
    cfg.merge_from_list([key, value])
    with pytest.raises(ConfigError, match=key) as e:
        FixedTrainer(cfg)
    assert str(value) in str(e.value)


def try_three_images(rank, output_dir):
    cfg = tiny_cfg(fpn=False)
    cfg.SOLVER.IMS_PER_BATCH = 3
    cfg.OUTPUT_DIR = output_dir
    with pytest.raises(ConfigError) as e:
        FixedTrainer(cfg)
    return str(e.value)


def test_images_that_cannot_be_shared_among_ranks_are_refused(two_ranks, tmp_path):
    for message in two_ranks.run(try_three_images, str(tmp_path)):
        assert message == "SOLVER.IMS_PER_BATCH must be divisible by the number of ranks, 2, got 3"


def test_coins_can_be_trained_and_evaluated(cfg):
    class Trainer(MemfitTrainer):
        @classmethod
        def build_evaluator(cls, cfg, dataset_name):
            return build_evaluator(cfg, dataset_name)

    cfg.SOLVER.ACCUMULATION_STEPS = 2
    train(Trainer, cfg)
    metrics = read_metrics(cfg.OUTPUT_DIR)
    assert any("bbox/AP50" in line and "segm/AP50" in line for line in metrics)


def resume_without_optimizer(rank, output_dir):
    cfg = tiny_cfg(fpn=False)
    cfg.OUTPUT_DIR = output_dir
    cfg.SOLVER.IMS_PER_BATCH = 2
    cfg.MEMFIT.OPTIMIZER.ZERO = True
    trainer = FixedTrainer(cfg)
    trainer.load_state_dict({"iteration": 1, "hooks": {}})
    return trainer.iter


def test_shared_states_are_resumed_from_a_checkpoint_without_them(two_ranks, tmp_path):
    assert two_ranks.run(resume_without_optimizer, str(tmp_path)) == [1, 1]
