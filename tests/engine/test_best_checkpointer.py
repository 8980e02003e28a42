# Copyright (c) the d2_memfit developers.
"""Detectron2's best checkpoint, and runs that end in evaluations."""

import torch
from detectron2.utils import comm
from resumed import coins_cfg
from test_docs import blocks
from tiny import ROOT

import d2_memfit
from d2_memfit import MemfitTrainer


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
