# Copyright (c) the d2_memfit developers.
"""Findings in a dataset's files, kept until the files change."""

import contextlib
import json
import os
from pathlib import Path
from typing import Any, Optional

from detectron2.utils.file_io import PathManager

from ..common.files import whole_file

__all__ = ["Remembered", "stamp_of"]

_VERSION = 2  # version of the findings and their format


class Remembered:
    """The file ``OUTPUT_DIR/memfit_data_check.json``, which saves checks when a run starts again.

    It is in OUTPUT_DIR and not with the annotations, whose folder may be read-only or shared.

    Args:
        output_dir: may not exist yet. Nothing is written before :meth:`save`.
    """

    def __init__(self, output_dir: str) -> None:
        self._file = Path(output_dir) / "memfit_data_check.json"
        self._found: dict[str, Any] = {}
        try:
            content = json.loads(self._file.read_text())
            if content["version"] == _VERSION:
                self._found = dict(content["found"])
        except (OSError, ValueError, KeyError, TypeError):
            pass  # missing or damaged: the check runs again

    def get(self, stamp: Optional[str]) -> Optional[Any]:
        """The finding stored under a stamp, or None."""
        return None if stamp is None else self._found.get(stamp)

    def put(self, stamp: Optional[str], found: Any) -> None:
        """Store a finding under a stamp; without a stamp nothing is stored."""
        if stamp is not None:
            self._found[stamp] = found

    def save(self) -> None:
        """Save the findings. An error is ignored and costs a new check the next time."""
        if not self._found:
            return
        with contextlib.suppress(OSError):
            self._file.parent.mkdir(parents=True, exist_ok=True)
            with whole_file(str(self._file), "w") as f:
                json.dump({"version": _VERSION, "found": self._found}, f)


def stamp_of(*paths: Any, **facts: Any) -> Optional[str]:
    """A text that changes when one of the files or folders changes.

    Returns:
        None if one is not local, or if there are none.
    """
    stamps: list[Any] = []
    for path in paths:
        try:
            status = os.stat(PathManager.get_local_path(str(path)) if "://" not in path else path)
        except (OSError, TypeError):
            return None
        stamps.append([str(path), status.st_size, status.st_mtime_ns])
    return None if not stamps else json.dumps([stamps, facts], default=str)
