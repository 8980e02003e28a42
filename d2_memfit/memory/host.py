"""The host's RAM: what there is, and what is left."""

from pathlib import Path
from typing import Optional

import psutil

__all__ = ["available_host_bytes"]

_CGROUP = Path("/sys/fs/cgroup")


def available_host_bytes() -> int:
    """RAM that processes can still take without swapping, in bytes.

    In a container it is what its limit leaves (cgroup v2 or v1), which psutil does not know.
    """
    available = psutil.virtual_memory().available
    left = _left_in_cgroup()
    return available if left is None else min(available, left)


def _left_in_cgroup() -> Optional[int]:
    for limit, usage in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        try:
            left = int((_CGROUP / limit).read_text()) - int((_CGROUP / usage).read_text())
        except (OSError, ValueError):  # no such file, or "max"
            continue
        return max(left, 0)
    return None
