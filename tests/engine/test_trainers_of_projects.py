# Copyright (c) the d2_memfit developers.
"""What a project's trainer is told, and that the remedy in each message works."""

import pytest
import torch
from detectron2.engine import AMPTrainer, DefaultTrainer, SimpleTrainer, TrainerBase, hooks
from detectron2.utils import comm
from detectron2.utils.env import seed_all_rng
from lazy_configs import lazy_config
from own_loops import OnlySteps, StopsEarly
from resumed import Trainer, coins_cfg
from tiny import parameters
from torch.nn.parallel import DistributedDataParallel
from trainer_shapes import (
    FewShot,
    MaskDINO,
    OwnInner,
    Parts,
    PlainProject,
    UnbiasedTeacher,
    cfg_of,
    class_of,
)

from d2_memfit import AccumulatingTrainer, Job, MemfitMixin, MemfitTrainer, fit_config
from d2_memfit.engine import GatherStates, MemoryMonitor, SaveOnEnding, build_trainer
from d2_memfit.errors import ConfigError
from d2_memfit.memory import process_memory
from d2_memfit.settings import RecoveryOptions

pytestmark = pytest.mark.slow

ACCUMULATION = {"SOLVER.ACCUMULATION_STEPS": 2, "MEMFIT.OOM.POLICY": "split"}


@pytest.mark.parametrize("shape", ["own AccumulatingTrainer", "own AMPTrainer", "README's line"])
def test_whoever_makes_it_the_inner_trainer_has_the_options_of_the_config(shape, tmp_path, log):
    keys = {**ACCUMULATION, "SOLVER.AMP.ENABLED": True, "MEMFIT.AMP_DTYPE": "bfloat16"}
    inner = class_of(shape)(cfg_of(tmp_path, **keys))._trainer
    assert type(inner) is AccumulatingTrainer
    assert inner.accumulation_steps == 2
    assert inner.recovery is not None
    assert inner.precision.dtype == torch.bfloat16
    said = "AMPTrainer is made, and SOLVER.AMP.ENABLED is False"
    assert said not in log.text
    class_of(shape)(cfg_of(tmp_path))
    assert (said in log.text) is (shape == "own AMPTrainer")


def trainer_and_parts(folder, **keys):
    trainer = class_of("DefaultTrainer")(cfg_of(folder, **keys))
    return trainer, (trainer.model, trainer.data_loader, trainer.optimizer)


def test_a_later_inner_trainer_is_converted_with_its_loss_scaler_and_losses(tmp_path):
    keys = {**ACCUMULATION, "SOLVER.AMP.ENABLED": True}
    trainer, parts = trainer_and_parts(tmp_path, **keys)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    trainer._trainer = AMPTrainer(*parts, grad_scaler=scaler)
    assert trainer._trainer.precision.scaler is scaler
    trainer._trainer.loss_fn = lambda model, batch: model(batch)
    trainer.train()
    assert trainer.storage.latest()["effective_batch"][0] == 8


class Loop(TrainerBase):
    """An inner trainer that is no SimpleTrainer."""


def test_an_inner_trainer_that_cannot_accumulate_is_an_error(tmp_path):
    trainer, parts = trainer_and_parts(tmp_path)
    remedy = r"self\._trainer = SimpleTrainer\(.*self\._trainer\.loss_fn = FUNCTION"
    with pytest.raises(TypeError, match=f"Loop runs the steps, .*{remedy}"):
        trainer._trainer = Loop()
    with pytest.raises(TypeError, match=r"class OwnInner\(AccumulatingTrainer\), or add it as the"):
        trainer._trainer = OwnInner(*parts)
    with pytest.raises(TypeError, match="Trainer is a SimpleTrainer: add AccumulatingTrainer as"):
        type("Trainer", (MemfitMixin, FewShot), {})
    made = SimpleTrainer(*parts)
    made.async_write_metrics = True  # as main's
    with pytest.raises(ConfigError, match="async_write_metrics=True cannot be used"):
        trainer._trainer = made


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"accumulation_steps": 4}, "with accumulation_steps 4, and the config asks for 2"),
        ({"recovery": RecoveryOptions()}, "with recovery True, and the config asks for False"),
        ({"precision": "bf16"}, r"with precision torch\.bfloat16, and the config asks for"),
    ],
)
def test_options_that_contradict_the_config_are_an_error(options, text, tmp_path):
    trainer, parts = trainer_and_parts(tmp_path, **{"SOLVER.ACCUMULATION_STEPS": 2})
    with pytest.raises(ConfigError, match=f"{text}.*leave {next(iter(options))} out there"):
        trainer._trainer = AccumulatingTrainer(*parts, **options)
    trainer._trainer = AccumulatingTrainer(*parts)
    assert trainer._trainer.accumulation_steps == 2


