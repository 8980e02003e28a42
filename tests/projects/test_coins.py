# Copyright (c) the d2_memfit developers.
import subprocess
import sys

import demo
import numpy as np
import pytest
from forks import run_forked
from make_dataset import SPLIT_ROW, find_coins
from skimage import data
from tiny import read_metrics


def test_all_coins_are_found_and_no_coin_is_in_both_halves():
    labels = find_coins(data.coins())
    assert labels.max() == 24
    upper, lower = np.unique(labels[:SPLIT_ROW]), np.unique(labels[SPLIT_ROW:])
    assert set(upper) & set(lower) == {0}
    assert len(upper) == len(lower) == 13


SMALL = ["INPUT.MIN_SIZE_TRAIN", "(64,)", "INPUT.MIN_SIZE_TEST", 64]


@pytest.mark.parametrize(
    ("iterations", "least_ap50", "small"),
    [
        pytest.param(2, 0, SMALL, marks=pytest.mark.slow),
        pytest.param(60, 50, [], marks=pytest.mark.sweep),
    ],
)
def test_the_demo_learns_to_find_coins(
    iterations, least_ap50, small, tmp_path, monkeypatch, capsys
):
    """Half of its iterations; `make demo` has them all. Its processes are forks here."""

    def run(command, check):
        assert check
        result = run_forked(*command[1:], timeout_s=400)
        assert result.returncode == 0, result.stderr[-4000:]

    monkeypatch.setattr(subprocess, "run", run)
    options = ["SOLVER.MAX_ITER", iterations, "SOLVER.STEPS", "()", "TEST.EVAL_PERIOD", 0, *small]
    arguments = ["demo.py", "--output-dir", tmp_path, *options]
    monkeypatch.setattr(sys, "argv", list(map(str, arguments)))
    demo.main()
    (last,) = [m for m in read_metrics(tmp_path) if "bbox/AP50" in m]
    assert last["bbox/AP50"] >= least_ap50
    assert f"box AP50 {last['bbox/AP50']:.1f}" in capsys.readouterr().out
    assert len(list((tmp_path / "predicted" / "pictures").glob("*.png"))) == 16
