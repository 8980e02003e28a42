# Copyright (c) the d2_memfit developers.
"""What scripts of projects end with: the command that comes next works when it is pasted."""

import pytest
from forks import run_forked
from pasted import paste
from tiny import ROOT

pytestmark = pytest.mark.long

PROJECTS = ROOT / "projects"
SHORT = ["SOLVER.MAX_ITER", 1, "SOLVER.STEPS", "()", "SOLVER.ACCUMULATION_STEPS", 1]
SHORT += ["SOLVER.IMS_PER_BATCH", 1, "DATALOADER.NUM_WORKERS", 0, "TEST.EVAL_PERIOD", 0]


def run(folder, *arguments):
    result = run_forked(*arguments, cwd=folder)
    assert result.returncode == 0, result.stderr[-4000:]
    return result.stdout


def pictures_in(folder):
    return len(list((folder / "predictions" / "pictures").glob("*.*g")))


def test_from_coins_to_a_lazy_config(tmp_path):
    made = run(tmp_path, PROJECTS / "Coins" / "make_dataset.py", "output/coins/dataset")
    paste(made, tmp_path, *SHORT, "OUTPUT_DIR", "trained")
    config = PROJECTS / "ViTDet" / "configs" / "mask_rcnn_fpn_coins.py"
    short = ["train.max_iter=1", "dataloader.train.total_batch_size=1", "train.output_dir=lazy"]
    trained = run(tmp_path, "-m", "d2_memfit", "train", "--config-file", config, *short)
    paste(trained, tmp_path, FOLDER="output/coins/dataset/val")
    assert pictures_in(tmp_path) == 16
