# Copyright (c) the d2_memfit developers.
"""The record of the peaks of a training run."""

import json
import os
import platform
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from .. import __version__
from ..common import MB
from ..common.files import Name, load_fields, load_json, whole_file

__all__ = ["FIGURES", "RunRecord", "device_and_software", "figures_of_plan", "keep_plan"]

FIGURES = "# figures of the plan: "  # a comment in memfit_plan.yaml, with JSON

_FILE_NAME = "memfit_peaks.json"
_PLAN = "memfit_plan.yaml"


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
        record: RunRecord = load_fields(cls, load_json(path, "the record of a run "), str(path))
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
