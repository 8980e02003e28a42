# Copyright (c) the d2_memfit developers.
"""That the benchmarks run, with as little as possible; their figures are for people."""

import sys

import psutil
import pytest
from benchmarks import cuts
from benchmarks.common import coins
from benchmarks.peers import speed
from benchmarks.peers.process import run_worker
from benchmarks.peers.report import report
from benchmarks.peers.results import Results
from benchmarks.peers.sides import OURS, PLAIN
from benchmarks.peers.worker import Spec
from tiny import ROOT, run_process

pytestmark = pytest.mark.slow


def benchmark(*arguments):
    command = [sys.executable, "-W", "ignore", ROOT / "tools" / "benchmark.py", *arguments]
    result = run_process(command, timeout_s=600)
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
        [],
        pytest.param(["RetinaNet"], marks=pytest.mark.exhaustive),
        pytest.param(["DETR-like"], marks=pytest.mark.exhaustive),
    ],
)
def test_gradients(others):
    exact = "RPN, every anchor sampled"
    table = benchmark("gradients", exact, *others, "--train", 2)
    cuts = table.pop("")
    assert len(cuts) == 4
    assert set(others) < set(table)
    assert all(float(gap) < 1e-4 for gap in table[exact])


def test_queries():
    sizes = ["--objects", 64, "--mask-size", 32, "--chunk-size", 8, "--size", 900, 900]
    table = benchmark("queries", *sizes, "--masks", 8)
    assert float(table["matching and boxes, 1 image"][2]) > 1
    assert float(table["8 masks of 900 x 900 pixels"][1]) > 0


@pytest.mark.exhaustive
def test_recovery():
    table = benchmark("recovery", "--size", 64, 96, "--rounds", 1)
    assert float(table["split, 1 image"][1]) > 0
    assert float(table["the same after a failure, less the forward thrown away"][1]) > 0


@pytest.mark.exhaustive
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux limits a process")
def test_windows_cut_by_bytes_do_not_fail_where_a_number_of_images_does(tmp_path):
    fixed, by_bytes = cuts.train_sides(tmp_path, iterations=1).values()
    assert fixed["events"]
    assert any("planted" in image["file_name"] for image in fixed["events"][0]["images"])
    assert by_bytes["events"] == []
    assert by_bytes["retried_images"] == 0


@pytest.mark.exhaustive
def test_scales():
    table = benchmark("cuts", "--only", "scales", "--size", 64, "--rounds", 1)
    assert float(table["by bytes"][1]) > 0


@pytest.mark.exhaustive
def test_selective():
    few = [
        *("MODEL.RESNETS.STEM_OUT_CHANNELS", 8, "MODEL.RESNETS.RES2_OUT_CHANNELS", 16),
        *("MODEL.RESNETS.WIDTH_PER_GROUP", 4, "MODEL.FPN.OUT_CHANNELS", 16),
        *("MODEL.ROI_BOX_HEAD.FC_DIM", 32, "MODEL.ROI_MASK_HEAD.CONV_DIM", 16),
        *("MODEL.ROI_HEADS.BATCH_SIZE_PER_IMAGE", 16),
    ]
    arguments = ["--size", 512, 512, "--images", 8, "--rounds", 1]
    table = benchmark("selective", *arguments, *few)
    gb = {name: float(table[name][0]) for name in ("none", "chosen", "all")}
    assert gb["none"] > gb["chosen"] >= gb["all"]
    predicted = {name: float(table[name][1]) for name in gb}
    assert predicted["none"] < predicted["chosen"] < predicted["all"] == 1
    assert all(float(table[name][2]) > 0 for name in gb)


@pytest.mark.exhaustive
def test_race_measures_who_is_there_and_names_who_is_not(tmp_path):
    arguments = ["--only", "memory", "--size", 64, "96", "--images", 2, "--output", tmp_path]
    sides = ["--sides", "Detectron2", "d2_memfit", "Accelerate"]
    command = [sys.executable, "-W", "ignore", ROOT / "tools" / "benchmark.py", "peers"]
    result = run_process([*command, *arguments, *sides])
    assert result.returncode == 0, result.stderr[-4000:]
    measured = {
        line["side"]: line["peak_mib"] for line in Results(tmp_path / "results.jsonl").of("memory")
    }
    assert measured["Detectron2, 2 images at once"] > measured["d2_memfit"] > 0
    says_so = "Accelerate is not installed, and does not race" in result.stdout
    assert says_so != ("Accelerate" in measured)
    for name in measured:
        assert f"| {name} |" in result.stdout


@pytest.mark.exhaustive
def test_sides_take_turns_within_one_run(tmp_path):
    with coins(64, 96) as (dicts, mapper):
        batch = [mapper(d) for d in dicts[:2]]
    results = Results(tmp_path / "results.jsonl")
    speed.measure_time(results, [PLAIN], batch, rounds=2)
    speed.measure_time(results, [PLAIN, OURS], batch, rounds=1)
    speed.measure_time(results, [PLAIN], batch, rounds=1)  # there already
    names = [line["side"] for line in results.times()]
    assert names == ["Detectron2, 2 images at once", speed.ONE_IMAGE, "d2_memfit"]
    assert [line["run"] for line in results.of("time")] == [1, 1, 2, 2, 2]
    assert all(line["seconds_per_image"] > 0 for line in results.times())


def test_side_that_is_limited_dies_and_its_error_is_known(tmp_path):
    spec = Spec("Detectron2", [[(128, 160)] * 2], 2, 1, str(tmp_path / "run"), extra_gb=0.05)
    outcome = run_worker(spec, time_limit_s=120)
    assert outcome.end == "died"
    assert "memory" in outcome.error or "could not create" in outcome.error
    assert outcome.data_gb > 0


@pytest.mark.exhaustive
def test_ranks_that_take_too_long_are_ended(tmp_path):
    spec = Spec("Detectron2", [[(1600, 1600)] * 8] * 2, 8, 1, str(tmp_path / "run"))
    assert run_worker(spec, time_limit_s=8).end == "hung"  # a step takes minutes
    commands = [process.info["cmdline"] for process in psutil.process_iter(["cmdline"])]
    assert not any(str(tmp_path) in word for command in commands for word in command or [])


def test_documented_race_is_that_of_its_data():
    docs = ROOT / "docs"
    assert report(Results(docs / "benchmark.jsonl")) == (docs / "BENCHMARK.md").read_text()
