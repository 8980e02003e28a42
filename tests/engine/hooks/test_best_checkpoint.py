# Copyright (c) the d2_memfit developers.
"""The best checkpoint, and runs that end because they get no better."""

import contextlib
import os
import random
import shutil
import signal

import numpy as np
import pytest
import torch
from detectron2.data import DatasetCatalog
from detectron2.engine import hooks
from detectron2.utils import comm
from detectron2.utils.env import seed_all_rng
from resumed import coins_cfg
from tiny import parameters, read_metrics

from d2_memfit import MemfitTrainer
from d2_memfit.data import register_coco
from d2_memfit.errors import ConfigError
from d2_memfit.settings import check_settings

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
        return {"bbox": {"AP": cls.by_iteration[iteration], "AP50": float("nan")}}


def cfg_of(folder, patience=None, max_iter=6, **keys):
    keys = {"MEMFIT.BEST.METRIC": "bbox/AP", "MEMFIT.BEST.PATIENCE": patience, **keys}
    keys = {"TEST.EVAL_PERIOD": 1, "DATASETS.TEST": ("coins_train",), **keys}
    cfg = coins_cfg(folder, "faster_rcnn", **keys)
    cfg.SOLVER.ACCUMULATION_STEPS, cfg.SOLVER.MAX_ITER = 1, max_iter
    cfg.MEMFIT.NORMALIZERS.POLICY = "off"  # testing the losses takes longer than all else
    return cfg


def run(cfg, resume=False, by_iteration=Trainer.by_iteration, own_hooks=()):
    cls = type("Trainer", (Trainer,), {"iterations": [], "by_iteration": by_iteration})
    trainer = cls(cfg)
    trainer.resume_or_load(resume=resume)
    trainer.register_hooks(list(own_hooks))
    trainer.train()
    return trainer


def iteration_of(file):
    return torch.load(file, weights_only=True)["iteration"]


def test_the_best_is_kept_and_the_others_are_not(coins, tmp_path):
    trainer = run(cfg_of(tmp_path, max_iter=5))
    assert iteration_of(tmp_path / "model_best.pth") == 1
    assert iteration_of(tmp_path / "model_final.pth") == 4
    assert trainer.iterations == [0, 1, 2, 3, 4]


def test_the_last_can_be_the_best_and_the_run_goes_on_from_it(coins, tmp_path):
    run(cfg_of(tmp_path, max_iter=6))
    assert iteration_of(tmp_path / "model_best.pth") == 5
    trainer = MemfitTrainer(cfg_of(tmp_path, max_iter=8))
    trainer.resume_or_load(resume=True)
    assert trainer.start_iter == 6


def test_the_smallest_can_be_the_best(coins, tmp_path):
    cfg = cfg_of(tmp_path, max_iter=3, **{"MEMFIT.BEST.MODE": "min"})
    run(cfg)
    assert iteration_of(tmp_path / "model_best.pth") == 0


def test_a_run_that_gets_no_better_ends_as_a_finished_one(coins, tmp_path, log):
    ends = []
    last = hooks.CallbackHook(after_train=lambda t: ends.append((t.iter, t.max_iter)))
    trainer = run(cfg_of(tmp_path, patience=2), own_hooks=[last])
    assert trainer.iterations == [0, 1, 2, 3]  # and no second one of the last weights
    assert ends == [(4, 4)]
    final = torch.load(tmp_path / "model_final.pth", weights_only=True)
    assert final["iteration"] == 3
    trained = parameters(trainer.model)
    assert all(torch.equal(final["model"][name], trained[name]) for name in trained)
    assert iteration_of(tmp_path / "model_best.pth") == 1
    assert "the run ends after iteration 3, because bbox/AP was not better in 2" in log.text
    assert "The best is 30.0000, after iteration 1" in log.text
    assert "ERROR" not in log.text
    assert 25.0 in [line.get("bbox/AP") for line in read_metrics(tmp_path)]


def test_its_best_and_its_patience_are_resumed(coins, tmp_path):
    cfg = cfg_of(tmp_path, patience=3)
    cfg.SOLVER.CHECKPOINT_PERIOD = 3

    class Stop(hooks.HookBase):
        def after_step(self):
            if self.trainer.iter == 2:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(cfg, own_hooks=[Stop()])
    trainer = run(cfg, resume=True)
    assert trainer.iterations == [2, 3, 4]  # that of the checkpoint's iteration comes after it
    assert iteration_of(tmp_path / "model_best.pth") == 1


def test_an_evaluation_that_was_cut_short_is_made_when_the_run_goes_on(coins, tmp_path):
    cfg = cfg_of(tmp_path, max_iter=4)
    cfg.SOLVER.CHECKPOINT_PERIOD = 2
    with pytest.raises(KeyError):  # there is no result after iteration 1
        run(cfg, by_iteration={0: 10.0})
    trainer = run(cfg, resume=True)
    assert trainer.iterations == [1, 2, 3]
    assert iteration_of(tmp_path / "model_best.pth") == 1


def test_one_that_ended_so_trains_no_further_unless_it_may(coins, tmp_path):
    run(cfg_of(tmp_path, patience=2))
    trainer = run(cfg_of(tmp_path, patience=2), resume=True)
    assert trainer.iterations == [3]  # the evaluation that a finished run has in Detectron2, too
    assert iteration_of(tmp_path / "model_final.pth") == 3
    trainer = run(cfg_of(tmp_path, patience=4), resume=True)
    assert trainer.iterations == [4, 5]
    assert iteration_of(tmp_path / "model_best.pth") == 5


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


