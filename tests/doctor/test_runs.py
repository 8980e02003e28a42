# Copyright (c) the d2_memfit developers.
"""Whole runs of the doctor: ended and resumed, and on two ranks, on a dataset's images."""

from functools import partial

import pytest
import torch
import torch.multiprocessing as mp
from detectron2.data import DatasetCatalog
from detectron2.engine import DefaultTrainer, hooks
from detectron2.utils import comm
from forks import start_server
from lazy_configs import lazy_config
from own_loops import OnlySteps, StepsItself, StopsEarly
from tiny import tiny_cfg
from trainer_shapes import FewShot

from d2_memfit import Job, MemfitMixin
from d2_memfit.data.registration import register_coco
from d2_memfit.doctor.examination import examine_runs
from d2_memfit.doctor.patient import Unwell
from d2_memfit.doctor.runs import agrees_on_two_ranks, is_plain_by_default


@pytest.fixture(autouse=True)
def forked_ranks(monkeypatch):
    """Ranks import nothing, and get what they run by pickle, as those that are spawned."""
    start = mp.start_processes

    def start_forked(*args, start_method, **kwargs):
        start_server()
        start(*args, start_method="forkserver", **kwargs)

    monkeypatch.setattr(mp, "start_processes", start_forked)


class Forgetting(DefaultTrainer):
    """Its model draws from a generator that no checkpoint has."""

    generator = torch.Generator()

    @classmethod
    def build_model(cls, cfg):
        model = super().build_model(cfg)
        cls.generator.manual_seed(comm.get_rank())

        def noisy(module, args):
            for d in args[0]:
                noise = torch.randint(0, 9, d["image"].shape, generator=cls.generator)
                d["image"] = d["image"] // 2 + noise.to(d["image"])

        model.register_forward_pre_hook(noisy)
        return model


class Simple(FewShot):
    """It is a SimpleTrainer itself, and trains on the dataset."""

    build_model = DefaultTrainer.build_model
    build_optimizer = DefaultTrainer.build_optimizer
    build_train_loader = DefaultTrainer.build_train_loader


class Disagreeing(DefaultTrainer):
    """Its ranks have different weights."""

    def run_step(self):
        super().run_step()
        if comm.get_rank() == 1:
            with torch.no_grad():
                next(self.model.parameters()).add_(1)


def job_of(folder, ranks, trainer=None, fpn=True):
    if "coins_train" not in DatasetCatalog:
        register_coco("coins_train", str(folder / "train.json"), str(folder / "train"))
    cfg = tiny_cfg("faster_rcnn", fpn=fpn)
    cfg.DATASETS.TRAIN, cfg.DATASETS.TEST = ("coins_train",), ()
    cfg.INPUT.MIN_SIZE_TRAIN, cfg.INPUT.MAX_SIZE_TRAIN = (96, 128), 160
    cfg.DATALOADER.NUM_WORKERS = 1
    job = Job.from_trainer(trainer, cfg, ranks) if trainer else Job.from_cfg(cfg, ranks)
    return job, trainer


def lazy_job_of(folder, ranks, trainer=None):
    job_of(folder, ranks)  # registers the dataset
    cfg = lazy_config(ddp={"broadcast_buffers": False})
    cfg.dataloader.train.dataset.names = "coins_train"
    cfg.model.cfg.fpn = False
    return Job.from_lazy(cfg, ranks), trainer


def findings(folder, trainer, job_of=job_of):
    remake = partial(job_of, folder, 2, trainer)
    return {f.what: f for f in examine_runs(*job_of(folder, 1, trainer), remake)}


@pytest.mark.slow
@pytest.mark.parametrize("trainer", [DefaultTrainer, Simple, None])
def test_runs_that_are_well(coins, trainer):
    found = findings(coins, trainer)
    of_trainer = ["trainer"] if trainer else []
    assert list(found) == [*of_trainer, "resume", "two ranks"]
    assert all(f.is_well for f in found.values()), [str(f) for f in found.values()]
    assert "bit by bit" in found["resume"].text


def test_runs_of_a_lazy_config(coins):
    found = {f.what: f for f in examine_runs(*lazy_job_of(coins, 1))}
    assert list(found) == ["resume"]
    assert all(f.is_well for f in found.values()), [str(f) for f in found.values()]


