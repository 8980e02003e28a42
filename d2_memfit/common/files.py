# Copyright (c) the d2_memfit developers.
"""Atomic writing of files, and a lock on a folder."""

import contextlib
import errno
import logging
import os
import socket
from collections.abc import Iterator
from typing import IO, Any, Optional, Union

from detectron2.utils.file_io import PathManager

from ..errors import ConfigError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

__all__ = ["LEFTOVERS", "FolderLock", "is_file", "is_local", "temporary_name", "whole_file"]

logger = logging.getLogger(__name__)

LEFTOVERS = "*.memfit_tmp"  # of processes that were killed while they wrote

_REFUSED = (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS)
_said: set[int] = set()


def is_local(path: str) -> bool:
    """Whether a path is on this machine, and not of an iopath handler such as ``s3://``."""
    return "://" not in path


def is_file(path: str) -> bool:
    """Whether a path is known to be a file, without a download.

    The iopath handlers of ``http://`` and ``detectron2://`` cannot say.
    """
    try:
        return bool(PathManager.isfile(path))
    except NotImplementedError:
        return False


@contextlib.contextmanager
def whole_file(path: Union[str, os.PathLike[str]], mode: str = "wb") -> Iterator[IO[Any]]:
    """Open a local file for writing; it replaces an older one once it is completely on disk.

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
    """A lock on a folder, by a file in it that names host and process.

    The operating system frees it when the process ends, in any way. The same process can take it
    again. On file systems without locks it does nothing.

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
