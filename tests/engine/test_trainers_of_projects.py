# Copyright (c) the d2_memfit developers.
"""What a project's trainer is told, and that the remedy in each message works."""

import os
import re
import signal

import pytest
import torch
from detectron2.engine import AMPTrainer, DefaultTrainer, SimpleTrainer, TrainerBase, hooks
from detectron2.evaluation import COCOEvaluator
from detectron2.utils import comm
from detectron2.utils.env import seed_all_rng
from fvcore.common.checkpoint import Checkpointer
from lazy_configs import lazy_config
from own_loops import OnlySteps, StepsItself, StopsEarly
from resumed import Trainer, coins_cfg
from tiny import every_anchor_counts, images, parameters, relative_difference, tiny_cfg, tiny_model
from torch.nn.parallel import DistributedDataParallel
from trainer_shapes import (
    AdelaiDet,
    FewShot,
    MaskDINO,
    Parts,
    PlainProject,
    ReplacesInner,
    UnbiasedTeacher,
    cfg_of,
    class_of,
)

from d2_memfit import AccumulatingTrainer, Job, MemfitMixin, MemfitTrainer, fit_config
from d2_memfit.common.files import FolderLock
from d2_memfit.engine import GatherStates, MemoryMonitor, SaveOnEnding, build_trainer
from d2_memfit.errors import CheckpointError, ConfigError, MemfitError
from d2_memfit.memory import process_memory

pytestmark = pytest.mark.slow

ACCUMULATION = {"SOLVER.ACCUMULATION_STEPS": 2, "MEMFIT.OOM.POLICY": "split"}


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


class NamesSimpleTrainer(OwnDefaultTrainer):
    def __init__(self, cfg):
        model = self.build_model(cfg)
        optimizer = self.build_optimizer(cfg, model)
        SimpleTrainer.__init__(self, model, self.build_train_loader(cfg), optimizer)
        self.start_iter, self.max_iter, self.cfg = 0, 3, cfg
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        self.register_hooks([hooks.LRScheduler(optimizer, scheduler)])


def tiny_cfg_of(tmp_path, ims_per_batch):
    cfg = every_anchor_counts(tiny_cfg("proposal_network", fpn=False))
    cfg.OUTPUT_DIR = str(tmp_path)
    cfg.SOLVER.IMS_PER_BATCH = ims_per_batch
    cfg.SOLVER.ACCUMULATION_STEPS = 8 // ims_per_batch
    cfg.MEMFIT.OOM.POLICY = "split"
    return cfg


@pytest.mark.parametrize("project", [OwnDefaultTrainer, NamesSimpleTrainer])
def test_a_trainer_that_is_a_simple_trainer_accumulates(project, tmp_path):
    with pytest.raises(TypeError, match="Trainer is a SimpleTrainer: add AccumulatingTrainer as"):
        type("Trainer", (MemfitMixin, project), {})

    class Trainer(MemfitMixin, project, AccumulatingTrainer):
        pass

    cfg = tiny_cfg_of(tmp_path, 2)
    trainer = Trainer(cfg)
    trainer.train()
    assert type(trainer) is Trainer
    assert trainer.storage.latest()["effective_batch"][0] == 8
    plain = project(tiny_cfg_of(tmp_path, 8))
    assert not isinstance(plain, AccumulatingTrainer)
    plain.train()
    moved = relative_difference(parameters(plain.model), parameters(tiny_model(cfg)))
    difference = relative_difference(parameters(trainer.model), parameters(plain.model))
    assert difference < 1e-5 * moved
    state = trainer.state_dict()
    assert "recovery" in state
    again = Trainer(cfg)
    again.load_state_dict(state)
    assert again.iter == 2  # the last of three


def test_the_loss_scaler_of_a_project_is_kept(tmp_path):
    class Project(Parts, DefaultTrainer):
        def __init__(self, cfg):
            super().__init__(cfg)
            scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
            parts = self.model, self.data_loader, self.optimizer
            self._trainer = AMPTrainer(*parts, grad_scaler=scaler)

    class Trainer(MemfitMixin, Project):
        pass

    trainer = Trainer(cfg_of(tmp_path, **{"SOLVER.AMP.ENABLED": True}))
    assert trainer._trainer.precision.scaler.get_scale() == 8
    trainer.train()


@pytest.mark.parametrize("shape", ["own AccumulatingTrainer", "own AMPTrainer", "README's line"])
def test_whoever_makes_it_the_inner_trainer_has_the_options_of_the_config(shape, tmp_path):
    keys = {**ACCUMULATION, "SOLVER.AMP.ENABLED": True, "MEMFIT.AMP_DTYPE": "bfloat16"}
    inner = class_of(shape)(cfg_of(tmp_path, **keys))._trainer
    assert type(inner) is AccumulatingTrainer
    assert inner.accumulation_steps == 2
    assert inner.recovery is not None
    assert inner.precision.dtype == torch.bfloat16


