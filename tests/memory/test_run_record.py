# Copyright (c) the d2_memfit developers.
"""Records of runs on disk: whole, torn, foreign, or missing."""

import json
from dataclasses import asdict

import pytest
import torch

from d2_memfit.errors import DataError
from d2_memfit.memory import RunRecord, device_and_software

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
)


def test_a_written_record_is_read_again(tmp_path):
    RECORD.write(tmp_path / "output")
    assert RunRecord.read(tmp_path / "output") == RECORD


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        json.dumps(asdict(RECORD))[:-40],
        json.dumps({**asdict(RECORD), "of_a_later_version": 1}),
        json.dumps({**asdict(RECORD), "allocated_bytes": "1"}),
        json.dumps({**asdict(RECORD), "allocated_bytes": -1}),
        json.dumps({**asdict(RECORD), "micro_batch": [1, 2]}),
        "[" * 100_000,
        "\udcff".encode(errors="surrogateescape"),
    ],
)
def test_what_is_no_record_is_an_error(text, tmp_path):
    data = text if isinstance(text, bytes) else text.encode()
    (tmp_path / "memfit_peaks.json").write_bytes(data)
    with pytest.raises(DataError):
        RunRecord.read(tmp_path)


def test_a_folder_without_a_record_is_an_error(tmp_path):
    with pytest.raises(DataError):
        RunRecord.read(tmp_path)
