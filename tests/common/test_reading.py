# Copyright (c) the d2_memfit developers.
"""Files that are none, and files that cannot be read."""

import pytest

from d2_memfit.common.errors import DataError
from d2_memfit.common.files import checked, load_json
from d2_memfit.memory.readings import RunRecord


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda path: path.mkdir(), "it is not a file"),
        (lambda path: None, "No such file or directory"),
    ],
)
def test_what_is_no_file_is_told_and_not_opened(tmp_path, make, why, alarm):
    path = tmp_path / "f"
    make(path)
    with pytest.raises(DataError) as e:
        checked(path, "--input ")
    assert str(e.value) == f"--input {path} cannot be read ({why})"


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"[" * 100_000, "maximum recursion depth"),
        (b'{"a": ', "Expecting value"),
        (b"\xff", "can't decode byte 0xff"),
    ],
)
def test_faults_of_json_are_one_line(tmp_path, content, why):
    (tmp_path / "f.json").write_bytes(content)
    with pytest.raises(DataError) as e:
        load_json(tmp_path / "f.json", "dataset x: ")
    assert str(e.value).startswith(f"dataset x: {tmp_path}/f.json is not valid JSON (")
    assert why in str(e.value)


def test_a_record_of_another_version_is_told(tmp_path):
    for text in ("{}", "[]", '{"date": 1, "mean": 2}'):
        (tmp_path / "memfit_peaks.json").write_text(text)
        with pytest.raises(DataError, match=r"memfit_peaks.json is not of this version"):
            RunRecord.read(tmp_path)
