# Copyright (c) the d2_memfit developers.
"""Files that are none, files that would take all memory, and fields that are not what they were."""

import json
import os
import resource
import socket
import string
import time
from dataclasses import dataclass
from typing import Any, Optional

import pytest
import torch
import yaml
from forks import run_forked

from d2_memfit.common.reading import (
    SafeLoader,
    check_fields,
    checked,
    load_fields,
    load_json,
    load_yaml,
)
from d2_memfit.config import load_cfg
from d2_memfit.errors import ConfigError, DataError

GB = 2**30


def make_socket(path):
    with socket.socket(socket.AF_UNIX) as s:
        s.bind(str(path))


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (os.mkfifo, "it is a pipe"),
        (make_socket, "it is a socket"),
        (lambda path: path.symlink_to("/dev/zero"), "it is a device"),
        (lambda path: path.mkdir(), "it is a folder"),
        (lambda path: path.symlink_to(path), "Too many levels of symbolic links"),
        (lambda path: None, "No such file or directory"),
    ],
)
def test_what_is_no_file_is_told_and_not_opened(tmp_path, monkeypatch, make, why, alarm):
    monkeypatch.chdir(tmp_path)  # the name of a socket must be short
    path = tmp_path / "f"
    make(path.relative_to(tmp_path) if make is make_socket else path)
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


def tower(item, lines=9, times=9):
    """Each line stands for the one before ``times`` times: 9**9 values in a kilobyte."""
    names = string.ascii_lowercase[: lines + 1]
    text = f"a: &a {item}\n"
    return text + "".join(
        f"{name}: &{name} [{','.join([f'*{below}'] * times)}]\n"
        for below, name in zip(names, names[1:])
    )


BOMBS = {
    "aliases": tower("[lol, lol]"),
    "merged mappings": tower("{k: 1}").replace("[*", "\n  <<: [*"),
    "an alias of itself": "a: &a [*a]",
    "an alias within itself": "a: &a\n  b: {c: [1, *a]}",
    "brackets": "[" * 200_000,
    "mappings": "{a: " * 200_000,
    "lists in lists": "- " * 200_000,
    "many values": f"[{'a,' * 400_000}]",
    "a number of base 60": f"a: 1{':1' * 400_000}",
    "a number": f"a: {'9' * 400_000}",
    "a long text": f"a: {'x' * 2_000_000}",
}
LARGE = "over 1 MB, 100,000 values, 10,000 by aliases, or 100 levels"


@pytest.mark.parametrize("name", BOMBS)
def test_a_small_file_that_would_take_minutes_or_all_memory_is_refused_at_once(tmp_path, name):
    file = tmp_path / "bomb.yaml"
    file.write_text(BOMBS[name])
    start = time.process_time()
    with pytest.raises(DataError) as e:
        load_yaml(file)
    assert str(e.value) == f"{file} is not valid YAML ({LARGE})"
    with pytest.raises(ConfigError, match=LARGE):
        load_cfg(str(file))
    assert time.process_time() - start < 3  # on a busy machine


def test_aliases_may_stand_for_ten_thousand_values():
    hundred = f"a: &a [{','.join('x' * 98)}]\n"  # with the list itself, 99 values
    text = hundred + f"b: [{','.join(['*a'] * 101)}]"
    assert len(yaml.load(text, SafeLoader)["b"]) == 101
    with pytest.raises(yaml.YAMLError, match=LARGE):
        yaml.load(text.replace("x,", "x,x,", 2), SafeLoader)


def test_bounds_leave_alone_what_people_write():
    text = "a: &a {k: 1}\nb: {<<: *a, l: [*a, *a]}\nc: 1:30\nd: 1e-3\n? 7\n: !!set {x}\n"
    expected = yaml.safe_load(text)
    for content in (text, text.encode(), text.encode("utf-16")):
        assert yaml.load(content, SafeLoader) == expected


@pytest.mark.parametrize(
    "text",
    ["a: *b", "a: &x 1\nb: &x 2", "a: 1\n---\nb: 2", "a: !!python/name:os.system", "a: 2001-99-99"],
)
def test_other_faults_of_yaml_are_one_line(tmp_path, text):
    (tmp_path / "f.yaml").write_text(text)
    with pytest.raises(DataError, match=r"f\.yaml is not valid YAML \([^\n]+\)$"):
        load_yaml(tmp_path / "f.yaml")


@pytest.mark.parametrize("base", ["b0.yaml", "[b0.yaml]", "[b1.yaml, b1.yaml, b1.yaml]"])
def test_bases_that_have_no_end(tmp_path, base):
    """A chain of files that each names the next one thrice is read 3**20 times."""
    (tmp_path / "b0.yaml").write_text(f"_BASE_: {base}\n")
    for i in range(1, 21):
        (tmp_path / f"b{i}.yaml").write_text(f"_BASE_: [{', '.join([f'b{i + 1}.yaml'] * 3)}]\n")
    (tmp_path / "b21.yaml").write_text("SEED: 1\n")
    start = time.process_time()
    with pytest.raises(ConfigError, match="its _BASE_ leads back to itself, or too far"):
        load_cfg(str(tmp_path / "b0.yaml"))
    assert time.process_time() - start < 3


def test_values_in_brackets_without_end_are_one_line():
    with pytest.raises(ConfigError, match="a value is nested too deeply"):
        load_cfg("", ["SEED", "not " * 100_000 + "1"])  # yacs evaluates texts


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


@pytest.mark.slow
def test_a_file_larger_than_the_memory_is_one_line(tmp_path):
    file = tmp_path / "large.json"
    with file.open("wb") as f:
        f.truncate(64 * GB)  # without a byte on the disk
    code = f"from d2_memfit.common.reading import load_json\nload_json({str(file)!r})"
    run = run_forked("-c", code, limits=[(resource.RLIMIT_AS, 16 * GB)])
    assert f"DataError: {file} is not valid JSON (it is too large)" in run.stderr


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