@pytest.mark.parametrize(
    "keys",
    [
        {"MEMFIT.BEST.METRIC": "bbox/AP", "MEMFIT.EMA_DECAY": 0.9},
        {"MEMFIT.BEST.METRIC": "bbox/AP", "MEMFIT.BEST.PATIENCE": 3},
        {"MEMFIT.BEST.METRIC": "", "MEMFIT.EMA_DECAY": 0.9},
        {"MEMFIT.BEST.METRIC": ""},
    ],
    ids=["best and average", "best and patience", "average", "none of them"],
)
def test_a_run_that_ends_in_evaluations_goes_on_to_the_same_weights(coins, tmp_path, keys):
    def weights_of(name, endings):
        trainer = None
        for ends in endings:
            cls = type("Trainer", (Drawing,), {"iterations": [], "ends": ends})
            seed_all_rng(1 if trainer is None else 2)
            trainer = cls(cfg_of(tmp_path / name, **keys))
            trainer.resume_or_load(resume=True)
            with pytest.raises(SystemExit) if ends else contextlib.nullcontext():
                trainer.train()
        files = [tmp_path / name / f"model_{which}.pth" for which in ("final", "best")]
        return [torch.load(file, weights_only=True)["model"] for file in files if file.exists()]

    straight = weights_of("straight", [()])
    ended = weights_of("ended", [[0], [2], [3], ()])
    assert len(straight) == len(ended) == 1 + bool(keys["MEMFIT.BEST.METRIC"])
    for expected, actual in zip(straight, ended):
        assert all(torch.equal(actual[name], expected[name]) for name in expected)


def run_on_rank(rank, coins, cfg, resume=False):
    """The evaluations of a rank, its last iteration, and its weights."""
    if "coins_train" not in DatasetCatalog:
        register_coco("coins_train", str(coins / "train.json"), str(coins / "train"))
    trainer = run(cfg, resume)
    return trainer.iterations, trainer.iter, parameters(trainer.model)


@pytest.mark.parametrize(("patience", "shares_states"), [(2, False), (None, True)])
def test_all_ranks_go_on_from_the_best_and_end_together(
    coins, tmp_path, two_ranks, patience, shares_states
):
    """Also if the best alone is saved, with optimizer states that all ranks have to send."""
    keys = {"SOLVER.IMS_PER_BATCH": 4, "MEMFIT.EMA_DECAY": 0.9, "SOLVER.CHECKPOINT_PERIOD": 100}
    keys["MEMFIT.OPTIMIZER.ZERO"] = shares_states
    folders = tmp_path / "straight", tmp_path / "resumed"
    straight, resumed = (cfg_of(folder, patience, max_iter=5, **keys) for folder in folders)
    expected = two_ranks.run(run_on_rank, coins, straight)
    folders[1].mkdir()
    shutil.copy(folders[0] / "model_best.pth", folders[1])
    (folders[1] / "last_checkpoint").write_text("model_best.pth")
    actual = two_ranks.run(run_on_rank, coins, resumed, True)
    end = 5 if patience is None else 4
    for rank in (0, 1):
        assert expected[rank][:2] == ([0, 1, 2, 3, 4][:end], end)
        assert actual[rank][:2] == ([2, 3, 4][: end - 2], end)
        weights, others = expected[rank][2], actual[rank][2]
        assert all(torch.equal(weights[name], others[name]) for name in weights)
    final, other = (torch.load(f / "model_final.pth", weights_only=True) for f in folders)
    assert final["iteration"] == other["iteration"] == end - 1
    assert all(torch.equal(final["model"][name], other["model"][name]) for name in final["model"])


def test_a_metric_that_is_not_there_is_said_with_those_that_are(coins, tmp_path, log):
    run(cfg_of(tmp_path, max_iter=2, **{"MEMFIT.BEST.METRIC": "segm/AP"}))
    assert "segm/AP is not among the results of the evaluation" in log.text
    assert "The results of AP are: bbox/AP" in log.text
    assert not (tmp_path / "model_best.pth").exists()


def test_a_result_that_is_no_number_is_not_the_best(coins, tmp_path):
    run(cfg_of(tmp_path, max_iter=2, **{"MEMFIT.BEST.METRIC": "bbox/AP50"}))
    assert not (tmp_path / "model_best.pth").exists()


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"TEST.EVAL_PERIOD": 0}, "nothing is evaluated before the end of the run"),
        ({"DATASETS.TEST": ()}, "nothing is evaluated before the end of the run"),
        ({"MEMFIT.BEST.METRIC": "", "MEMFIT.BEST.PATIENCE": 2}, "needs a MEMFIT.BEST.METRIC"),
        ({"MEMFIT.BEST.PATIENCE": 0}, "MEMFIT.BEST.PATIENCE must be a positive integer"),
        ({"MEMFIT.BEST.MODE": "best"}, "MEMFIT.BEST.MODE must be 'max' or 'min'"),
        ({"MEMFIT.EMA_DECAY": 1.0}, "EMA_DECAY must be a number above 0 and below 1"),
        ({"MEMFIT.EMA_DECAY": 0.0}, "EMA_DECAY must be a number above 0 and below 1"),
    ],
)
def test_what_cannot_work_is_an_error(tmp_path, keys, message):
    with pytest.raises(ConfigError, match=message):
        check_settings(cfg_of(tmp_path, **keys))
