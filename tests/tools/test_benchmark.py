# Copyright (c) the d2_memfit developers.
"""That the benchmarks run, with as little as possible; their figures are for people."""

import pytest
from forks import run_forked
from tiny import ROOT

pytestmark = pytest.mark.slow


def benchmark(*arguments):
    result = run_forked(ROOT / "tools" / "benchmark.py", *arguments, timeout_s=600)
    assert result.returncode == 0, result.stderr[-4000:]
    lines = [line.split("|")[1:-1] for line in result.stdout.splitlines() if line.startswith("|")]
    return {name.strip(): [cell.strip() for cell in cells] for name, *cells in lines}


@pytest.mark.exhaustive
def test_accumulation():
    table = benchmark("accumulation", "--size", 64, 96, "--steps", 2, "--rounds", 1)
    assert float(table["plain, 2 images"][0]) > float(table["ours, 2 x 1"][0]) > 0


@pytest.mark.parametrize(
    "others",
    [
        pytest.param([], marks=pytest.mark.long),
        pytest.param(["RetinaNet"], marks=pytest.mark.exhaustive),
        pytest.param(["DETR-like"], marks=pytest.mark.exhaustive),
    ],
)
def test_gradients(others):
    exact = "RPN, every anchor sampled"
    table = benchmark("gradients", exact, *others, "--train", 2, "--size", 64, 64)
    cuts = table.pop("")
    assert len(cuts) == 4
    assert set(others) < set(table)
    assert all(float(gap) < 1e-4 for gap in table[exact])


@pytest.mark.exhaustive
def test_recovery():
    table = benchmark("recovery", "--size", 64, 96, "--rounds", 1)
    assert float(table["split, 1 image"][1]) > 0
    assert float(table["the same after a failure, less the discarded forward"][1]) > 0


FEW = [
    *("MODEL.RESNETS.STEM_OUT_CHANNELS", 8, "MODEL.RESNETS.RES2_OUT_CHANNELS", 16),
    *("MODEL.RESNETS.WIDTH_PER_GROUP", 4, "MODEL.FPN.OUT_CHANNELS", 16),
    *("MODEL.ROI_BOX_HEAD.FC_DIM", 32, "MODEL.ROI_MASK_HEAD.CONV_DIM", 16),
    *("MODEL.ROI_HEADS.BATCH_SIZE_PER_IMAGE", 16),
]


@pytest.mark.exhaustive
def test_selective():
    arguments = ["--size", 512, 512, "--images", 8, "--rounds", 1]
    table = benchmark("selective", *arguments, *FEW)
    gb = {name: float(table[name][0]) for name in ("none", "chosen", "all")}
    assert gb["none"] > gb["chosen"] >= gb["all"]
    predicted = {name: float(table[name][1]) for name in gb}
    assert predicted["none"] < predicted["chosen"] < predicted["all"] == 1
    assert all(float(table[name][2]) > 0 for name in gb)
