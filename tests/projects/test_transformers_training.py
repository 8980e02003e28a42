# Copyright (c) the d2_memfit developers.
"""Training detectors of transformers: budget, split, resume, ranks, and that they learn."""

import math

import pytest
import torch
from d2_transformers import Trainer
from detectron2.utils.env import seed_all_rng
from forks import run_forked
from tiny import ROOT, read_metrics
from tiny_transformers import tiny_transformers_cfg

transformers = pytest.importorskip("transformers")
PROJECT = ROOT / "projects" / "Transformers"


def train(config, coins, *options):
    arguments = ["--config-file", config]
    for split in ("train", "val"):
        arguments += ["--coco", f"coins_{split}", coins / f"{split}.json", coins / split]
    script = PROJECT / "train_transformers.py"
    result = run_forked(script, *arguments, *options, timeout_s=180)
    assert result.returncode == 0, result.stderr[-4000:]
    return result.stdout


def tiny_config(folder):
    cfg = tiny_transformers_cfg("rf_detr", has_masks=True)
    cfg.DATASETS.TRAIN, cfg.DATASETS.TEST = ("coins_train",), ("coins_val",)
    cfg.SOLVER.IMS_PER_BATCH, cfg.SOLVER.ACCUMULATION_STEPS = 2, 2
    cfg.SOLVER.MAX_ITER = 2
    cfg.TRANSFORMERS.EMA_DECAY = 0.9
    cfg.MEMFIT.BUDGET_GB, cfg.MEMFIT.OOM.POLICY = 3, "split"
    cfg.OUTPUT_DIR = str(folder / "output")
    file = folder / "tiny.yaml"
    file.write_text(cfg.dump())
    return file


@pytest.mark.slow
def test_a_job_trains_in_a_budget_is_resumed_saved_and_evaluated(tmp_path, coins):
    config = tiny_config(tmp_path)
    folder = tmp_path / "output"
    train(config, coins)
    weights = torch.load(folder / "model_final.pth", weights_only=True)["model"]
    assert weights["ema.n_averaged"] == 2
    out = train(config, coins, "--resume", "SOLVER.MAX_ITER", "3")
    assert "Starting training from iteration 2" in out
    metrics = read_metrics(folder)
    assert [m["effective_batch"] for m in metrics if "effective_batch" in m] == [4, 4]
    assert any("segm/AP50" in m for m in metrics)
    weights = torch.load(folder / "model_final.pth", weights_only=True)["model"]
    assert weights["ema.n_averaged"] == 3
    kinds = transformers.AutoConfig.from_pretrained(str(folder / "pretrained"))
    assert (kinds.model_type, kinds.id2label) == ("rf_detr", {0: "coin"})
    out = train(config, coins, "--eval-only", "TRANSFORMERS.WEIGHTS", folder / "pretrained")
    assert "Evaluation results for bbox" in out


class Quiet(Trainer):
    """It does not evaluate. It notes the weights and buffers after each step."""

    seen: list

    @classmethod
    def test(cls, cfg, model, evaluators=None):
        return {}

    def after_step(self):
        self.seen.append({n: v.clone() for n, v in self.model.model.state_dict().items()})
        super().after_step()
        if self.iter + 1 == self.end:
            raise KeyboardInterrupt  # nothing is done after the checkpoint


def train_here(folder, start, end):
    """Iterations of a run of 4, from the last checkpoint; what it saw, and its checkpoint."""
    cfg = tiny_transformers_cfg("rt_detr_v2")  # it has batch norm
    cfg.DATASETS.TRAIN, cfg.DATASETS.TEST = ("coins_train",), ()
    cfg.SOLVER.IMS_PER_BATCH, cfg.SOLVER.MAX_ITER, cfg.SOLVER.CHECKPOINT_PERIOD = 2, 4, 2
    cfg.TRANSFORMERS.EMA_DECAY, cfg.TRANSFORMERS.EMA_TAU = 0.9, 2.0
    cfg.OUTPUT_DIR = str(folder)
    seed_all_rng(start)
    trainer = Quiet(cfg)
    trainer.seen, trainer.end = [], end
    trainer.resume_or_load(resume=True)
    assert trainer.start_iter == start
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    file = folder / f"model_{end - 1:07d}.pth"
    return trainer.seen, torch.load(file, weights_only=True)["model"]


@pytest.mark.slow
def test_the_average_is_resumed_and_is_the_one_of_the_formula(coins, tmp_path):
    seen, straight = train_here(tmp_path / "straight", 0, 4)
    train_here(tmp_path / "resumed", 0, 2)
    _, resumed = train_here(tmp_path / "resumed", 2, 4)
    assert straight.keys() == resumed.keys()
    assert all(torch.equal(resumed[name], straight[name]) for name in straight)
    first, *others = seen
    average = dict(first)
    for n, weights in enumerate(others, start=2):
        decay = 0.9 * (1 - math.exp(-n / 2))
        for name, value in weights.items():
            is_float = value.is_floating_point()
            average[name] = decay * average[name] + (1 - decay) * value if is_float else value
    for name, value in average.items():
        torch.testing.assert_close(straight[f"ema.module.{name}"], value)