@pytest.mark.parametrize("is_enabled", [False, True])
def test_an_amp_trainer_in_float32_is_said(is_enabled, tmp_path, log):
    cfg = cfg_of(tmp_path, **{"SOLVER.AMP.ENABLED": is_enabled, "MEMFIT.AMP_DTYPE": "bfloat16"})
    class_of("own AMPTrainer")(cfg)
    assert ("AMPTrainer is made, and SOLVER.AMP.ENABLED is False" in log.text) is not is_enabled


class AsksForOtherOptions(Parts, DefaultTrainer):
    options: dict[str, object]

    def __init__(self, cfg):
        super().__init__(cfg)
        self._trainer = AccumulatingTrainer(
            self.model, self.data_loader, self.optimizer, **self.options
        )


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"accumulation_steps": 4}, "with accumulation_steps 4, and the config asks for 2"),
        ({"precision": "bf16"}, r"with precision torch\.bfloat16, and the config asks for"),
    ],
)
def test_options_that_contradict_the_config_are_an_error(options, text, tmp_path):
    class Trainer(MemfitMixin, AsksForOtherOptions):
        pass

    Trainer.options = options
    with pytest.raises(ConfigError, match=f"{text}.*leave {next(iter(options))} out there"):
        Trainer(cfg_of(tmp_path, **ACCUMULATION))
    Trainer.options = {}
    assert Trainer(cfg_of(tmp_path, **ACCUMULATION))._trainer.accumulation_steps == 2


class Loop(TrainerBase):
    """An inner trainer that is no SimpleTrainer."""

    def __init__(self, *parts):
        super().__init__()
        self.model, self.data_loader, self.optimizer = parts


class OwnLoop(Parts, DefaultTrainer):
    def __init__(self, cfg):
        super().__init__(cfg)
        self._trainer = Loop(self.model, self.data_loader, self.optimizer)


class NotAccumulating(SimpleTrainer):
    pass


class OwnLoopAfterTheRemedy(Parts, DefaultTrainer):
    def __init__(self, cfg):
        super().__init__(cfg)
        model, data_loader, optimizer = self.model, self.data_loader, self.optimizer
        self._trainer = SimpleTrainer(model, data_loader, optimizer)
        self._trainer.loss_fn = self.losses

    def losses(self, model, batch):
        return {name: 2 * loss for name, loss in model(batch).items()}


def test_an_inner_trainer_that_cannot_accumulate_is_an_error(tmp_path):
    class Trainer(MemfitMixin, OwnLoop):
        pass

    class Late(MemfitMixin, PlainProject):
        pass

    class Remedied(MemfitMixin, OwnLoopAfterTheRemedy):
        pass

    remedy = r"self\._trainer = SimpleTrainer\(.*self\._trainer\.loss_fn = FUNCTION"
    with pytest.raises(TypeError, match=f"Loop runs the steps, .*{remedy}"):
        Trainer(cfg_of(tmp_path))
    late = Late(cfg_of(tmp_path, **ACCUMULATION))
    with pytest.raises(TypeError, match=r"class NotAccumulating\(AccumulatingTrainer\), or add"):
        late._trainer = NotAccumulating(late.model, late.data_loader, late.optimizer)
    late._trainer = SimpleTrainer(late.model, late.data_loader, late.optimizer)
    late.train()
    assert late.storage.latest()["effective_batch"][0] == 8
    trainer = Remedied(cfg_of(tmp_path, **ACCUMULATION))
    trainer.train()
    assert trainer.storage.latest()["effective_batch"][0] == 8


def test_metrics_that_shall_be_written_meanwhile_are_refused(tmp_path):
    trainer = class_of("DefaultTrainer")(cfg_of(tmp_path))
    made = SimpleTrainer(trainer.model, trainer.data_loader, trainer.optimizer)
    made.async_write_metrics = True  # as main's
    with pytest.raises(ConfigError, match="async_write_metrics=True cannot be used"):
        trainer._trainer = made


def test_an_inner_trainer_of_amp_is_told_to_derive_from_accumulating_trainer(tmp_path):
    class Inner(AMPTrainer):
        pass

    class Remedied(AccumulatingTrainer):
        pass

    class Project(Parts, DefaultTrainer):
        inner = Inner

        def __init__(self, cfg):
            super().__init__(cfg)
            self._trainer = self.inner(self.model, self.data_loader, self.optimizer)

    class Trainer(MemfitMixin, Project):
        pass

    keys = {"SOLVER.AMP.ENABLED": True, "MEMFIT.AMP_DTYPE": "bfloat16"}
    with pytest.raises(TypeError, match="Inner runs the steps, and is not derived from Acc"):
        Trainer(cfg_of(tmp_path, **keys))
    Trainer.inner = Remedied
    trainer = Trainer(cfg_of(tmp_path, **keys))
    trainer.train()
    assert trainer._trainer.precision.dtype == torch.bfloat16


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


