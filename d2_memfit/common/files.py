# Copyright (c) the d2_memfit developers.
"""Reading of files that may be damaged, atomic writes that never replace a user's file, a lock."""

import contextlib
import errno
import json
import os
import socket
import zipfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, Any, Optional, Union

import yaml
from detectron2.utils.file_io import PathManager

from .errors import ConfigError, DataError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

__all__ = ["LEFTOVERS", "LOCK", "is_file", "is_local", "lock_folder", "temporary_name"]
__all__ += ["check_outputs", "check_run_folder", "is_config_dump", "output_file", "whole_file"]
__all__ += ["Name", "SafeLoader", "checked", "load_json", "verify_checksums"]

Name = Union[str, "os.PathLike[str]"]

SafeLoader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times as fast, with libyaml

LOCK = "run.lock"  # the file of :func:`lock_folder`
LEFTOVERS = "*.memfit_tmp"  # files of processes that were killed while writing


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


def checked(path: Name, what: str = "") -> str:
    """Return a path if it is a readable file, or not local.

    Args:
        what: the start of the message, such as the option or key that names the file.

    Raises:
        DataError: it is missing, is not a file, or may not be read.
    """
    name = os.fspath(path)
    try:
        if not is_local(name) or (os.path.isfile(name) and os.access(name, os.R_OK)):
            return name
        os.stat(name)
        why = "permission denied" if os.path.isfile(name) else "it is not a file"
    except (OSError, ValueError) as e:  # ValueError: no file can have such a name
        why = getattr(e, "strerror", None) or str(e)
    raise DataError(f"{what}{name} cannot be read ({why})")


def load_json(path: Name, what: str = "") -> Any:
    """Read a JSON file, which may be of an iopath handler.

    Raises:
        DataError: it cannot be read, or is not valid JSON.
    """
    try:
        with PathManager.open(checked(path, what)) as f:
            return json.load(f)
    except (MemoryError, OSError, RecursionError, ValueError) as e:  # of any depth and size
        raise DataError(f"{what}{path} is not valid JSON ({str(e) or 'it is too large'})") from e


def verify_checksums(filename: Name) -> None:
    """Read a ``torch.save`` file once, in small pieces, to verify its checksums.

    Pickle files and PyTorch's format before 1.6 have no checksums.

    Raises:
        zipfile.BadZipFile, or another error of zipfile: the file is damaged.
    """
    if zipfile.is_zipfile(filename):
        with zipfile.ZipFile(filename) as file:
            damaged = file.testzip()
        if damaged is not None:
            raise zipfile.BadZipFile(f"wrong checksum of {damaged}")


@contextlib.contextmanager
def whole_file(path: Name, mode: str = "wb") -> Iterator[IO[Any]]:
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
def output_file(path: Name, mode: str = "wb") -> Iterator[IO[Any]]:
    """Open a file as :func:`whole_file` does, and make its folder.

    Raises:
        ConfigError: it could not be written, for example on a full disk.
    """
    try:
        os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
        with whole_file(path, mode) as file:
            yield file
    except OSError as e:
        raise ConfigError(f"{path} cannot be written ({e.strerror or e})") from e


def check_outputs(
    paths: Iterable[Name],
    inputs: Iterable[Name] = (),
    overwrite: Optional[bool] = None,
    is_ours: Callable[[str], bool] = lambda path: False,
) -> None:
    """Check the outputs of a command, before anything is done.

    Args:
        inputs: the files that the command reads.
        overwrite: whether existing files may be replaced; None if the command has no such option.
        is_ours: whether an existing file may be replaced nevertheless.

    Raises:
        ConfigError: an output would replace another file, or cannot be written.
    """
    used: dict[str, Name] = {os.path.realpath(file): file for file in inputs}
    for path in [os.fspath(path) for path in paths]:
        folder = next(p for p in Path(path).absolute().parents if os.path.lexists(p))
        key, problem, remedy = os.path.realpath(path), "", "move it, or name another"
        if key in used:
            problem = f"is the file {used[key]}, which this command reads or writes too"
        elif not (folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)):
            problem = f"cannot be written: {folder} is not a folder that you may write to"
        elif os.path.islink(path) or (os.path.exists(path) and not os.path.isfile(path)):
            problem = "is a folder, link, pipe or device"
        elif os.path.exists(path) and not (overwrite or is_ours(path)):
            problem, remedy = "exists", remedy + ("" if overwrite is None else ", or --overwrite")
        if problem:
            raise ConfigError(f"the output {path} {problem}: {remedy}")
        used[key] = path


def check_run_folder(folder: str, inputs: Iterable[Name] = ()) -> None:
    """Check OUTPUT_DIR, where a training replaces configs, and appends to logs.

    Raises:
        ConfigError: a config there was not written by a training, a log is an input, or the folder
            cannot be written.
    """
    if is_local(folder):
        names = ("config.yaml", "detectron2_config.yaml", "log.txt", "metrics.json")
        files = [os.path.join(folder, name) for name in names]
        check_outputs(files[:2], is_ours=is_config_dump)
        check_outputs(files[2:], inputs, overwrite=True)


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


def temporary_name(path: str) -> str:
    """The name of a file while this process writes it."""
    return f"{path}.{socket.gethostname()}.{os.getpid()}{LEFTOVERS[1:]}"


def _flush_to_disk(descriptor: int) -> None:
    try:
        os.fsync(descriptor)
    except OSError as e:
        if e.errno not in (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS):  # some file systems refuse
            raise


def lock_folder(folder: str, is_shared: bool = False) -> IO[str]:
    """Lock a folder until the file that is returned is closed: one in it, which names the process.

    The operating system releases the lock when the process ends, however it ends. The same process
    can take it again. On file systems without locks there is none.

    Args:
        folder: an existing local folder.
        is_shared: whether other processes may have the lock too, if they share it.

    Raises:
        ConfigError: another process has the lock. The message names that process.
    """
    file = open(os.path.join(folder, LOCK), "a+")  # noqa: SIM115
    try:
        if fcntl is not None:
            fcntl.lockf(file, (fcntl.LOCK_SH if is_shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except OSError as e:
        if e.errno in (errno.EACCES, errno.EAGAIN):
            file.seek(0)
            raise ConfigError(
                f"OUTPUT_DIR {folder} is in use by {file.read().strip() or 'another process'}. End "
                "that run first, or name another OUTPUT_DIR"
            ) from None
    else:
        if not is_shared:
            file.truncate(0)
            file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
            file.flush()
    return file
