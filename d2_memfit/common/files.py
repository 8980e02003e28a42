# Copyright (c) the d2_memfit developers.
"""Atomic writes that never replace a user's file, and a lock on a folder.

A folder with outputs has a hidden file with a line for each output: its name, its size, and the
time of its last change. A file that matches its line was written here and has not been changed. No
other file is replaced.
"""

import contextlib
import errno
import logging
import os
import socket
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, Any, Optional, Union

import yaml
from detectron2.utils.file_io import PathManager

from ..errors import ConfigError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

__all__ = ["LEFTOVERS", "FolderLock", "is_file", "is_local", "temporary_name", "whole_file"]
__all__ += ["check_outputs", "check_run_folder", "is_config_dump", "output_file"]

logger = logging.getLogger(__name__)

_Path = Union[str, "os.PathLike[str]"]
_Test = Callable[[str], bool]

LEFTOVERS = "*.memfit_tmp"  # files of processes that were killed while writing

_NOTES = ".d2_memfit"
_MOST_BYTES = 2**26  # read of the notes, from their end

_REFUSED = (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS)
_said: set[int] = set()


def is_local(path: str) -> bool:
    """Whether a path is on this machine, and not of an iopath handler such as ``s3://``."""
    return "://" not in path


def is_file(path: str) -> bool:
    """Whether a path is known to be a file, without a download.

    It is False for ``http://`` and ``detectron2://``, whose iopath handlers cannot tell.
    """
    try:
        return bool(PathManager.isfile(path))
    except NotImplementedError:
        return False


@contextlib.contextmanager
def whole_file(path: _Path, mode: str = "wb") -> Iterator[IO[Any]]:
    """Open a local file for writing. It replaces an older one when it is completely on disk.

    Until then it has another name, which matches :data:`LEFTOVERS`. After an error it is removed,
    and the older file stays.

    Raises:
        OSError: it could not be written, for example on a full disk.
    """
    path = os.fspath(path)
    temporary = temporary_name(path)
    try:
        with open(temporary, mode) as f:
            yield f
            f.flush()
            _flush_to_disk(f.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.remove(temporary)
        raise
    with contextlib.suppress(OSError):  # some network file systems do not open folders
        folder = os.open(os.path.dirname(path) or ".", os.O_RDONLY)
        try:
            _flush_to_disk(folder)
        finally:
            os.close(folder)


@contextlib.contextmanager
def output_file(path: _Path, mode: str = "wb") -> Iterator[IO[Any]]:
    """Open a file as :func:`whole_file` does, make its folder, and note that d2_memfit wrote it.

    Raises:
        ConfigError: it could not be written, for example on a full disk.
    """
    try:
        os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
        with whole_file(path, mode) as file:
            yield file
            file.flush()
            with open(_notes_of(path), "ab") as notes:
                notes.write(b"\n%s\n" % _note(path, file.name))
    except (OSError, RuntimeError) as e:
        error = e.__context__ if type(e) is RuntimeError else e  # torch.save raises another one
        if not isinstance(error, OSError):
            raise
        raise ConfigError(f"{path} cannot be written ({error.strerror or error})") from e


def check_outputs(
    paths: Iterable[_Path], inputs: Iterable[_Path] = (), is_ours: Optional[_Test] = None
) -> None:
    """Check the outputs of a command, before anything is done.

    Args:
        inputs: the files that the command reads.
        is_ours: whether a file may be replaced. The default is one that :func:`output_file` wrote
            and nobody has changed.

    Raises:
        ConfigError: an output would replace another file, or cannot be written.
    """
    names = [os.fspath(path) for path in paths]
    notes = {file: _read_notes(file) for file in set(map(_notes_of, names))}
    used = {_identity(file): file for file in (*inputs, *notes)}
    replaced = []
    for path in names:
        folder = next(p for p in Path(path).absolute().parents if os.path.lexists(p))
        key, problem = _identity(path), ""
        if key in used:
            problem = f"is the file {used[key]}, which this command reads or writes too"
        elif not (folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)):
            problem = f"cannot be written: {folder} is not a folder that you may write to"
        elif special := [file for file in (path, _notes_of(path)) if _is_special(file)]:
            problem = f"needs a file at {special[0]}, but a folder, link, pipe or device is there"
        elif os.path.exists(path):
            replaced.append(path)
            if not (is_ours(path) if is_ours else _note(path, path) in notes[_notes_of(path)]):
                problem = "exists, but d2_memfit did not write it, or it was changed since"
        if problem:
            raise ConfigError(f"the output {path} {problem}: move it, or name another")
        used[key] = path
    if replaced and not is_ours:
        logger.warning("%d earlier outputs are replaced, such as %r", len(replaced), replaced[0])


