# Copyright (c) the d2_memfit developers.
"""The memory that a timeline needs on a device."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Optional

import torch

from ..common import GB, MB
from ..common.checks import check_device, did_you_mean
from ..common.errors import ConfigError
from ..config.cards import CARDS, find_card
from ..memory import process_memory, take_library_buffers
from .allocators import CachingAllocator, PageAllocator
from .timeline import Allocate, Allocation, Change, Free, Timeline, Workspace

__all__ = ["DeviceModel", "DeviceUse", "device_names"]

SHARE_OF_SOFTWARE = 0.06  # of the tensors, that other software may need more or less
_SAME_SOFTWARE = 0.02  # on the CPU, and if a run of the same model was measured
# What a context and loaded kernels take at most, and what a process on a CPU takes beside its
# tensors, in MB (docs/HOW_ACCURATE.md).
_CONTEXT_MB, _OF_A_CPU_MB = 426 + 380, 360


@dataclass(frozen=True)
class DeviceUse:
    """The memory of a device that a timeline needs, by owner.

    Attributes:
        breakdown: bytes of tensors at their peak.
        outside: the rest: between the allocator's blocks, context, loaded kernels and NCCL.
    """

    breakdown: Counter[str]
    outside: Counter[str]

    @property
    def allocated_bytes(self) -> int:
        """Peak of ``torch.cuda.memory_allocated``."""
        return sum(self.breakdown.values())

    @property
    def reserved_bytes(self) -> int:
        """Peak of ``torch.cuda.memory_reserved``."""
        return self.allocated_bytes + self.outside["between blocks"]

    @property
    def total_bytes(self) -> int:
        return self.allocated_bytes + sum(self.outside.values())


@dataclass(frozen=True)
class DeviceModel:
    """A device and its software, as data. The values are those of a current card, not measured.

    Attributes:
        name: its name for ``--device``.
        description: text for messages.
        is_gpu: whether PyTorch's caching allocator manages its memory.
        foreach: whether the optimizer steps on all parameters at once, unless the job says so:
            https://docs.pytorch.org/docs/stable/optim.html.
        cublas_workspace_mb: workspaces of matrix products, kept by the allocator: 8,519,680 bytes
            before Hopper (parseChosenWorkspaceSize in ATen/cuda/CublasHandlePool.cpp), once for the
            thread of the forward, and once for that of the backward.
        other_tensors_mb: tensors that no dry run sees.
        context_mb: memory of the process before its first tensor. An empty context: about 400 MB
            (pytorch#109888), 300 (#107667), 287 (#86509), with CUDA's lazy loading.
        kernels_mb: code that CUDA loads at first use. A guess: half of the 380 MB that PyTorch
            loaded more without lazy loading (pytorch#86509).
        nccl_mb: buffers of a communicator of 2 ranks, and of more: NVIDIA/nccl#964, for 4 A100 with
            NVLink. A guess for others: reports say 1.0 to 1.6 GB (nccl#864, #1685); cards without
            NVLink should need less (nccl#986).
        usable_gb: what PyTorch reports for the card; 0 if that is not known.
        float16_fails: whether training in float16 is known to give NaN.
        card_is_known, release_is_known: whether a log says the card and a current PyTorch.
        context_is_measured, tensors_are_measured: whether ``context_mb`` and ``other_tensors_mb``
            are from a run.
        from_run: a line about that run.
    """

    name: str = "cuda"
    description: str = "a current CUDA card"
    is_gpu: bool = True
    foreach: bool = True
    cublas_workspace_mb: float = 16.25
    other_tensors_mb: float = 0.0
    context_mb: float = 400.0
    kernels_mb: float = 200.0
    nccl_mb: tuple[float, float] = (544.0, 688.0)
    usable_gb: float = 0.0
    float16_fails: bool = False
    card_is_known: bool = True
    release_is_known: bool = True
    context_is_measured: bool = False
    tensors_are_measured: bool = False
    from_run: str = ""

    @classmethod
    def load(cls, name: str) -> "DeviceModel":
        """The device with a name: cpu, cuda, or a card, also as people write it.

        Raises:
            ConfigError: there is no such device.
        """
        card = find_card(name)
        if card is not None:
            shared = (
                f", {card.memory_gb:g} GB shared with the CPU" if card.remarks == "unified" else ""
            )
            return cls(
                name=card.device,
                description=f"NVIDIA {card.name}{shared}",
                context_mb=card.context_mb,
                usable_gb=card.usable_gb,
                float16_fails=card.remarks == "float16 fails",
            )
        if name in ("cpu", "cuda"):
            return cls() if name == "cuda" else cls._cpu()
        hint = did_you_mean(name, device_names())
        raise ConfigError(
            f"there is no device {name!r}{hint}. There are cpu, cuda and the cards in "
            "docs/PLANNER.md"
        )

    @classmethod
    def _cpu(cls) -> "DeviceModel":
        """A Linux CPU, where a budget limits the private memory of the process (RLIMIT_DATA).

        Stacks of threads, oneDNN's code and blocks that are not given back take 118 to 165 MB over
        the tensors with images of one size, and 71 more with images of many (docs/HOW_ACCURATE.md).
        """
        take_library_buffers()
        return cls(
            name="cpu",
            description="a Linux CPU",
            is_gpu=False,
            foreach=False,
            cublas_workspace_mb=0.0,
            other_tensors_mb=220.0,
            context_mb=process_memory().data_bytes / MB,
            kernels_mb=0.0,
            nccl_mb=(0.0, 0.0),
        )

    @classmethod
    def choose(cls, name: Optional[str], torch_device: str) -> "DeviceModel":
        """Choose a device by name; None or "auto" chooses by the GPU of this machine.

        This is the GPU's own row. Without a GPU, or without a row, it is ``cuda`` or ``cpu``.

        Args:
            torch_device: as in MODEL.DEVICE.
        """
        if name is not None and name != "auto":
            return cls.load(name)
        if check_device(torch_device).type == "cpu":
            return cls.load("cpu")
        if not torch.cuda.is_available():
            return cls.load("cuda")
        gpu = torch.cuda.get_device_properties(torch.cuda.current_device())
        card = find_card(gpu.name, gpu.total_memory / GB)
        taken = cls(description=f"{gpu.name}, taken for {cls.description}")
        return cls.load(card.device) if card else taken

    @property
    def margin(self) -> tuple[float, float]:
        """What may be needed above a prediction: a share of the tensors, and bytes."""
        if self.is_gpu:
            share = _SAME_SOFTWARE if self.tensors_are_measured else SHARE_OF_SOFTWARE
            more_mb = _CONTEXT_MB - self.context_mb - self.kernels_mb
            return share, 0.0 if self.context_is_measured else max(more_mb, 0.0) * MB
        more_mb = 0.0 if self.tensors_are_measured else _OF_A_CPU_MB - self.other_tensors_mb
        return _SAME_SOFTWARE, max(more_mb, 0.0) * MB

    def use(
        self, timeline: Timeline, expandable_segments: bool = False, ranks: int = 1
    ) -> DeviceUse:
        """Compute the memory that a timeline needs.

        Args:
            ranks: processes that train together.
        """
        outside = self.outside_bytes(ranks)
        allocator = CachingAllocator(expandable_segments) if self.is_gpu else PageAllocator()
        blocks: dict[Allocation, Any] = {}
        live: Counter[str] = Counter()  # bytes by owner
        at_peak = live
        for event in self.events(timeline):
            a = event.allocation
            before, peak = allocator.allocated_bytes, allocator.peak_allocated_bytes
            if isinstance(event, Allocate) and a.num_bytes:
                blocks[a] = allocator.allocate(a.num_bytes)
            elif a in blocks:
                allocator.free(blocks.pop(a))
            live[a.owner] += allocator.allocated_bytes - before
            if allocator.peak_allocated_bytes > peak:
                at_peak = +live
        outside["between blocks"] = allocator.peak_reserved_bytes - allocator.peak_allocated_bytes
        return DeviceUse(at_peak, +outside)

    def events(self, timeline: Timeline) -> Iterator[Change]:
        """The device's allocations and frees for a timeline, including library workspaces."""
        for megabytes, owner in (
            (self.cublas_workspace_mb, "cuBLAS workspaces"),
            (self.other_tensors_mb, "other"),
        ):
            yield Allocate(Allocation(int(megabytes * MB), owner, "setup"))
        for event in timeline.events:
            if not isinstance(event, Workspace):
                yield event
            else:
                taken = Allocation(event.num_bytes, "workspace", event.phase, "", "convolution")
                yield from (Allocate(taken), Free(taken))

    def outside_bytes(self, ranks: int) -> Counter[str]:
        """Memory outside the allocator, by owner.

        DDP has one communicator. Detectron2's other groups use gloo, or share it.
        """
        nccl_mb = 0.0 if ranks == 1 else self.nccl_mb[ranks > 2]
        names = {"context": self.context_mb, "loaded kernels": self.kernels_mb, "NCCL": nccl_mb}
        return +Counter({name: int(megabytes * MB) for name, megabytes in names.items()})


def device_names() -> list[str]:
    return sorted({"cpu", "cuda", *CARDS})
