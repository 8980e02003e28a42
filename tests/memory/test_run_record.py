# Copyright (c) the d2_memfit developers.
"""Records of runs on disk: whole, torn, foreign, of another device, or out of reach."""

import json
import os
from dataclasses import asdict, replace

import pytest
import torch

from d2_memfit.memory import RunRecord, device_and_software, keep_record, records_here
from d2_memfit.memory import run_record as module

CPU = torch.device("cpu")
RECORD = RunRecord(
    date="2026-11-24 13:05:59",
    here=device_and_software(CPU),
    ranks=1,
    family="f",
    settings={"MEMFIT.BUDGET_GB": None, "MEMFIT.CHECKPOINT.MODULES": ["backbone"]},
    iterations=5,
    micro_batch=[2, 320, 534, 17],
    had_errors=False,
    allocated_bytes=2**30,
    reserved_bytes=2**30,
    outside_bytes=None,
    expandable_segments=False,
    predicted_gb=[1.0, 1.1, 0.4],
)


def test_a_kept_record_is_read_again():
    keep_record(RECORD)
    assert list(records_here(CPU)) == [RECORD]


def test_the_folder_is_in_the_users_cache(monkeypatch, tmp_path):
    monkeypatch.delenv("D2_MEMFIT_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path))
    keep_record(RECORD)
    assert len(list((tmp_path / ".cache" / "d2_memfit").glob("run_*.json"))) == 1


@pytest.mark.parametrize("key", ["d2_memfit", "torch", "device", "memory_mb", "cores"])
def test_another_device_or_software_has_its_own_records(key):
    keep_record(replace(RECORD, here={**RECORD.here, key: "another"}))
    assert not list(records_here(CPU))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        "{}",
        json.dumps(asdict(RECORD))[:-40],
        json.dumps({**asdict(RECORD), "of_a_later_version": 1}),
        json.dumps({**asdict(RECORD), "allocated_bytes": "1"}),
        json.dumps({**asdict(RECORD), "allocated_bytes": True}),
        json.dumps({**asdict(RECORD), "allocated_bytes": -1}),
        json.dumps({**asdict(RECORD), "outside_bytes": 1e300}),
        json.dumps({**asdict(RECORD), "micro_batch": [1, 2]}),
        json.dumps({**asdict(RECORD), "micro_batch": [1, 2, 3, None]}),
        json.dumps({**asdict(RECORD), "settings": []}),
        "[" * 100_000,
        "\udcff".encode(errors="surrogateescape"),
    ],
)
def test_what_is_no_record_is_left_out(records_of_runs, text, alarm):
    records_of_runs.mkdir(parents=True)
    data = text if isinstance(text, bytes) else text.encode()
    (records_of_runs / "run_1.json").write_bytes(data)
    (records_of_runs / "run_2.json").mkdir()
    os.mkfifo(records_of_runs / "run_3.json")
    keep_record(RECORD)
    assert list(records_here(CPU)) == [RECORD]


def test_no_folder_and_a_file_in_its_place_have_no_records(records_of_runs):
    assert not list(records_here(CPU))
    records_of_runs.parent.mkdir(exist_ok=True)
    records_of_runs.write_text("")
    assert not list(records_here(CPU))
    with pytest.raises(FileExistsError):
        keep_record(RECORD)


@pytest.mark.skipif(os.getuid() == 0, reason="root may read every folder")
def test_a_folder_that_may_not_be_read_has_no_records(records_of_runs):
    keep_record(RECORD)
    records_of_runs.chmod(0)
    try:
        assert not list(records_here(CPU))
    finally:
        records_of_runs.chmod(0o700)


def test_the_oldest_records_go(monkeypatch):
    monkeypatch.setattr(module, "_MOST_RECORDS", 3)
    for second in range(5):
        keep_record(replace(RECORD, date=f"2026-11-24 13:05:0{second}"))
    assert [record.date[-1] for record in records_here(CPU)] == ["2", "3", "4"]