def check_run_folder(folder: str, inputs: Iterable[_Path] = ()) -> None:
    """Check OUTPUT_DIR, where a training replaces configs, and appends to logs.

    Raises:
        ConfigError: a config there was not written by a training, a log is an input, or the folder
            cannot be written.
    """
    if folder and is_local(folder):
        names = ("config.yaml", "detectron2_config.yaml", "log.txt", "metrics.json")
        files = [os.path.join(folder, name) for name in names]
        check_outputs(files[:2], (), is_config_dump)
        check_outputs(files[2:], inputs, os.path.exists)


def is_config_dump(path: str) -> bool:
    """Whether a file is a complete config, as Detectron2 writes it."""
    with open(path, errors="replace", newline="") as file:
        text = file.read(2**20)  # dumps are much shorter
    if "\nVIS_PERIOD: " not in text and not ("_target_: " in text and "\ntrain:" in text):
        return False  # it is not complete
    try:
        node = yaml.compose(text, yaml.SafeLoader)  # which makes no objects
        return text in (yaml.serialize(node), yaml.serialize(node, allow_unicode=True, width=9999))
    except (yaml.YAMLError, ValueError, RecursionError):
        return False


def _identity(path: _Path) -> Any:
    """A value that is the same for all names of a file."""
    return os.stat(path)[1:3] if os.path.exists(path) else os.path.realpath(path)


def _is_special(path: str) -> bool:
    return os.path.lexists(path) and (os.path.islink(path) or not os.path.isfile(path))


def _notes_of(path: _Path) -> str:
    return os.path.join(os.path.dirname(path), _NOTES)


def _note(path: _Path, file: str) -> bytes:
    """The line about an output, whose content is now in ``file``."""
    found = os.stat(file)
    return repr((os.path.basename(path), found.st_size, found.st_mtime_ns)).encode()


def _read_notes(file: str) -> set[bytes]:
    if not os.path.isfile(file):
        return set()
    with open(file, "rb") as notes:
        notes.seek(-min(os.path.getsize(file), _MOST_BYTES), os.SEEK_END)
        return set(notes.read(_MOST_BYTES).splitlines())


def temporary_name(path: str) -> str:
    """The name of a file while this process writes it."""
    return f"{path}.{socket.gethostname()}.{os.getpid()}{LEFTOVERS[1:]}"


def _flush_to_disk(descriptor: int) -> None:
    try:
        os.fsync(descriptor)
    except OSError as e:
        if e.errno not in _REFUSED:
            raise
        if e.errno not in _said:
            _said.add(e.errno)
            logger.warning(
                "The file system refuses fsync (%s): files survive the end of this process, but "
                "may be lost if the machine stops",
                e,
            )


class FolderLock:
    """A lock on a folder: a locked file in it, which names host and process.

    The operating system releases the lock when the process ends, however it ends. The same process
    can take it again. On file systems without locks it does nothing.

    Args:
        folder: an existing local folder.
        is_shared: whether other processes may have the lock too, if they share it.

    Raises:
        ConfigError: another process has the lock. The message names that process.
    """

    FILE_NAME = "run.lock"

    def __init__(self, folder: str, is_shared: bool = False) -> None:
        self._file: Optional[IO[str]] = None
        path = os.path.join(folder, self.FILE_NAME)
        file = open(path, "a+")  # noqa: SIM115
        try:
            if fcntl is not None:
                kind = fcntl.LOCK_SH if is_shared else fcntl.LOCK_EX
                fcntl.lockf(file, kind | fcntl.LOCK_NB)
        except OSError as e:
            file.seek(0)
            owner = file.read().strip() or "another process"
            file.close()
            if e.errno in (errno.EACCES, errno.EAGAIN):
                raise ConfigError(
                    f"OUTPUT_DIR {folder} is in use by {owner}. End that run first, or name "
                    "another OUTPUT_DIR"
                ) from None
            return
        if not is_shared:
            file.truncate(0)
            file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
            file.flush()
        self._file = file

    def release(self) -> None:
        if self._file is not None:
            self._file.close()
        self._file = None