def test_a_technique_that_would_not_be_applied_is_an_error(tmp_path):
    class Trainer(MemfitMixin, MaskDINO):
        def __init__(self, cfg):
            self.build_model = Parts.build_model  # which d2_memfit does not see
            super().__init__(cfg)

    keys = {"MEMFIT.CHECKPOINT.MODULES": ["net"]}
    text = r"ActivationCheckpointing is on and would do nothing: .* self\.build_model\(cfg\), "
    with pytest.raises(ConfigError, match=text):
        Trainer(cfg_of(tmp_path, **keys))
    remedied = class_of("past DefaultTrainer")(cfg_of(tmp_path, **keys))
    assert hasattr(type(remedied.model.net), "_extended_class")


def test_a_run_step_that_reads_no_key_is_an_error_where_one_is_set(tmp_path):
    class Trainer(MemfitMixin, UnbiasedTeacher):
        pass

    class Remedied(MemfitMixin, UnbiasedTeacher):
        def __init__(self, cfg):
            super().__init__(cfg)
            self._trainer.loss_fn = self.losses

        def losses(self, model, batch):
            return model(batch)

        def run_step(self):
            self._trainer.run_step()

    text = r"ACCUMULATION_STEPS 2, MEMFIT\.OOM\.POLICY split: Trainer steps without self\._tr"
    with pytest.raises(ConfigError, match=text):
        Trainer(cfg_of(tmp_path, **ACCUMULATION)).train()
    Trainer(cfg_of(tmp_path)).train()
    trainer = Remedied(cfg_of(tmp_path, **ACCUMULATION))
    trainer.train()
    assert trainer.storage.latest()["effective_batch"][0] == 8


def test_a_plan_that_nobody_makes_is_an_error(coins, tmp_path):
    cfg = coins_cfg(tmp_path, **{"SOLVER.MAX_ITER": 1, "MEMFIT.PLAN.ENABLED": True})
    cfg.MEMFIT.BUDGET_GB = process_memory().data_bytes / 2**30 + 20
    text = r"MEMFIT\.PLAN\.ENABLED True: a trainer does not plan.*Trainer\(fit_config\(cfg, Trainer"
    with pytest.raises(ConfigError, match=text):
        Trainer(cfg)
    with pytest.raises(ConfigError, match=text):
        build_trainer(Job.from_cfg(cfg))
    lazy = lazy_config()
    lazy.train.memfit = {"plan": {"enabled": True}, "preset": "6GB"}
    with pytest.raises(ConfigError, match=text):
        build_trainer(Job.from_lazy(lazy))
    Trainer(fit_config(cfg, Trainer)).train()


def test_build_trainer_refuses_what_would_do_nothing(tmp_path):
    def job(**keys):
        return Job.from_trainer(PlainProject, cfg_of(tmp_path, **keys))

    loader = [[{"image_id": 0}]]
    for key, value in (("BUDGET_GB", 100.0), ("SHARED_DATASET", True)):
        with pytest.raises(ConfigError, match="would do nothing: build_trainer got a data_loader"):
            build_trainer(job(**{f"MEMFIT.HOST.{key}": value}), data_loader=loader)
    monitored = job(**{"MEMFIT.MONITOR.PERIOD": 1})
    with pytest.raises(ConfigError, match=r"MEMFIT\.MONITOR"):
        build_trainer(monitored).run_step()
    trainer = build_trainer(monitored)
    trainer.train(0, 2)
    assert trainer.storage.latest()["memfit/allocated_gb"][0] > 0


