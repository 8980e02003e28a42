# Copyright (c) the d2_memfit developers.
"""The host's available RAM."""

from collections.abc import Iterator
from pathlib import Path

import psutil

__all__ = ["available_host_bytes"]

_CGROUPS = Path("/sys/fs/cgroup")
_OWN_CGROUPS = Path("/proc/self/cgroup")


def available_host_bytes() -> int:
    """RAM that processes can still take without swapping, in bytes.

    A container, systemd or Slurm may set limits (cgroup v2 or v1), which psutil does not know. Then
    it is what they leave.
    """
    return min([psutil.virtual_memory().available, *_left_in_cgroups()])


def _left_in_cgroups() -> Iterator[int]:
    """Bytes left in each of this process's cgroups that has a limit, and in those above.

    Cached files count as used, but are dropped when RAM is needed.
    """
    for folder in _own_cgroups():
        for limit, usage, files in (
            ("memory.max", "memory.current", "inactive_file"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ):
            try:
                left = int((folder / limit).read_text()) - int((folder / usage).read_text())
            except (OSError, ValueError):  # no such file, or "max"
                continue
            yield max(left + _statistic(folder, files), 0)


def _statistic(folder: Path, name: str) -> int:
    """One value of a cgroup's memory.stat, in bytes."""
    try:
        lines = (folder / "memory.stat").read_text().splitlines()
        return int(dict(line.split() for line in lines).get(name, 0))
    except (OSError, ValueError):
        return 0


def _own_cgroups() -> Iterator[Path]:
    # Lines such as "0::/user.slice" (v2) and "4:memory:/docker/1f2e" (v1). In a container the path
    # may be the host's, which does not exist here: then the uppermost folder is the container's.
    try:
        lines = _OWN_CGROUPS.read_text().splitlines()
    except OSError:  # not Linux
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        root = _CGROUPS / controllers
        own = root / path.lstrip("/")
        yield from (folder for folder in (own, *own.parents) if folder.is_relative_to(root))
