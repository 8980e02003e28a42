# Copyright (c) the d2_memfit developers.
"""A file that exists is whole: what is written, flushed and renamed, in which order."""

import errno
import os

import pytest

from d2_memfit.common.files import temporary_name, whole_file


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


def test_while_a_file_is_written_the_older_one_stays(tmp_path):
    file = tmp_path / "file"
    file.write_text("older")
    with whole_file(file, "w") as f:
        f.write("new")
        f.flush()
        assert file.read_text() == "older"
    assert file.read_text() == "new"
