# Copyright (c) the d2_memfit developers.
"""Readings of the memory that the process takes of the host and of a device."""

import ctypes
import re
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional, Union

import torch

__all__ = ["PEAK_LAG_BYTES", "DeviceMemory", "ProcessMemory", "device_memory"]
__all__ += ["process_memory", "used_bytes"]

# On Linux, the peak of a process may rise by this much after memory was freed.
PEAK_LAG_BYTES = 2**20


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
    return ProcessMemory(
        resident_bytes=int(kib.get("VmRSS", 0)) * 2**10,
        peak_resident_bytes=int(kib.get("VmHWM", 0)) * 2**10,
        anonymous_bytes=int(kib.get("RssAnon", 0)) * 2**10,
        data_bytes=int(kib.get("VmData", 0)) * 2**10,
    )


def device_memory(device: torch.device) -> DeviceMemory:
    """Current memory use of a device."""
    if device.type == "cuda":
        return DeviceMemory(
            torch.cuda.memory_allocated(device),
            torch.cuda.memory_reserved(device),
            torch.cuda.max_memory_allocated(device),
            torch.cuda.max_memory_reserved(device),
        )
    process = process_memory()
    return DeviceMemory(
        process.resident_bytes,
        process.data_bytes,
        process.peak_resident_bytes,
        process.data_bytes,
    )


def used_bytes(device: torch.device) -> int:
    """Bytes in use on a device, without the caches of allocators.

    On the CPU it is what malloc has given out (glibc), or else the process's RAM.
    """
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    if _mallinfo is None:
        return process_memory().resident_bytes
    info = _mallinfo()
    return info.uordblks + info.hblkhd


class _MallocInfo(ctypes.Structure):
    """``struct mallinfo2`` of glibc's malloc.h."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in [
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keepcost",
        ]
    ]


def _find_mallinfo() -> Optional[Callable[..., Any]]:
    if sys.platform != "linux":
        return None
    mallinfo = getattr(ctypes.CDLL(None), "mallinfo2", None)  # from glibc 2.33 on
    if mallinfo is not None:
        mallinfo.restype = _MallocInfo
    return mallinfo


_mallinfo = _find_mallinfo()
