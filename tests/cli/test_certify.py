# Copyright (c) the d2_memfit developers.
"""The commands certify, and train with what it wrote."""

import shlex

import pytest
from forks import run_forked
from resumed import coins_cfg

pytestmark = pytest.mark.slow

SUMS = [[6e10, 0.0, 1.5e5, 1e7, 0.0, 0.0]]


@pytest.fixture
def plan(coins, tmp_path):
    """A config whose windows are cut by bytes, and the data of --coco."""
    keys = {"MEMFIT.BUDGET_GB": 64, "MEMFIT.COST_MODEL.BYTES": SUMS, "DATALOADER.NUM_WORKERS": 1}
    cfg = coins_cfg(tmp_path / "out", **keys)
    cfg.SOLVER.MAX_ITER = 4
    cfg.DATASETS.TRAIN = ("mine",)
    file = tmp_path / "plan.yaml"
    file.write_text(cfg.dump())
    return file, ["--coco", "mine", coins / "train.json", coins / "train"]


def run(*words):
    return run_forked("-m", "d2_memfit", *words)


def test_the_next_command_trains_with_the_certificate(plan, tmp_path):
    file, coco = plan
    written = ["--output", tmp_path / "c.pt"]
    result = run("certify", "--config-file", file, *coco, *written, "SOLVER.BASE_LR", "0.001")
    assert result.returncode == 0, result.stderr
    name, *command = shlex.split(result.stdout.splitlines()[-1])
    assert name == "d2-memfit"
    result = run(*command)
    assert result.returncode == 0, result.stderr
    log = (tmp_path / "out" / "log.txt").read_text()
    assert "4 of 4 windows" in log


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--iterations", "0"], "--iterations must be a positive integer, got 0"),
    ],
)
def test_mistakes_are_one_line(plan, words, message):
    file, coco = plan
    result = run("certify", "--config-file", file, *coco, *words)
    assert result.returncode == 2
    assert result.stderr.splitlines()[-1] == f"error: {message}"


def test_training_with_another_file_is_one_line(plan, tmp_path):
    file, coco = plan
    result = run("train", "--config-file", file, *coco, "--certificate", file)
    assert result.returncode == 2
    assert f"--certificate {file} is not a file of d2-memfit certify" in result.stderr
    assert not (tmp_path / "out").exists()


def test_an_evaluation_has_no_certificate(plan):
    file, coco = plan
    result = run("train", "--eval-only", "--config-file", file, *coco, "--certificate", file)
    assert result.returncode == 2
    assert result.stderr.splitlines()[-1].startswith(
        "error: --certificate only works with training"
    )