def steps_of_a_wrapped_model(rank, output_dir, is_wrapped):
    """The model of a project's loop is in DDP already."""
    seed_all_rng(rank)
    job = Job.from_trainer(PlainProject, cfg_of(output_dir))
    model = job.build_model()
    trainer = build_trainer(job, DistributedDataParallel(model) if is_wrapped else model)
    assert trainer.model.module is model
    trainer.train(0, 3)
    return parameters(model)


def test_ddp_is_never_in_ddp(two_ranks, tmp_path):
    one, other = two_ranks.run(steps_of_a_wrapped_model, str(tmp_path), True)
    torch.testing.assert_close(one, other, rtol=0, atol=0)
    expected, _ = two_ranks.run(steps_of_a_wrapped_model, str(tmp_path), False)
    torch.testing.assert_close(one, expected, rtol=0, atol=0)


def test_an_init_that_goes_past_that_of_the_mixin_is_found(tmp_path):
    class Trainer(Parts, MemfitTrainer):
        def __init__(self, cfg):
            DefaultTrainer.__init__(self, cfg)

    assert isinstance(Trainer(cfg_of(tmp_path))._trainer, AccumulatingTrainer)
    assert type(FewShot(cfg_of(tmp_path))) is FewShot


def counted(trainer, method, calls):
    """A hook that notes the iterations in which its method is called."""
    trainer.register_hooks([hooks.CallbackHook(**{method: lambda t: calls.append(t.iter)})])


class Early(StopsEarly, Parts, DefaultTrainer):
    stops_after = 1  # of four iterations


def test_a_loop_that_stops_early_ends_as_in_detectron2(tmp_path):
    def fail(trainer):
        raise OSError("the best checkpoint is not there")

    class Trainer(MemfitMixin, Early):
        pass

    seen = {}
    for kind in (Early, Trainer):
        trainer, seen[kind] = kind(cfg_of(tmp_path / kind.__name__)), []
        counted(trainer, "after_train", seen[kind])
        trainer.train()
    assert seen[Trainer] == seen[Early] == [2]
    trainer = Trainer(cfg_of(tmp_path / "failing"))
    trainer.register_hooks([hooks.CallbackHook(after_train=fail)])
    with pytest.raises(OSError, match="the best checkpoint"):
        trainer.train()


def test_a_loop_without_hooks_accumulates_and_is_warned_of(tmp_path, log):
    class Trainer(MemfitMixin, OnlySteps, Parts, DefaultTrainer):
        pass

    trainer = Trainer(cfg_of(tmp_path, **ACCUMULATION))
    trainer.train()
    assert trainer.storage.latest()["effective_batch"][0] == 8
    text = "Trainer runs a step before its before_train() was called, so no hook runs"
    assert log.text.count(text) == 1
    with pytest.raises(ConfigError, match=r"MEMFIT\.MONITOR is on, and a loop of run_step"):
        Trainer(cfg_of(tmp_path, **{"MEMFIT.MONITOR.PERIOD": 1})).train()


class MakesOwnHooks(Parts, DefaultTrainer):
    """Its hooks are made without those of DefaultTrainer, as in deepdoctection, and late."""

    def build_hooks(self):
        saves = hooks.PeriodicCheckpointer(self.checkpointer, 2)
        return [hooks.LRScheduler(), None, *([saves] if comm.is_main_process() else [])]

    def train(self):
        self._hooks = []
        self.register_hooks(self.build_hooks())
        super().train()


def test_hooks_that_a_project_takes_away_are_registered_again(tmp_path):
    class Trainer(MemfitMixin, MakesOwnHooks):
        pass

    trainer = Trainer(cfg_of(tmp_path, **{"MEMFIT.MONITOR.PERIOD": 1}))
    at_first = [type(hook) for hook in trainer._hooks]
    trainer.train()
    assert [type(hook) for hook in trainer._hooks] == [*at_first, SaveOnEnding]
    assert {GatherStates, MemoryMonitor} < set(at_first)


def test_a_config_of_a_copy_of_detectron2_is_told():
    copied = type("CfgNode", (), {"__module__": "LabGym.detectron2.config"})()
    with pytest.raises(TypeError, match=r"got a LabGym\.detectron2\.config\.CfgNode\. Of a copy"):
        class_of("DefaultTrainer")(copied)
