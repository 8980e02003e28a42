# Copyright (c) the d2_memfit developers.
"""The processes and records of `d2-memfit measure-gpu`; tests/gpu measures items."""

import json
import subprocess
import sys
import time
from functools import partial
from subprocess import PIPE
from types import SimpleNamespace

import pytest
from made_up_card import made_up_card

from d2_memfit import measure
from d2_memfit.common.errors import ConfigError
from d2_memfit.measure import ITEMS, measure_gpu, measure_item
from d2_memfit.memory import enforce_budget

GB = 2**30
RECORD = {"device": "Some Card", "measured_bytes": 2 * GB, "estimated_bytes": 3 * GB}
SAY = f"print('of a library'); print({json.dumps(json.dumps(RECORD))})"


@pytest.fixture
def processes(monkeypatch):
    """Code by item, which a process runs in place of the item, and the items that were started."""

    def start(name, *_):
        started.append(name)
        command = [sys.executable, "-c", f"if input(): {code.get(name, SAY)}"]
        return subprocess.Popen(command, stdin=PIPE, stdout=PIPE, stderr=PIPE, text=True)

    code, started = {}, []
    monkeypatch.setattr(measure, "_start", start)
    return code, started


def records(file):
    return {record["item"]: record for record in map(json.loads, file.open())}


def test_each_item_has_a_process_and_a_record_and_is_measured_once(prose, processes, tmp_path):
    _, started = processes
    file = tmp_path / "new" / "card.jsonl"
    run = partial(measure_gpu, "cuda:0", 60, file)
    *_, table = run(items="images")
    assert [*records(file)] == started == [item for item in ITEMS if "images" in item]
    prose(table)
    started.clear()
    *_, table = run()
    assert "device" in started
    assert not any("images" in item for item in started)
    assert sorted(records(file)) == sorted(ITEMS)


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "status -11: "),
        ("raise ValueError('of CUDA')", "ValueError: of CUDA"),
        ("import time; time.sleep(600)", "it was ended after 3 s"),
    ],
)
def test_what_goes_wrong_leaves_the_other_items(code, error, processes, tmp_path, monkeypatch):
    if "600" in code:
        monkeypatch.setattr(measure, "_MOST_SECONDS", 3)
    processes[0][ITEMS[2]] = code
    lines = [*measure_gpu("cuda:0", 60, tmp_path / "card.jsonl")]
    found = records(tmp_path / "card.jsonl")
    assert error in found[ITEMS[2]]["error"]
    assert any(error in line for line in lines)
    assert all("error" not in found[item] for item in ITEMS if item != ITEMS[2])


def test_at_the_time_limit_the_item_is_ended_and_measured_next_time(
    processes, tmp_path, monkeypatch
):
    def now():  # with ITEMS[3], of which the next one starts ahead, 1000 seconds are over
        return time.monotonic() + 1000 * (len(started) > 4)

    code, started = processes
    file = tmp_path / "card.jsonl"
    code[ITEMS[3]] = "import time; time.sleep(600)"
    with monkeypatch.context() as patches:
        patches.setattr(measure, "time", SimpleNamespace(monotonic=now))
        [*measure_gpu("cuda:0", 1001, file)]
    assert [*records(file)] == [*ITEMS[:3]]
    code.clear()
    started.clear()
    [*measure_gpu("cuda:0", 60, file)]
    assert started == [*ITEMS[3:]]


def test_a_device_that_does_not_answer_is_an_error_and_has_no_record(prose, processes, tmp_path):
    processes[0]["device"] = "raise RuntimeError('Found no NVIDIA driver')"
    with pytest.raises(ConfigError, match="cuda:0") as e:
        [*measure_gpu("cuda:0", 60, tmp_path / "card.jsonl")]
    prose(str(e.value))
    assert not (tmp_path / "card.jsonl").exists()


def test_a_file_has_records_of_one_card(processes, tmp_path):
    file = tmp_path / "card.jsonl"
    file.write_text(json.dumps({"item": "device", "device": "Another Card"}) + '\n{"item": "cut')
    with pytest.raises(ConfigError, match="Another Card"):
        [*measure_gpu("cuda:0", 60, file)]


@pytest.mark.slow
def test_a_batch_that_does_not_fit_is_split_and_has_the_loss_of_its_halves():
    (name,) = (item for item in ITEMS if item.endswith(", recovery"))
    with made_up_card():
        try:
            record = measure_item(name, "cuda:0", small=True)
        finally:
            enforce_budget(None, "cuda:0")
    assert record["ooms"] >= 1
    assert record["loss_under_limit"] == pytest.approx(record["loss"], rel=1e-5)
