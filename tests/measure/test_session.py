# Copyright (c) the d2_memfit developers.
import json
import os
import signal
import time

import pytest
import yaml
from forks import Forked

from d2_memfit.errors import ConfigError
from d2_memfit.measure.jobs import JOBS
from d2_memfit.measure.session import measure_gpu

pytestmark = pytest.mark.slow


def measure(folder, minutes):
    """All that a rehearsal wrote: results, table, and its lines."""
    lines = []
    file = measure_gpu("cpu", minutes, folder, lines.append)
    return json.loads(file.read_text()), file.with_suffix(".md").read_text(), lines


@pytest.mark.exhaustive
def test_a_rehearsal_measures_a_little_of_all(tmp_path):
    results, table, lines = measure(tmp_path, minutes=10)
    assert results["errors"] == {}
    assert set(JOBS) <= set(results)
    records = [record for job in JOBS for record in results[job]]
    assert len(lines) == len(records)
    assert not [record for record in records if "error" in record]
    (machine,) = results["machine"]
    assert machine["rehearsal"]
    assert "A rehearsal on a CPU: these figures are of no card." in table
    for job in ("zoo", "presets"):
        (record,) = results[job]
        assert record["training_error"] == pytest.approx(0, abs=0.01)
        assert record["evaluation_error"] == pytest.approx(0, abs=0.01)
    (recovery,) = results["recovery"]
    assert recovery["oom_events"] >= 1
    assert recovery["micro_batch"] < recovery["images"]
    for plan in results["plans"]:
        assert plan["gb"] == pytest.approx(plan["estimated_gb"], rel=0.01)
        assert plan["micro_batch"] <= plan["images"]
    saved, every, some = results["blocks"]
    assert saved["gb"] > some["gb"] > every["gb"]
    assert some["ActivationCheckpointing"]
    for blocks in results["blocks"]:
        assert blocks["gb"] == pytest.approx(blocks["estimated_gb"], rel=0.01)
    by_bytes, _ = results["crowded"]
    assert by_bytes["oom_events"] == 0
    assert {r["ranks"] for r in results["outside"] if "ranks" in r} == {2, 3}
    (calibration,) = results["calibration"]
    (file,) = tmp_path.glob("*.yaml")
    assert yaml.safe_load(file.read_text()) == calibration
    (picture,) = tmp_path.glob("*.png")
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_what_is_killed_leaves_what_was_measured(tmp_path):
    command = ["-m", "d2_memfit", "measure-gpu", "--device", "cpu", "--output", tmp_path]
    printed = tmp_path / "printed"
    process, end = Forked(command, printed), time.monotonic() + 240
    try:
        while not (printed.exists() and printed.read_text().count("\n") >= 2):
            assert process.poll() is None, printed.read_text()
            assert time.monotonic() < end, printed.read_text()
            time.sleep(0.05)
    finally:
        os.killpg(process.pid, signal.SIGKILL)  # its worker too
    lines = printed.read_text().splitlines()
    assert "  machine: " in lines[0]
    assert "  calibration: " in lines[1]
    (file,) = tmp_path.glob("*.json")
    results = json.loads(file.read_text())
    assert results["machine"][0]["rehearsal"]
    assert results["calibration"]


def test_what_there_was_no_time_for_is_said(tmp_path, monkeypatch):
    few = {job: JOBS[job] for job in ("machine", "plain")}
    monkeypatch.setattr("d2_memfit.measure.session.JOBS", few)
    monkeypatch.setattr("d2_memfit.measure.session._LEAST_SECONDS", 24 * 3600 - 1.0)
    results, table, _ = measure(tmp_path, minutes=24 * 60)  # a second for the first
    assert results["errors"] == {"plain": "there was no time left"}
    assert "Not measured to the end: plain (there was no time left)." in table
    assert len(list(tmp_path.glob("*.png"))) == 1


@pytest.mark.parametrize(
    ("device", "minutes", "error"),
    [
        ("tpu", 1, "--device must be cuda:0, of another number, or cpu, got 'tpu'"),
        ("cpu", 0, "--minutes must be a positive number, got 0"),
        ("cuda:99", 1, "--device cuda:99 cannot be used: status 1: "),
    ],
)
def test_what_cannot_be_measured_is_an_error(device, minutes, error, tmp_path):
    with pytest.raises(ConfigError, match=error):
        measure_gpu(device, minutes, tmp_path)
    assert list(tmp_path.iterdir()) == []
