# Copyright (c) the d2_memfit developers.
"""Detectron2's best checkpoint, and runs that end in evaluations."""

import contextlib
import os
import random
import shutil
import signal

import numpy as np
import pytest
import torch
from detectron2.data import DatasetCatalog
from detectron2.utils import comm
from detectron2.utils.env import seed_all_rng
from resumed import coins_cfg
from test_docs import blocks
from tiny import ROOT, parameters

import d2_memfit
from d2_memfit import MemfitTrainer
from d2_memfit.data.registration import register_coco

pytestmark = pytest.mark.slow


class Trainer(MemfitTrainer):
    """Evaluations have the AP of a list, by iteration; ``iterations`` are those that were made."""

    by_iteration = (10.0, 30.0, 20.0, 25.0, 15.0, 40.0)
    iterations = ()
    trainer = None

    def __init__(self, cfg):
        super().__init__(cfg)
        type(self).trainer = self

    @classmethod
    def test(cls, cfg, model, evaluators=None):
        iteration = min(cls.trainer.iter, cls.trainer.max_iter - 1)
        cls.iterations.append(iteration)
        torch.rand(1)  # as the loader of an evaluation does
        if not comm.is_main_process():
            return {}
        return {"bbox": {"AP": cls.by_iteration[iteration]}}


def trainer_of_the_page(monkeypatch, cls=Trainer):
    """The class in docs/GETTING_STARTED.md, derived from one that evaluates nothing."""
    (code,) = (b for b in blocks(ROOT / "docs" / "GETTING_STARTED.md", "python") if "Best" in b)
    monkeypatch.setattr(d2_memfit, "MemfitTrainer", type("Trainer", (cls,), {"iterations": []}))
    names = {}
    exec(code, names)
    return names["Trainer"]


def cfg_of(folder, max_iter=6, **keys):
    keys = {"TEST.EVAL_PERIOD": 1, "DATASETS.TEST": ("coins_train",), **keys}
    cfg = coins_cfg(folder, "faster_rcnn", **keys)
    cfg.SOLVER.ACCUMULATION_STEPS, cfg.SOLVER.MAX_ITER = 1, max_iter
    cfg.MEMFIT.NORMALIZERS.POLICY = "off"  # testing the losses takes longer than all else
    return cfg


def run(trainer_class, cfg, resume=False):
    trainer = trainer_class(cfg)
    trainer.resume_or_load(resume=resume)
    trainer.train()
    return trainer


def iteration_of(file):
    return torch.load(file, weights_only=True)["trainer"]["iteration"]


def test_the_lines_of_the_page_keep_the_best(coins, tmp_path, monkeypatch):
    run(trainer_of_the_page(monkeypatch), cfg_of(tmp_path, max_iter=5))
    assert iteration_of(tmp_path / "model_best.pth") == 1
    assert iteration_of(tmp_path / "model_final.pth") == 4


def test_the_last_can_be_the_best_and_the_run_goes_on_from_it(coins, tmp_path, monkeypatch):
    run(trainer_of_the_page(monkeypatch), cfg_of(tmp_path, max_iter=6))
    assert iteration_of(tmp_path / "model_best.pth") == 5
    assert (tmp_path / "last_checkpoint").read_text() == "model_best.pth"
    trainer = MemfitTrainer(cfg_of(tmp_path, max_iter=8))
    trainer.resume_or_load(resume=True)
    assert trainer.start_iter == 6


def train_on_rank(rank, coins, cfg, resume):
    """The first iteration of a rank, and its weights after the last."""
    if "coins_train" not in DatasetCatalog:
        register_coco("coins_train", str(coins / "train.json"), str(coins / "train"))
    with pytest.MonkeyPatch.context() as monkeypatch:
        trainer = run(trainer_of_the_page(monkeypatch), cfg, resume)
    return trainer.start_iter, parameters(trainer.model)


@pytest.mark.parametrize("shares_states", [False, True])
def test_all_ranks_go_on_from_the_best(coins, tmp_path, two_ranks, shares_states):
    """Also if the best alone is saved, with optimizer states that all ranks have to send."""
    keys = {"SOLVER.IMS_PER_BATCH": 4, "SOLVER.CHECKPOINT_PERIOD": 100}
    keys["MEMFIT.OPTIMIZER.ZERO"] = shares_states
    folders = tmp_path / "straight", tmp_path / "resumed"
    straight, resumed = (cfg_of(folder, max_iter=5, **keys) for folder in folders)
    expected = two_ranks.run(train_on_rank, coins, straight, False)
    folders[1].mkdir()
    shutil.copy(folders[0] / "model_best.pth", folders[1])
    (folders[1] / "last_checkpoint").write_text("model_best.pth")
    actual = two_ranks.run(train_on_rank, coins, resumed, True)
    for rank in (0, 1):
        assert actual[rank][0] == 2
        weights, others = expected[rank][1], actual[rank][1]
        assert all(torch.equal(weights[name], others[name]) for name in weights)


class Drawing(Trainer):
    """Its evaluations draw random numbers of all kinds. Those after ``ends`` end the run."""

    ends = ()

    @classmethod
    def test(cls, cfg, model, evaluators=None):
        results = super().test(cfg, model)
        random.random(), np.random.random()
        if cls.iterations[-1] in cls.ends:
            os.kill(os.getpid(), signal.SIGTERM)
        torch.rand(1)
        return results


def test_a_run_that_ends_in_evaluations_goes_on_to_the_same_weights(coins, tmp_path):
    def weights_of(name, endings):
        trainer = None
        for ends in endings:
            cls = type("Trainer", (Drawing,), {"iterations": [], "ends": ends})
            seed_all_rng(1 if trainer is None else 2)
            trainer = cls(cfg_of(tmp_path / name))
            trainer.resume_or_load(resume=True)
            with pytest.raises(SystemExit) if ends else contextlib.nullcontext():
                trainer.train()
        return torch.load(tmp_path / name / "model_final.pth", weights_only=True)["model"]

    expected, actual = weights_of("straight", [()]), weights_of("ended", [[0], [2], [3], ()])
    assert all(torch.equal(actual[name], expected[name]) for name in expected)
