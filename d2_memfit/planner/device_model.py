"""From a timeline of tensors to what a device needs, and how long it takes."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Optional, Union

import torch
import yaml

from ..checks import near
from ..errors import ConfigError
from ..memory import process_memory
from .allocators import CachingAllocator, PageAllocator
from .timeline import Allocate, Allocation, Convolution, Free, Timeline, Work
from .workspaces import WORKSPACES

__all__ = ["DeviceModel", "DeviceUse", "device_names"]

_FOLDER = Path(__file__).parent / "devices"
_MB = 2**20


@dataclass(frozen=True)
class DeviceUse:
    """What a timeline needs of a device.

    Attributes:
        allocated_bytes: peak of what ``torch.cuda.memory_allocated`` counts.
        reserved_bytes: peak of what the allocator takes, with what lies between blocks.
        total_bytes: with the context.
        breakdown: ``allocated_bytes`` by owner.
    """

    allocated_bytes: int
    reserved_bytes: int
    total_bytes: int
    breakdown: Counter[str]


@dataclass(frozen=True)
class DeviceModel:
    """A device and the software on it, as data; see the files in ``devices/`` for the sources.

    Attributes:
        name: of its file.
        description: for people.
        is_gpu: whether PyTorch's caching allocator manages its memory.
        convolution_workspace: a name in ``WORKSPACES``.
        keeps_gradients: whether gradients are there in the forward.
        foreach: whether the optimizer steps on all parameters at once, unless told otherwise.
        cublas_workspace_mb: for products of matrices, kept by the allocator.
        other_tensors_mb: that no dry run sees.
        context_mb: what the process takes before its first tensor; in a file, null is what the
            process takes that reads it.
        flops_per_s: by number format.
        bytes_per_s: of the memory.
        host_bytes_per_s: of copies to the host, or from it.
        seconds_per_operator: that a call takes at least.
        device_name: as ``torch.cuda.get_device_name()`` says it, where it was measured.
    """

    name: str
    description: str
    is_gpu: bool
    convolution_workspace: str
    keeps_gradients: bool
    foreach: bool
    cublas_workspace_mb: float
    other_tensors_mb: float
    context_mb: float
    flops_per_s: dict[str, float]
    bytes_per_s: float
    host_bytes_per_s: float
    seconds_per_operator: float
    device_name: Optional[str] = None

    @classmethod
    def load(cls, name: Union[str, Path]) -> "DeviceModel":
        """
        Args:
            name: of a family in ``devices/``, or the path of a file of
                ``tools/calibrate_device.py``.

        Raises:
            ConfigError: there is none, or the file is not one.
        """
        path = Path(name)
        if path.suffix not in (".yaml", ".yml"):
            path = _FOLDER / f"{name}.yaml"
            if not path.is_file():
                raise ConfigError(
                    f"there is no device {str(name)!r}{near(str(name), device_names())}. There are "
                    f"{', '.join(device_names())}, and files of tools/calibrate_device.py"
                )
        try:
            values = yaml.safe_load(path.read_text())
            device = cls(name=path.stem, **values)
        except (OSError, TypeError, yaml.YAMLError) as e:
            raise ConfigError(f"{path} is no file of a device: {e}") from e
        device._check_numbers(path)
        if device.convolution_workspace not in WORKSPACES:
            raise ConfigError(
                f"{path}: convolution_workspace must be one of {', '.join(WORKSPACES)}, got "
                f"{device.convolution_workspace!r}"
            )
        if device.context_mb is None:
            device = replace(device, context_mb=process_memory().data_bytes / _MB)
        return device

    def _check_numbers(self, path: Path) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            is_number = isinstance(value, (int, float)) or (
                value is None and field.name == "context_mb"
            )
            if field.type is float and not is_number:
                raise ConfigError(f"{path}: {field.name} must be a number, got {value!r}")
        if not isinstance(self.flops_per_s, dict) or "float32" not in self.flops_per_s:
            raise ConfigError(
                f"{path}: flops_per_s must have a number for float32, got {self.flops_per_s!r}"
            )
        for name, value in self.flops_per_s.items():
            if not isinstance(value, (int, float)):
                raise ConfigError(f"{path}: flops_per_s of {name} must be a number, got {value!r}")

    @classmethod
    def choose(cls, name: Optional[Union[str, Path]], torch_device: str) -> "DeviceModel":
        """The one of a name; or of the GPU that is there, if a file has its name; or the family.

        Args:
            torch_device: as in MODEL.DEVICE.
        """
        if name is not None:
            return cls.load(name)
        try:
            kind = torch.device(torch_device).type
        except RuntimeError as e:
            raise ConfigError(f"MODEL.DEVICE {torch_device!r} is no device of PyTorch: {e}") from e
        if kind == "cpu":
            return cls.load("cpu")
        if torch.cuda.is_available():
            there = torch.cuda.get_device_name()
            for device in map(cls.load, device_names()):
                if device.device_name == there:
                    return device
        return cls.load("cuda")

    def use(
        self,
        timeline: Timeline,
        limit_bytes: Optional[int] = None,
        expandable_segments: bool = False,
    ) -> DeviceUse:
        """What a timeline needs.

        Args:
            limit_bytes: of all that the process may take, context included.

        Raises:
            DoesNotFit: it is more than the limit.
        """
        context = int(self.context_mb * _MB)
        limit = None if limit_bytes is None else limit_bytes - context
        allocator = (
            CachingAllocator(limit, expandable_segments) if self.is_gpu else PageAllocator(limit)
        )
        account = _Account(allocator)
        for event in self.events(timeline):
            if isinstance(event, Allocate):
                account.allocate(event.allocation)
            else:
                account.free(event.allocation)
        return DeviceUse(
            allocator.peak_allocated_bytes,
            allocator.peak_reserved_bytes,
            allocator.peak_reserved_bytes + context,
            account.peak,
        )

    def events(self, timeline: Timeline) -> Iterator[Union[Allocate, Free]]:
        """What the device allocates and frees for a timeline: workspaces of libraries too."""
        for megabytes, owner in (
            (self.cublas_workspace_mb, "workspace"),
            (self.other_tensors_mb, "other"),
        ):
            yield Allocate(Allocation(int(megabytes * _MB), owner, "setup"))
        workspace_bytes = WORKSPACES[self.convolution_workspace]
        for event in timeline.events:
            if isinstance(event, Convolution):
                size = workspace_bytes(event)
                workspace = Allocation(size, "workspace", event.phase, "", "convolution")
                yield Allocate(workspace)
                yield Free(workspace)
            elif not (self.keeps_gradients and _is_of_later_gradients(event)):
                yield event

    def seconds(self, work: Work) -> float:
        """Those that work takes at least: computing, moving, and starting of operators; or copies
        to the host or back, which go on beside that.
        """
        computing = sum(
            flops / self.flops_per_s.get(dtype, self.flops_per_s["float32"])
            for dtype, flops in work.flops.items()
        )
        moving = work.bytes_moved / self.bytes_per_s
        starting = work.num_operators * self.seconds_per_operator
        return max(computing + moving + starting, work.host_bytes / self.host_bytes_per_s)


class _Account:
    """Who has what of an allocator's memory."""

    def __init__(self, allocator: Union[CachingAllocator, PageAllocator]) -> None:
        self._allocator = allocator
        self._blocks: dict[Allocation, Any] = {}
        self._live: Counter[str] = Counter()
        self.peak: Counter[str] = Counter()

    def allocate(self, allocation: Allocation) -> None:
        if not allocation.num_bytes:
            return
        before, peak = self._allocator.allocated_bytes, self._allocator.peak_allocated_bytes
        self._blocks[allocation] = self._allocator.allocate(allocation.num_bytes)
        self._live[allocation.owner] += self._allocator.allocated_bytes - before
        if self._allocator.peak_allocated_bytes > peak:
            self.peak = +self._live

    def free(self, allocation: Allocation) -> None:
        if allocation in self._blocks:
            before = self._allocator.allocated_bytes
            self._allocator.free(self._blocks.pop(allocation))
            self._live[allocation.owner] += self._allocator.allocated_bytes - before


def _is_of_later_gradients(event: Union[Allocate, Free]) -> bool:
    """Whether they come or go after the setup."""
    is_of_setup = event.allocation.phase == "setup" and isinstance(event, Allocate)
    return event.allocation.owner == "gradients" and not is_of_setup


def device_names() -> list[str]:
    return sorted(path.stem for path in _FOLDER.glob("*.yaml"))
