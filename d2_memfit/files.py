# Copyright (c) the d2_memfit developers.
"""Files that are written as a whole."""

import contextlib
import os
from collections.abc import Iterator
from typing import IO, Any

__all__ = ["is_local", "whole_file"]


def is_local(path: str) -> bool:
    """Whether a path is on this machine, and not of an iopath handler such as ``s3://``."""
    return "://" not in path


@contextlib.contextmanager
def whole_file(path: str, mode: str = "wb") -> Iterator[IO[Any]]:
    """Open a local file for writing; it replaces an older one once it is completely on disk.

    Until then it is ``<path>.tmp``. After an error it is removed, and the older file stays.

    Raises:
        OSError: it could not be written, for example on a full disk.
    """
    beside = f"{path}.tmp"
    try:
        with open(beside, mode) as f:
            yield f
            f.flush()
            os.fsync(f.fileno())
        os.replace(beside, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.remove(beside)
        raise
    with contextlib.suppress(OSError):  # some network file systems do not sync folders
        folder = os.open(os.path.dirname(path) or ".", os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
