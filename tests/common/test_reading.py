# Copyright (c) the d2_memfit developers.
"""Files that are none, files that would take all memory, and fields that are not what they were."""

from dataclasses import dataclass, field
from typing import Any, Optional

import pytest

from d2_memfit.common.errors import DataError
from d2_memfit.common.files import checked, load_fields, load_json

GB = 2**30


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
    x: float = 1
    t: str = ""
    pair: tuple[float, float] = (1, 2)
    rows: list[dict[str, int]] = field(default_factory=list)
    maybe: Optional[list[float]] = None
    any: Any = None


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"n": 1.0}, "n must be an integer, got 1.0"),
        ({"n": 10**400}, "n must be an integer, got 1000"),
        ({"n": 1, "x": float("nan")}, "x must be a finite number, got nan"),
        ({"n": 1, "t": ["a" * 200]}, "t must be a text, got ['aaa"),
        ({"n": 1, "pair": [1, 2, 3]}, "pair must be tuple[float, float], got [1, 2, 3]"),
        ({"n": 1, "rows": [{"a": "1"}]}, "rows must be list[dict[str, int]], got [{'a': '1'}]"),
        ({"n": 1, "maybe": [None]}, "maybe must be "),
        ({"n": 1, "more": 2}, "there is no field more"),
        ({"x": 1}, "the field n is missing"),
        (None, "the field n is missing"),
    ],
)
def test_a_field_that_is_wrong_is_named(values, message):
    with pytest.raises(DataError) as e:
        load_fields(Record, values, "f, line 3")
    assert str(e.value).startswith(f"f, line 3: {message}")
    assert len(str(e.value)) < 200


def test_a_dataclass_is_made_of_its_fields():
    values = {"n": 1, "pair": [1, 2.5], "rows": [{"a": 1}, {}], "maybe": [1, 2.5], "any": 7}
    assert load_fields(Record, values, "f") == Record(**values)
