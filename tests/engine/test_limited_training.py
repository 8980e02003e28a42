# Copyright (c) the d2_memfit developers.
"""Real models under a limit that the kernel enforces: plain Detectron2 dies, ours finishes."""

import json
import sys
from pathlib import Path

import pytest
import torch
from forks import run_forked
from tiny import ROOT, relative_difference

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="only Linux limits a process"),
]

# 52 MB of these are what libraries take for themselves when the budget is set.
EXTRA_MB = {"proposal_network": 320, "mask_rcnn": 700}
# The proposal network's losses are means over images. The mask loss is one over all masks.
LARGEST_DIFFERENCE = {"proposal_network": 1e-5, "mask_rcnn": 1e-3}


def train(family, kind, extra_mb, output_dir):
    output_dir.mkdir()
    script = ROOT / "tests" / "limited_training.py"
    return run_forked(script, family, kind, extra_mb, output_dir, timeout_s=300)


def weights(output_dir):
    return torch.load(output_dir / "weights.pth", weights_only=True)


def events(output_dir):
    file = Path(output_dir) / "memfit_oom.jsonl"
    return [json.loads(line) for line in file.open()] if file.exists() else []


@pytest.mark.parametrize(
    "family", ["proposal_network", pytest.param("mask_rcnn", marks=pytest.mark.sweep)]
)
def test_training_under_a_limit_ends_with_the_weights_of_enough_memory(family, tmp_path):
    plain = train(family, "plain", EXTRA_MB[family], tmp_path / "plain")
    assert plain.returncode != 0
    assert "can't allocate memory" in plain.stderr or "could not create" in plain.stderr

    limited = train(family, "split", EXTRA_MB[family], tmp_path / "limited")
    assert limited.returncode == 0, limited.stderr[-4000:]
    assert events(tmp_path / "limited")
    unlimited = train(family, "split", 0, tmp_path / "unlimited")
    assert unlimited.returncode == 0, unlimited.stderr[-4000:]
    assert not events(tmp_path / "unlimited")
    difference = relative_difference(weights(tmp_path / "limited"), weights(tmp_path / "unlimited"))
    print(f"{family}: relative difference of the weights {difference:.1e}")
    assert difference < LARGEST_DIFFERENCE[family]
