# Copyright (c) the d2_memfit developers.
"""Readings of the memory that a process takes and of what is left; a record of a run's peaks."""

import json
import os
import platform
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Union, get_type_hints

import psutil
import torch

from .. import __version__
from ..common import MB
from ..common.checks import fits
from ..common.errors import DataError
from ..common.files import Name, load_json, whole_file

__all__ = ["FIGURES", "PEAK_LAG_BYTES", "DeviceMemory", "ProcessMemory", "RunRecord"]
__all__ += ["available_host_bytes", "device_and_software", "device_memory", "figures_of_plan"]
__all__ += ["keep_plan", "process_memory"]

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

FIGURES = "# figures of the plan: "  # a comment in memfit_plan.yaml, with JSON

_FILE_NAME = "memfit_peaks.json"
_PLAN = "memfit_plan.yaml"


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


@dataclass(frozen=True)
class RunRecord:
    """Peaks of the main process of a run in training, in bytes, and what was trained.

    Attributes:
        date: when training ended, in UTC, such as 2026-11-24 13:05:59.
        here: the device and the software, as :func:`device_and_software` says.
        ranks: processes that trained together.
        family: hash of the model's config; "" if it has none.
        predicted_gb: those of :func:`figures_of_plan`; empty without a plan.
        iterations: number of iterations.
        had_errors: whether memory ran out.
        allocated_bytes: peak allocated. On the CPU it is the private memory that training takes.
        outside_bytes: memory outside the allocator. On a GPU it is the context with kernels and
            NCCL. On the CPU it is the private memory of the process before training.
    """

    date: str
    here: dict[str, Any]
    ranks: int
    family: str
    predicted_gb: list[float]
    iterations: int
    had_errors: bool
    allocated_bytes: int
    outside_bytes: int

    def write(self, folder: Name) -> None:
        """Write memfit_peaks.json.

        Raises:
            OSError: it cannot be written.
        """
        os.makedirs(folder, exist_ok=True)
        with whole_file(Path(folder) / _FILE_NAME, "w") as file:
            json.dump(asdict(self), file, indent=1, default=list)  # a LazyConfig has other lists

    @classmethod
    def read(cls, folder: Name) -> "RunRecord":
        """Read memfit_peaks.json of a run.

        Raises:
            DataError: there is none, or it is torn or of another version.
        """
        path = Path(folder) / _FILE_NAME
        values = load_json(path, "the record of a run ")
        try:
            record = cls(**values)
        except TypeError as e:
            raise DataError(f"{path} is not of this version of d2_memfit ({e})") from e
        if wrong := [n for n, hint in get_type_hints(cls).items() if not fits(values[n], hint)]:
            raise DataError(f"{path}: {', '.join(wrong)} must have other types")
        return record


def device_and_software(device: torch.device) -> dict[str, Any]:
    """The device, and the software that decides about memory, to which a record applies."""
    here: dict[str, Any] = {"d2_memfit": __version__, "torch": torch.__version__}
    if device.type != "cuda":
        return {**here, "device": platform.machine(), "cores": os.cpu_count()}
    card = torch.cuda.get_device_properties(device)
    here.update(device=card.name, memory_mb=card.total_memory // MB)
    return {**here, "cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version()}


def figures_of_plan(folder: Name) -> dict[str, Any]:
    """The figures in memfit_plan.yaml of an OUTPUT_DIR; none without this file.

    ``predicted_gb`` has GB allocated, reserved, and outside PyTorch's allocator; ``offloaded_gb``
    is page-locked RAM for the offload of each rank.
    """
    return _figures_in(Path(folder, _PLAN))


def keep_plan(config_file: Name, folder: Name) -> None:
    """Copy a config file that the command plan wrote to memfit_plan.yaml of an OUTPUT_DIR.

    The file of an earlier plan is replaced. Another file of this name is left as it is.

    Raises:
        OSError: it cannot be written.
    """
    plan = Path(folder, _PLAN)
    if _figures_in(Path(config_file)) and (_figures_in(plan) or not plan.exists()):
        with whole_file(plan, "w") as file:
            file.write(Path(config_file).read_text())


def _figures_in(file: Path) -> dict[str, Any]:
    for line in file.read_text().splitlines() if file.is_file() else ():
        if line.startswith(FIGURES):
            return dict(json.loads(line.removeprefix(FIGURES)))
    return {}