def test_an_inner_run_step_that_reads_no_key_is_named(tmp_path):
    class Inner(AccumulatingTrainer):
        run_step = UnbiasedTeacher.run_step
        _trainer = property(lambda self: self)

    class Trainer(MemfitMixin, ReplacesInner):
        inner = Inner

    with pytest.raises(ConfigError, match=r": Inner steps without super\(\)\.run_step\(\)"):
        Trainer(cfg_of(tmp_path, **ACCUMULATION)).train()


class BuildsItself(MaskDINO):
    """Its model is made by no method that d2_memfit sees."""

    def __init__(self, cfg):
        self.build_model = Parts.build_model
        super().__init__(cfg)


def test_a_technique_that_would_not_be_applied_is_an_error(tmp_path):
    class Trainer(MemfitMixin, BuildsItself):
        pass

    keys = {"MEMFIT.CHECKPOINT.MODULES": ["net"]}
    text = r"ActivationCheckpointing is on and would do nothing: .* self\.build_model\(cfg\), "
    with pytest.raises(ConfigError, match=text):
        Trainer(cfg_of(tmp_path, **keys))
    remedied = class_of("past DefaultTrainer")(cfg_of(tmp_path, **keys))
    assert hasattr(type(remedied.model.net), "_extended_class")


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


class ForeignCheckpointer(Parts, DefaultTrainer):
    """Its checkpointer is not Detectron2's and saves no trainer."""

    def __init__(self, cfg):
        super().__init__(cfg)
        model, optimizer = self.model, self.optimizer
        self.checkpointer = Checkpointer(model, cfg.OUTPUT_DIR, optimizer=optimizer)

    def build_hooks(self):
        saver = hooks.CallbackHook(
            after_step=lambda t: self.checkpointer.save("model", iteration=t.iter)
        )
        return [*super().build_hooks()[:2], saver]

    resume_or_load = AdelaiDet.resume_or_load


def resumed_weights(folder, log, remedy=""):
    class Trainer(MemfitMixin, ForeignCheckpointer):
        pass

    for first, last in ((0, 2), (2, 4)):
        seed_all_rng(first)
        trainer = Trainer(cfg_of(folder))
        checkpointer = trainer.checkpointer  # what the remedy calls it
        exec(remedy, {"checkpointer": checkpointer, "trainer": trainer})
        trainer.resume_or_load(resume=first > 0)
        trainer.max_iter = last
        trainer.train()
    return parameters(trainer.model)


def test_a_checkpoint_without_the_trainer_says_what_is_lost_and_how_to_keep_it(tmp_path, log):
    seed_all_rng(0)
    straight = class_of("DefaultTrainer")(cfg_of(tmp_path / "straight"))
    straight.train()
    expected = parameters(straight.model)
    assert relative_difference(resumed_weights(tmp_path / "1", log), expected) > 0
    found = re.search(r"neither their order .* saves them after (.*)", log.text)
    log.clear()
    actual = resumed_weights(tmp_path / "2", log, remedy=found[1])
    assert "order of the data" not in log.text
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


def test_a_signal_is_saved_also_by_a_loop_that_does_not_tidy_up(tmp_path):
    class Trainer(MemfitMixin, AdelaiDet):
        pass

    trainer = Trainer(cfg_of(tmp_path))
    kill = hooks.CallbackHook(
        before_step=lambda t: t.iter == 0 and os.kill(os.getpid(), signal.SIGTERM)
    )
    trainer.register_hooks([kill])
    with pytest.raises(SystemExit) as e:
        trainer.train()
    assert e.value.code == 143
    assert (tmp_path / "last_checkpoint").read_text() == "model_0000000.pth"


def stop_on_ranks(rank, shape, folder):
    trainer = class_of(shape)(cfg_of(folder))
    kill = hooks.CallbackHook(
        before_step=lambda t: rank == t.iter == 1 and os.kill(os.getpid(), signal.SIGTERM)
    )
    trainer.register_hooks([kill])
    with pytest.raises(SystemExit) as e:
        trainer.train()
    return e.value.code, trainer.iter


