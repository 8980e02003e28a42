# Copyright (c) the d2_memfit developers.
"""Files that are none, files that would take all memory, and fields that are not what they were."""

from dataclasses import dataclass

import pytest

from d2_memfit.common.errors import DataError
from d2_memfit.common.files import checked, load_fields, load_json


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


@dataclass
class Record:
    n: int
    x: float
    rows: list[dict[str, int]]


GOOD = {"n": 1, "x": 2.5, "rows": [{"a": 1}, {}]}


@pytest.mark.parametrize(
    ("field", "value"),
    [("n", 1.0), ("n", 10**400), ("n", None), ("x", float("nan")), ("rows", [{"a": "1"}])],
)
def test_a_field_that_is_wrong_is_named(field, value):
    assert load_fields(Record, GOOD, "f") == Record(**GOOD)
    with pytest.raises(DataError, match=f"f, line 3: {field} must be ") as e:
        load_fields(Record, {**GOOD, field: value}, "f, line 3")
    assert len(str(e.value)) < 200
    with pytest.raises(DataError, match="n must be"):
        load_fields(Record, [GOOD], "f")