@pytest.mark.sweep
def test_two_ranks_of_a_lazy_config(coins):
    found = findings(coins, None, lazy_job_of)
    assert list(found) == ["resume", "two ranks"]
    assert all(f.is_well for f in found.values()), [str(f) for f in found.values()]


@pytest.mark.slow
def test_what_a_resumed_run_does_not_find_again_is_told(coins, capfd):
    found = {f.what: f for f in examine_runs(*job_of(coins, 1, Forgetting, fpn=False))}["resume"]
    assert not found.is_well
    assert "differ from those of an uninterrupted run, such as " in found.text
    assert "_Ended" not in "".join(capfd.readouterr())  # the end of that run


class Precise(DefaultTrainer):
    """Its last iteration would run 200 batches for the statistics of batch normalisation."""

    def build_hooks(self):
        assert not self.cfg.TEST.PRECISE_BN.ENABLED
        return super().build_hooks()


def test_runs_are_without_precise_statistics(coins):
    job, trainer = job_of(coins, 1, Precise, fpn=False)
    assert "bit by bit" in is_plain_by_default(
        job.with_settings({"TEST.PRECISE_BN.ENABLED": True}), trainer
    )


@pytest.mark.slow
def test_ranks_that_differ_are_told(coins):
    text = "MEMFIT.OOM.POLICY raise: weights differ between the ranks"
    with pytest.raises(Unwell, match=text):
        agrees_on_two_ranks(partial(job_of, coins, 2, Disagreeing, fpn=False))


def test_without_a_dataset_it_is_said_that_nothing_was_tested(prose):
    cfg = tiny_cfg("faster_rcnn", fpn=False)
    cfg.DATASETS.TRAIN = ("nobody_has_it",)
    found = list(examine_runs(Job.from_cfg(cfg, 1)))
    assert [f.is_well for f in found] == [None]
    prose(str(found[0]))


class EvaluatesEarly(StopsEarly, DefaultTrainer):
    """Its loop is its own, and its hooks need the dataset to evaluate on."""

    def build_hooks(self):
        built = super().build_hooks()
        self.build_test_loader(self.cfg, self.cfg.DATASETS.TEST[0])
        return built


class OwnHooks(DefaultTrainer):
    """Its hooks are made without those of DefaultTrainer."""

    def build_hooks(self):
        return [hooks.LRScheduler(), None, hooks.PeriodicCheckpointer(self.checkpointer, 1)]


class CallsNoHooks(OnlySteps, DefaultTrainer):
    pass


class NoHooksAndNoSteps(StepsItself, DefaultTrainer):
    pass


class NeedsPatience(DefaultTrainer):
    def __init__(self, cfg, patience, name=""):
        super().__init__(cfg)
        self.patience = patience


class Patient(NeedsPatience):
    def __init__(self, cfg):
        super().__init__(cfg, patience=5)


def runs_of(folder, trainer):
    job, _ = job_of(folder, 1, trainer, fpn=False)
    job = job.with_settings({"DATASETS.TEST": ("coins_train",)})
    return {f.what: f for f in examine_runs(job, trainer)}


@pytest.mark.parametrize("trainer", [EvaluatesEarly, OwnHooks, Patient])
def test_loops_and_hooks_of_a_project_are_well(coins, trainer):
    found = runs_of(coins, trainer)
    assert list(found) == ["trainer", "resume"]
    assert all(f.is_well for f in found.values()), [str(f) for f in found.values()]


@pytest.mark.parametrize("trainer", [CallsNoHooks, NoHooksAndNoSteps])
def test_a_loop_that_runs_no_hooks_or_steps_itself_is_told(prose, coins, trainer):
    found = runs_of(coins, trainer)
    assert [found[what].is_well for what in ("trainer", "resume")] == [False, False]
    prose(f"{found['trainer']}\n{found['resume']}")


@pytest.mark.parametrize(
    "trainer", [NeedsPatience, type("Mixed", (MemfitMixin, NeedsPatience), {})]
)
def test_a_trainer_that_needs_more_than_the_config_is_not_tested(prose, coins, trainer):
    found = runs_of(coins, trainer)["resume"]
    assert found.is_well is None
    prose(found.text)