@pytest.mark.parametrize("shape", ["own run_step", "another checkpointer on rank 0"])
def test_a_signal_on_one_rank_ends_all_with_a_checkpoint(shape, two_ranks, tmp_path):
    assert two_ranks.run(stop_on_ranks, shape, tmp_path) == [(143, 1), (143, 1)]
    assert (tmp_path / "last_checkpoint").read_text() == "model_0000001.pth"


def resume_where_one_rank_sees_nothing(rank, folder):
    trainer = class_of("DefaultTrainer")(cfg_of(folder / ("0" if rank == 0 else "nothing")))
    trainer.resume_or_load(resume=True)
    with pytest.raises(CheckpointError) as e:
        trainer.train()
    return str(e.value)


def test_ranks_that_resume_from_different_iterations_are_told(two_ranks, tmp_path):
    class_of("DefaultTrainer")(cfg_of(tmp_path / "0")).train()
    for error in two_ranks.run(resume_where_one_rank_sees_nothing, tmp_path):
        assert "[4, 0]" in error


def train_in_a_folder_in_use(rank, folder):
    """The errors of a first run, and the iteration that a second one ends at."""
    cfg = cfg_of(folder, **{"MEMFIT.MONITOR.SNAPSHOT_ON_OOM": True})
    trainer, evaluated = class_of("DefaultTrainer")(cfg), []
    trainer.register_hooks([hooks.CallbackHook(after_train=evaluated.append)])
    lock = FolderLock(str(folder)) if rank == 1 else None  # the first rank is another process
    comm.synchronize()
    with pytest.raises(MemfitError) as e:
        trainer.train()
    assert not evaluated
    if lock is not None:
        lock.release()
    comm.synchronize()
    trainer.train()
    assert evaluated
    return str(e.value), trainer.iter


def test_a_folder_in_use_ends_all_ranks_before_any_hook(two_ranks, tmp_path):
    one, other = two_ranks.run(train_in_a_folder_in_use, tmp_path)
    assert one[0].startswith("OUTPUT_DIR")
    assert one[0] in other[0]
    assert one[1] == other[1] == 4


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


def test_a_test_of_the_project_evaluates_as_the_config_says(tmp_path):
    """As DensePose's, which calls none of a base class."""

    class Trainer(MemfitTrainer):
        @classmethod
        def test(cls, cfg, model, evaluators=None):
            return COCOEvaluator.evaluate

    class Derived(Trainer):
        @classmethod
        def test(cls, cfg, model, evaluators=None):
            return super().test(cfg, model)

    for kind in (Trainer, Derived):
        replaced = kind.test(cfg_of(tmp_path), torch.nn.Linear(1, 1))
        assert replaced.__wrapped__ is COCOEvaluator.evaluate


def test_a_job_from_pieces_refuses_the_budget_of_the_host():
    with pytest.raises(ConfigError, match=r"host\.budget_gb cannot be used in a Job that is made"):
        Job(model=None, optimizer=None, memfit={"host": {"budget_gb": 4}})


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


def test_a_loop_that_leaves_the_last_iteration_s_number_evaluates_at_the_end(tmp_path):
    class Trainer(MemfitMixin, AdelaiDet):
        pass

    seen = {}
    for kind in (AdelaiDet, Trainer):
        trainer, seen[kind] = kind(cfg_of(tmp_path / kind.__name__)), []
        evaluate = lambda kind=kind: seen[kind].append("evaluated")  # noqa: E731
        trainer.register_hooks([hooks.EvalHook(0, evaluate)])
        trainer.train()
    assert seen[Trainer] == seen[AdelaiDet] == ["evaluated"]


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


@pytest.mark.parametrize(
    "shape", ["DefaultTrainer", "SimpleTrainer", "another checkpointer on rank 0"]
)
def test_a_loop_with_hooks_is_not_warned_of(shape, tmp_path, log):
    class_of(shape)(cfg_of(tmp_path)).train()
    assert "so no hook runs" not in log.text


class Foreign(StepsItself, Parts, DefaultTrainer):
    pass


def test_a_loop_that_reads_no_key_is_an_error_where_one_is_set(tmp_path):
    class Trainer(MemfitMixin, Foreign):
        pass

    text = r"SOLVER\.ACCUMULATION_STEPS 2, .*: Trainer steps without self\._trainer\.run_step"
    trainer = Trainer(cfg_of(tmp_path, **ACCUMULATION))
    before = parameters(trainer.model)
    with pytest.raises(ConfigError, match=text):
        trainer.train()
    assert relative_difference(parameters(trainer.model), before) == 0  # before its first step
    weights = []
    for kind in (Foreign, Trainer):
        seed_all_rng(0)
        trainer = kind(cfg_of(tmp_path))
        trainer.train()
        weights.append(parameters(trainer.model))
    torch.testing.assert_close(*weights, rtol=0, atol=0)


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
