# Copyright (c) the d2_memfit developers.
"""Files that are none, files that would take all memory, and fields that are not what they were."""

import json
import os
from dataclasses import dataclass
from typing import Any, Optional

import pytest
import torch

from d2_memfit.common.reading import (
    check_fields,
    checked,
    load_fields,
    load_json,
    load_yaml,
)
from d2_memfit.errors import DataError

GB = 2**30


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (os.mkfifo, "it is not a file"),
        (lambda path: path.mkdir(), "it is not a file"),
        (lambda path: path.symlink_to(path), "Too many levels of symbolic links"),
        (lambda path: None, "No such file or directory"),
    ],
)
def test_what_is_no_file_is_told_and_not_opened(tmp_path, make, why, alarm):
    path = tmp_path / "f"
    make(path)
    with pytest.raises(DataError) as e:
        checked(path, "--input ")
    assert str(e.value) == f"--input {path} cannot be read ({why})"


@pytest.mark.parametrize("name", ["a\0b", "x" * 1000, "a\ud800"])
def test_names_that_no_file_can_have(name):
    with pytest.raises(DataError, match="cannot be read"):
        checked(name)


@pytest.mark.skipif(os.getuid() == 0, reason="root may read every file")
def test_a_file_that_may_not_be_read_is_told(tmp_path):
    (tmp_path / "f").touch(0)
    with pytest.raises(DataError, match="permission denied"):
        checked(tmp_path / "f")


def test_a_file_and_an_address_are_themselves(tmp_path):
    (tmp_path / "f").touch()
    (tmp_path / "link").symlink_to("f")
    assert checked(tmp_path / "link") == str(tmp_path / "link")
    assert checked("s3://bucket/f") == "s3://bucket/f"


@pytest.mark.parametrize(
    "text",
    ["a: *b", "a: &x 1\nb: &x 2", "a: 1\n---\nb: 2", "a: !!python/name:os.system", "a: 2001-99-99"],
)
def test_other_faults_of_yaml_are_one_line(tmp_path, text):
    (tmp_path / "f.yaml").write_text(text)
    with pytest.raises(DataError, match=r"f\.yaml is not valid YAML \([^\n]+\)$"):
        load_yaml(tmp_path / "f.yaml")


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"[" * 100_000, "maximum recursion depth"),
        (b'{"a": ', "Expecting value"),
        (b"\xff", "can't decode byte 0xff"),
        (b"\xef\xbb\xbf{}", "Unexpected UTF-8 BOM"),
    ],
)
def test_faults_of_json_are_one_line(tmp_path, content, why):
    (tmp_path / "f.json").write_bytes(content)
    with pytest.raises(DataError) as e:
        load_json(tmp_path / "f.json", "dataset x: ")
    assert str(e.value).startswith(f"dataset x: {tmp_path}/f.json is not valid JSON (")
    assert why in str(e.value)


HINTS = {
    "n": int,
    "x": float,
    "t": str,
    "pair": tuple[float, float],
    "rows": list[dict[str, int]],
    "maybe": Optional[list[float]],
    "any": Any,
    "tensor": torch.Tensor,
}
GOOD = {
    "n": 1, "x": 1, "t": "", "pair": [1, 2.5], "rows": [{"a": 1}, {}], "maybe": None, "any": None,
    "tensor": torch.ones(1), "more": 1,
}  # fmt: skip


def test_fields_of_the_right_types_are_good():
    check_fields(GOOD, HINTS, "f")
    check_fields({**GOOD, "maybe": [1, 2.5], "pair": (0.0, 0)}, HINTS, "f")


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("n", 1.0, "n must be an integer, got 1.0"),
        ("n", True, "n must be an integer, got True"),
        ("n", 10**400, "n must be an integer, got 1000"),
        ("x", float("nan"), "x must be a finite number, got nan"),
        ("x", float("-inf"), "x must be a finite number, got -inf"),
        ("x", "1", "x must be a finite number, got '1'"),
        ("t", ["a" * 200], "t must be a text, got ['aaa"),
        ("pair", [1, 2, 3], "pair must be tuple[float, float], got [1, 2, 3]"),
        ("pair", [1, None], "pair must be tuple[float, float], got [1, None]"),
        ("pair", 7, "pair must be tuple[float, float], got 7"),
        ("rows", [{"a": "1"}], "rows must be list[dict[str, int]], got [{'a': '1'}]"),
        ("rows", {}, "rows must be list[dict[str, int]], got {}"),
        ("maybe", [None], "maybe must be "),
        ("tensor", [1], "tensor must be <class 'torch.Tensor'>, got [1]"),
    ],
)
def test_a_field_of_another_type_is_named(field, value, message):
    with pytest.raises(DataError) as e:
        check_fields({**GOOD, field: value}, HINTS, "f, line 3")
    assert str(e.value).startswith(f"f, line 3: {message}")
    assert len(str(e.value)) < 200


@pytest.mark.parametrize("values", [{"n": 1}, [], None, 7, "n"])
def test_a_field_that_is_missing_is_named(values):
    with pytest.raises(DataError, match=r"^f: the field [nx] is missing$"):
        check_fields(values, HINTS, "f")


@dataclass
class Pair:
    one: int
    other: str = "x"


def test_a_dataclass_is_made_of_its_fields():
    assert load_fields(Pair, {"one": 1}, "f") == Pair(1)
    for values, message in (
        ({"other": "y"}, "f: the field one is missing"),
        ([1], "f: the field one is missing"),
        ({"one": 1, "other": 2}, "f: other must be a text, got 2"),
        ({"one": 1, "more": 2}, "f: there is no field more"),
    ):
        with pytest.raises(DataError) as e:
            load_fields(Pair, values, "f")
        assert str(e.value) == message


@pytest.mark.slow
def test_json_of_the_length_of_a_dataset_is_read(tmp_path):
    """Bounds are for configs: there are datasets of gigabytes."""
    values = {"a": [[i] * 3 for i in range(200_000)]}
    (tmp_path / "f.json").write_text(json.dumps(values))
    assert load_json(tmp_path / "f.json") == values
