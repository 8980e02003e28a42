# Copyright (c) the d2_memfit developers.
"""Readings of the memory that the process takes of the host and of a device, and what is left."""

import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Union

import psutil
import torch

__all__ = ["PEAK_LAG_BYTES", "DeviceMemory", "ProcessMemory"]
__all__ += ["available_host_bytes", "device_memory", "process_memory"]

# On Linux, the peak of a process may rise by this much after memory was freed.
PEAK_LAG_BYTES = 2**20

_CGROUPS = Path("/sys/fs/cgroup")
_OWN_CGROUPS = Path("/proc/self/cgroup")
# A cgroup's files of its limit and its use, v2 or v1, and the name of its cached files in
# memory.stat. They count as used, but are dropped when RAM is needed.
_CGROUP_FILES = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


@dataclass(frozen=True)
class ProcessMemory:
    """Memory of a process, in bytes; 0 if it has ended, or the system is not Linux."""

    resident_bytes: int  # in RAM
    peak_resident_bytes: int
    anonymous_bytes: int  # of resident_bytes, without pages of files and shared memory
    data_bytes: int  # private and writable, touched or not; limited by RLIMIT_DATA


@dataclass(frozen=True)
class DeviceMemory:
    """Memory of a device that this process takes, in bytes."""

    allocated_bytes: int  # in tensors; on the CPU, the process's RAM
    reserved_bytes: int  # taken from the system; on the CPU, limited by RLIMIT_DATA
    peak_allocated_bytes: int  # since the process began, or since the last reset
    peak_reserved_bytes: int  # on the CPU, the current value


def process_memory(pid: Union[int, str, None] = "self") -> ProcessMemory:
    text = ""
    with suppress(OSError):
        text = Path(f"/proc/{pid}/status").read_text()
    kib = dict(re.findall(r"^(\w+):\s+(\d+) kB", text, re.MULTILINE))
    names = ("VmRSS", "VmHWM", "RssAnon", "VmData")
    return ProcessMemory(*(int(kib.get(name, 0)) * 2**10 for name in names))


def device_memory(device: torch.device) -> DeviceMemory:
    """Current memory use of a device."""
    if device.type == "cuda":
        return DeviceMemory(
            torch.cuda.memory_allocated(device),
            torch.cuda.memory_reserved(device),
            torch.cuda.max_memory_allocated(device),
            torch.cuda.max_memory_reserved(device),
        )
    own = process_memory()
    peak = own.peak_resident_bytes
    return DeviceMemory(own.resident_bytes, own.data_bytes, peak, own.data_bytes)


def available_host_bytes() -> int:
    """RAM that processes can still take without swapping, in bytes.

    A container, systemd or Slurm may set limits (cgroup v2 or v1), which psutil does not know. Then
    it is what they leave in this process's cgroups, and in those above.
    """
    left = [psutil.virtual_memory().available]
    for folder in _own_cgroups():
        for limit, usage, files in _CGROUP_FILES:
            with suppress(OSError, ValueError):  # no such file, or "max"
                free = int((folder / limit).read_text()) - int((folder / usage).read_text())
                stat = (folder / "memory.stat").read_text()
                cached = int(dict(map(str.split, stat.splitlines())).get(files, 0))
                left.append(max(free + cached, 0))
    return min(left)


def _own_cgroups() -> Iterator[Path]:
    # Lines such as "0::/user.slice" (v2) and "4:memory:/docker/1f2e" (v1). In a container the path
    # may be the host's, which does not exist here: then the uppermost folder is the container's.
    lines: list[str] = []
    with suppress(OSError):  # not Linux
        lines = _OWN_CGROUPS.read_text().splitlines()
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers in ("", "memory"):
            root = _CGROUPS / controllers
            own = root / path.lstrip("/")
            yield from (folder for folder in (own, *own.parents) if folder.is_relative_to(root))
