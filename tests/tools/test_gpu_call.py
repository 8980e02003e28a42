# Copyright (c) the d2_memfit developers.
"""A rehearsal of the call on a machine with a card, on the made-up one."""

import json
import xml.etree.ElementTree as ET

import gpu_call
import pytest

pytestmark = pytest.mark.slow


def test_a_rehearsal_leaves_records_tests_and_a_log_and_goes_on_later(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_call, "FOLDER", tmp_path)
    assert gpu_call.run(tmp_path / "out", 570, rehearse=True) == 0
    (suite,) = ET.parse(tmp_path / "out" / "tests.xml").getroot()
    assert int(suite.get("tests")) > 0
    assert suite.get("failures") == suite.get("errors") == suite.get("skipped") == "0"
    file = tmp_path / "out" / "measured.jsonl"
    found = {record["item"]: record for record in map(json.loads, file.open())}
    assert found["device"]["device"] == "Made-up"
    assert len(found) > 1
    assert not [record for record in found.values() if "error" in record]
    assert "estimated / measured" in (tmp_path / "out" / "log.txt").read_text()
    file.rename(tmp_path / file.name)
    assert gpu_call.run(tmp_path / "again", 60, rehearse=True) == 0
    assert (tmp_path / "again" / file.name).read_text() == (tmp_path / file.name).read_text()
