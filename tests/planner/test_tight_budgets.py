# Copyright (c) the d2_memfit developers.
"""Budgets without a margin: what a plan refuses cannot run, and the rest is tried."""

import json
import sys

import pytest
from forks import run_forked
from tiny import ROOT

pytestmark = [
    pytest.mark.slow,
    pytest.mark.long,
    pytest.mark.skipif(sys.platform != "linux", reason="only Linux enforces a budget on the CPU"),
]

TIGHT_MB, TOO_LITTLE_MB = 90, 20


def run(kind, folder, *extras_mb):
    script = ROOT / "tests" / "tight_training.py"
    return run_forked(script, kind, folder, *extras_mb, timeout_s=600)


def test_a_job_trains_in_a_tight_budget_and_cannot_in_one_that_is_refused(tmp_path):
    lines = run("plan", tmp_path, TIGHT_MB, TOO_LITTLE_MB).stdout.splitlines()
    tight, refused = map(json.loads, lines[-2:])

    assert tight["fits"]
    assert tight["is_tight"]
    assert tight["least_budget_gb"] <= tight["budget_gb"] < tight["smallest_budget_gb"]
    free = f"{tight['margin']:.0%} headroom"
    assert f"is tight: the job may run, but with less than {free}" in tight["text"]
    assert run("train", tmp_path, TIGHT_MB).returncode == 0
    assert (tmp_path / "model_final.pth").is_file()

    (tmp_path / "model_final.pth").unlink()
    assert not refused["fits"]
    assert not refused["is_tight"]
    assert refused["budget_gb"] < refused["least_budget_gb"] == tight["least_budget_gb"]
    assert "its largest images cannot run" in refused["text"]
    assert run("train", tmp_path, TOO_LITTLE_MB).returncode != 0
    assert not (tmp_path / "model_final.pth").exists()
