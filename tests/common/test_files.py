# Copyright (c) the d2_memfit developers.
"""A file that exists is whole, and an output replaces nothing of the user's."""

import errno
import os
import resource

import pytest
from detectron2.config import LazyConfig
from detectron2.config import get_cfg as get_detectron2_cfg
from detectron2.layers import ShapeSpec
from forks import run_forked
from lazy_configs import lazy_config
from tiny import tiny_cfg

from d2_memfit.common.errors import ConfigError
from d2_memfit.common.files import (
    check_outputs,
    check_run_folder,
    is_config_dump,
    output_file,
    temporary_name,
    whole_file,
)


def test_a_file_is_flushed_before_it_is_renamed_and_its_folder_after(tmp_path, monkeypatch):
    events = []

    def fsync(descriptor):
        events.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        if len(events) == 1:
            assert os.fstat(descriptor).st_size == len("text")  # Python's own buffer is empty

    monkeypatch.setattr(os, "fsync", fsync)
    replace = os.replace
    monkeypatch.setattr(os, "replace", lambda a, b: (events.append("rename"), replace(a, b)))
    file = str(tmp_path / "file")
    with whole_file(file, "w") as f:
        f.write("text")
    assert events == [temporary_name(file), "rename", str(tmp_path)]


def test_fsync_that_fails_for_another_reason_is_an_error(tmp_path, monkeypatch):
    def refuse(descriptor):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(OSError, match="Input/output"), whole_file(str(tmp_path / "f"), "w"):
        pass
    assert not list(tmp_path.iterdir())


def test_an_error_while_writing_leaves_the_older_file_alone(tmp_path):
    file = tmp_path / "file"
    file.write_text("older")
    with pytest.raises(TypeError), whole_file(file, "w") as f:
        f.writelines(["half of a new file", None])
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert file.read_text() == "older"


def write(path, text="ours"):
    with output_file(path, "w") as file:
        file.write(text)


def test_an_output_replaces_nothing_unless_it_may(tmp_path):
    output = tmp_path / "new" / "a\nb.yaml"
    check_outputs([output], overwrite=False)
    assert not (tmp_path / "new").exists()
    write(output)
    for overwrite, remedy in ((None, "or name another$"), (False, "another, or --overwrite$")):
        with pytest.raises(ConfigError, match=f"exists: move it.*{remedy}"):
            check_outputs([output], overwrite=overwrite)
    check_outputs([output], overwrite=True)
    check_outputs([output], is_ours=lambda path: path == str(output))
    with pytest.raises(ConfigError, match="which this command reads or writes"):
        check_outputs([output], [output], overwrite=True)


FULL = """
from d2_memfit.common.files import output_file
from d2_memfit.common.errors import exit_on_error

@exit_on_error
def main():
    with output_file("out") as file:
        file.write(bytes(9000))

main()
"""


def test_an_output_for_which_the_disk_has_no_room_is_not_there_and_the_older_one_stays(tmp_path):
    write(tmp_path / "out", "older")
    limits = [(resource.RLIMIT_FSIZE, 8000)]
    result = run_forked("-c", FULL, cwd=tmp_path, limits=limits)
    assert result.stderr == "error: out cannot be written (File too large)\n"
    assert result.returncode == 2
    assert {f.name: f.read_bytes() for f in tmp_path.iterdir()} == {"out": b"older"}


def test_other_errors_in_writing_are_not_about_the_file(tmp_path):
    with pytest.raises(RuntimeError, match="no disk"), output_file(tmp_path / "out"):
        raise RuntimeError("no disk")
    with pytest.raises(ConfigError, match="cannot be written"), output_file("/proc/no"):
        pass
    assert not list(tmp_path.iterdir())


def dump(kind, folder):
    file = folder / "config.yaml"
    if kind == "lazy":
        cfg = lazy_config(names=["täglich"])
        cfg.model.shape = ShapeSpec(channels=3)  # an object of Python, which yaml has a tag for
        cfg.optimizer.names = [f"name {number}" for number in range(99)]
        LazyConfig.save(cfg, str(file))
        assert "!!python" in file.read_text()
    else:
        cfg = get_detectron2_cfg() if kind == "Detectron2" else tiny_cfg()
        cfg.DATASETS.TRAIN = ("täglich", "a: b # c", "'", "1e3", "x" * 200)
        cfg.MODEL.PIXEL_MEAN = cfg.MODEL.PIXEL_STD  # which is written as an alias
        file.write_text(cfg.dump())
    return file


@pytest.mark.parametrize("kind", ["ours", "Detectron2", "lazy"])
def test_a_config_that_a_training_wrote_is_known_from_one_that_was_edited(kind, tmp_path):
    file = dump(kind, tmp_path)
    text = file.read_text()
    check_run_folder(str(tmp_path))
    lines = text.splitlines(keepends=True)
    middle = len(lines) // 2
    others = [
        *("# mine\n" + text, text + "# mine\n", text + "\n", text[:-1], text[: len(text) // 2]),
        "".join([*lines[:middle], "\n", *lines[middle:]]),
        "".join([*lines[:middle], "  # mine\n", *lines[middle:]]),
        text.replace("\n", "\r\n"),
        text.replace("  ", "    "),
        "mine: 1\n",
    ]
    for other in others:
        file.write_bytes(other.encode())
        assert not is_config_dump(str(file))
        with pytest.raises(ConfigError, match=r"config\.yaml exists"):
            check_run_folder(str(tmp_path))
