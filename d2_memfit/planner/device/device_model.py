# Copyright (c) the d2_memfit developers.
"""The memory and time that a timeline needs on a device."""

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Optional, Union

import torch

from ...common.checks import check_choice, check_device, check_positive_number, did_you_mean
from ...common.reading import check_fields, load_fields, load_yaml
from ...common.units import GB, MB
from ...config.cards import CARDS, Card, find_card
from ...errors import ConfigError
from ...memory import process_memory, take_library_buffers
from ...techniques import MOST_IN_FLIGHT_BYTES
from ..dry_run import Allocate, Allocation, Convolution, Free, Operator, Timeline, Work
from .allocators import CachingAllocator, PageAllocator

__all__ = ["WORKSPACES", "DeviceModel", "DeviceUse", "device_names"]

# Memory that convolutions need in addition to input, weight and result.
# layout: copies of these in another memory layout. Kernels for tensor cores and oneDNN need
#   channels-last or blocked layouts.
# transforms: what cuDNN 7 takes on cards without tensor cores, which transforms tiles.
# most: the largest of all algorithms that are known here. cuDNN's heuristics choose by card,
#   version and size (pytorch#13412, keras#15678), and PyTorch takes the next algorithm if the
#   memory is not there (pytorch#49207): a run may take that much, and does not need it.
WORKSPACES = ("none", "layout", "transforms", "most")

_MANY_CHANNELS = 128

# Shares of a data sheet's peaks that training reaches, fitted to published times
# (commit 23d5dbdd): of the units for float32, of tensor cores, and of the bandwidth of
# memory. Grouped convolutions reach a share of the speed of others.
_FLOAT32_UNITS = 0.83
_TENSOR_CORES = 0.155
_MEMORY = 0.525
_GROUPED = 0.11
# Compute capabilities of the cards with published times that were fitted.
_FITTED = ("7.0", "7.5", "8.0", "8.6")

# Share of the bus's peak that copies of page-locked memory reach, measured by others: 0.80 for a
# P100 (gearshifft#82), 0.65 for a V100 in a cloud (rapidsai/rmm#451), 0.73 (dask-cuda#98), 0.62 for
# an A10 (drkennetz/cuda_examples#1), 0.79 for an A100 (ZaidQureshi/bam#54). This is the median.
_COPIES = 0.73

# 32 MiB for each of two threads; devices/cuda.yaml has the source and that of other cards. PyTorch
# has the same for Blackwell only in newer releases.
_HOPPER, _CUBLAS_OF_HOPPER_MB = 9, 64

_FOLDER = Path(__file__).parent / "devices"


@dataclass(frozen=True)
class DeviceUse:
    """The memory of a device that a timeline needs.

    Attributes:
        allocated_bytes: peak of ``torch.cuda.memory_allocated``.
        reserved_bytes: peak of the allocator's memory, including memory between blocks.
        total_bytes: ``reserved_bytes`` plus memory outside the allocator.
        breakdown: ``allocated_bytes`` by owner.
        outside: the rest of ``total_bytes`` by owner: memory between the allocator's blocks,
            context, loaded kernels and NCCL.
    """

    allocated_bytes: int
    reserved_bytes: int
    total_bytes: int
    breakdown: Counter[str]
    outside: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True)
class DeviceModel:
    """A device and its software, as data; ``devices/`` and ``config/cards.csv`` name the sources.

    Attributes:
        name: name of its file or row.
        description: text for messages.
        is_gpu: whether PyTorch's caching allocator manages its memory.
        convolution_workspace: a name in ``WORKSPACES``.
        foreach: whether the optimizer steps on all parameters at once, unless the job says so.
        keeps_gradients: whether ``optimizer.zero_grad()`` fills gradients with zeros, so that they
            exist in each forward.
        cublas_workspace_mb: workspaces of matrix products, kept by the allocator.
        other_tensors_mb: tensors that no dry run sees.
        context_mb: memory of the process before its first tensor; null measures this process.
        flops_per_s: peak by number format. "tf32" applies to float32 convolutions if the card has
            it: PyTorch's ``cudnn.allow_tf32`` is on, and that of matrix products is off.
        bytes_per_s: peak of the memory's bandwidth.
        host_bytes_per_s: peak of the bandwidth of copies to or from the host.
        card_is_known: whether the card is known, or stands for one that nothing tells.
        release_is_known: whether PyTorch's release is known; if not, ``keeps_gradients`` may be
            true.
        is_measured: whether ``flops_per_s`` and both bandwidths are measured, not peaks.
        seconds_per_operator: additional time of each operator, on the CPU and the device.
        seconds_per_micro_batch: additional time of each micro-batch, such as waits of the CPU for
            the device.
        times: text about predicted times, such as "not tried on ..."; "" if published times of
            this generation of cards were fitted, or if the device is measured.
        float16_fails: whether training in float16 is known to give NaN.
        kernels_mb: code of PyTorch, cuDNN and cuBLAS that CUDA loads at first use.
        nccl_mb: buffers of a communicator of 2 ranks, and of more.
        device_name: a pattern for ``torch.cuda.get_device_name()``, or a name in ``cards.csv``.
        compute_capability: such as "8.6".
        memory_gb: nominal memory of the card.
        usable_gb: what PyTorch reports for the card; 0 if that is not known.
        reserved_factor: measured over predicted memory of the allocator.
        is_this_process: whether ``context_mb`` is that of this process.
        context_is_measured: whether ``context_mb`` and ``kernels_mb`` are from this card.
        tensors_are_measured: whether ``other_tensors_mb`` is from a run of the same model.
        from_run: a line about the run that measured these values; "" without one.
    """

    name: str
    description: str
    is_gpu: bool
    convolution_workspace: str
    foreach: bool
    cublas_workspace_mb: float
    other_tensors_mb: float
    context_mb: float
    flops_per_s: dict[str, float]
    bytes_per_s: float
    host_bytes_per_s: float
    keeps_gradients: bool = False
    card_is_known: bool = True
    release_is_known: bool = True
    is_measured: bool = False
    seconds_per_operator: float = 22e-6  # fitted, like the shares above
    seconds_per_micro_batch: float = 23e-3  # fitted
    times: str = ""
    float16_fails: bool = False
    kernels_mb: float = 0.0
    # NVIDIA/nccl#964, for 4 A100 with NVLink. A guess for others: reports say 1.0 to 1.6 GB
    # (nccl#864, #1685); cards without NVLink have fewer channels and should need less (nccl#986).
    nccl_mb: tuple[float, float] = (544.0, 688.0)
    device_name: Optional[str] = None
    compute_capability: Optional[str] = None
    memory_gb: Optional[float] = None
    usable_gb: float = 0.0
    reserved_factor: float = 1.0
    is_this_process: bool = False
    context_is_measured: bool = False
    tensors_are_measured: bool = False
    from_run: str = ""

    @classmethod
    def load(cls, name: Union[str, Path]) -> "DeviceModel":
        """Load a device file by name.

        Args:
            name: a family or a measured card in ``devices/``, a card in ``config/cards.csv``, also
                as people write it, or the path of a device file.

        Raises:
            ConfigError: the file does not exist, or is not a device file.
        """
        path, card = Path(name), None
        if path.suffix not in (".yaml", ".yml"):
            card = find_card(str(name))
            path = _FOLDER / f"{card.device if card else name}.yaml"
            if path.is_file():  # a card that was measured has a file, and maybe a row too
                card = None
            elif card is None:
                hint = did_you_mean(str(name), device_names())
                raise ConfigError(
                    f"there is no device {str(name)!r}{hint}. There are cpu, cuda, the cards in "
                    "docs/PLANNER.md, and your own device files"
                )
        values = load_yaml(path, "--device ") if card is None else _values_of_card(card)
        if isinstance(values, dict):
            values["name"] = path.stem
            if values.get("context_mb", 0) is None:
                take_library_buffers()
                values["context_mb"] = process_memory().data_bytes / MB
                values["is_this_process"] = True
        device = load_fields(cls, values, str(path))
        check_choice(f"{path}: convolution_workspace", device.convolution_workspace, WORKSPACES)
        check_fields(device.flops_per_s, {"float32": float}, f"{path}, flops_per_s")
        speeds = {"bytes_per_s": device.bytes_per_s, "host_bytes_per_s": device.host_bytes_per_s}
        for key, speed in {**speeds, **device.flops_per_s}.items():
            check_positive_number(f"{path}: {key}", speed)
        return device

    @classmethod
    def choose(cls, name: Optional[Union[str, Path]], torch_device: str) -> "DeviceModel":
        """Choose a device by name; None or "auto" chooses by the GPU of this machine.

        This is the GPU's own file or row, or the nearest one of its compute capability. Without a
        GPU it is ``cuda`` or ``cpu``.

        Args:
            torch_device: as in MODEL.DEVICE.
        """
        if name is not None and name != "auto":
            return cls.load(name)
        if check_device(torch_device).type == "cpu":
            return cls.load("cpu")
        return cls._of_this_gpu() if torch.cuda.is_available() else cls.load("cuda")

    @classmethod
    def _of_this_gpu(cls) -> "DeviceModel":
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        gpu, capability = properties.name, f"{properties.major}.{properties.minor}"
        gigabytes = properties.total_memory / GB
        for file in sorted(_FOLDER.glob("*.yaml")):
            device = cls.load(file)
            if device.is_card(gpu):
                return device
        card = find_card(gpu, gigabytes)
        if card is not None:
            return cls.load(card.device)
        alike = [name for name, card in CARDS.items() if card.capability == capability]
        nearest = cls.load(
            min(alike, key=lambda name: abs(CARDS[name].memory_gb - gigabytes), default="cuda")
        )
        return replace(
            nearest,
            description=f"{gpu}, taken for {nearest.description}",
            device_name=gpu,
            times=f"for {nearest.description}",
        )

    def is_card(self, gpu: str) -> bool:
        """Whether this is the card that PyTorch calls ``gpu``, in any of its sizes."""
        if self.device_name is None:
            return False
        card = find_card(gpu, self.memory_gb)
        is_row = card is not None and card.name == self.device_name
        return is_row or fnmatchcase(gpu, self.device_name)

    def with_pytorch(self, version: tuple[int, int]) -> "DeviceModel":
        """This device with a release of PyTorch such as (1, 13).

        Until 2.0, the optimizer updated parameters one by one, and kept gradients. Until 1.11,
        cuBLAS took its workspace from the device itself, not from the allocator.
        """
        is_old = version < (2, 0)
        megabytes = 0 if version < (1, 11) else self.cublas_workspace_mb
        return replace(
            self,
            foreach=self.foreach and not is_old,
            keeps_gradients=is_old,
            cublas_workspace_mb=megabytes,
        )

    def use(
        self,
        timeline: Timeline,
        limit_bytes: Optional[int] = None,
        expandable_segments: bool = False,
        ranks: int = 1,
    ) -> DeviceUse:
        """Compute the memory that a timeline needs.

        Args:
            limit_bytes: limit of the whole process, context included.
            ranks: processes that train together.

        Raises:
            DoesNotFit: the timeline needs more than the limit.
        """
        outside = self.outside_bytes(ranks)
        limit = None if limit_bytes is None else limit_bytes - sum(outside.values())
        allocator: Any = PageAllocator(limit)
        if self.is_gpu:
            allocator = CachingAllocator(limit, expandable_segments)
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
        allocated, reserved = allocator.peak_allocated_bytes, allocator.peak_reserved_bytes
        if limit_bytes is None:  # else it reserves no more than it may
            reserved = max(allocated, round(reserved * self.reserved_factor))
        between = reserved - allocated
        return DeviceUse(
            allocated,
            reserved,
            reserved + sum(outside.values()),
            at_peak,
            +Counter({"between blocks": between}) + outside,
        )

    def events(self, timeline: Timeline) -> Iterator[Union[Allocate, Free]]:
        """The device's allocations and frees for a timeline, including library workspaces."""
        for megabytes, owner in (
            (self.cublas_workspace_mb, "cuBLAS workspaces"),
            (self.other_tensors_mb, "other"),
        ):
            yield Allocate(Allocation(int(megabytes * MB), owner, "setup"))
        for event in timeline.events:
            if self.keeps_gradients and _changes_gradients(event):
                continue
            if isinstance(event, Convolution):
                size = self.workspace_bytes(event)
                workspace = Allocation(size, "workspace", event.phase, "", "convolution")
                yield Allocate(workspace)
                yield Free(workspace)
            else:
                yield event

    def workspace_bytes(self, c: Convolution) -> int:
        """Bytes that a convolution takes while it runs, in addition to its tensors."""
        if self.convolution_workspace == "none":
            return 0
        layout = c.dtype.itemsize * sum(math.prod(shape) for shape in (c.input, c.weight, c.output))
        if self.convolution_workspace == "layout" or c.dtype.itemsize < 4:
            return layout
        of_winograd, of_fourier = _bytes_of_transforms(c)
        if self.convolution_workspace == "most":
            return max(layout, of_winograd, of_fourier)
        return of_fourier or of_winograd

    def outside_bytes(self, ranks: int) -> Counter[str]:
        """Memory outside the allocator, by owner.

        DDP has one communicator. Detectron2's other groups use gloo, or share it.
        """
        nccl_mb = 0.0 if ranks == 1 else self.nccl_mb[ranks > 2]
        names = {"context": self.context_mb, "loaded kernels": self.kernels_mb, "NCCL": nccl_mb}
        return +Counter({name: int(megabytes * MB) for name, megabytes in names.items()})

    def seconds(self, work: Work) -> float:
        """Predicted seconds of work, without its copies.

        For each operator, the device computes or moves memory, whichever takes longer, and the CPU
        launches it. Launches are added, because Detectron2's models often wait for the device.
        """
        return self._seconds_of(work.all_operators)

    def seconds_with_copies(self, forward: Work, backward: Work) -> float:
        """Predicted seconds of a forward that copies to the host, and of its backward.

        Copies follow each other while the device computes. In the forward, it waits while too much
        is in flight. In the backward, a tensor comes back while the one saved after it is in use,
        so each part takes the time of its computation or of its copy, whichever is longer.
        """
        seconds, copied_at = 0.0, 0.0
        in_flight: list[tuple[float, int]] = []  # when each copy ends, and its bytes
        parts = [self._seconds_of(copy.operators) for copy in forward.copies]
        for part, copy in zip(parts, forward.copies):
            seconds += part
            copied_at = max(copied_at, seconds) + copy.num_bytes / self.copied_bytes_per_s
            in_flight.append((copied_at, copy.num_bytes))
            while in_flight[1:] and sum(size for _, size in in_flight) > MOST_IN_FLIGHT_BYTES:
                seconds = max(seconds, in_flight.pop(0)[0])
        last = self._seconds_of(forward.operators)
        ratio = self.seconds(backward) / max(sum(parts) + last, 1e-12)
        coming = [0.0, *(copy.num_bytes / self.copied_bytes_per_s for copy in forward.copies)]
        fetching = sum(max(ratio * part, other) for part, other in zip(parts, coming))
        return seconds + last + ratio * last + fetching

    @property
    def copied_bytes_per_s(self) -> float:
        """Bandwidth that copies to or from the host reach."""
        return self.host_bytes_per_s * (1.0 if self.is_measured else _COPIES)

    def _seconds_of(self, operators: Counter[Operator]) -> float:
        bytes_per_s = self.bytes_per_s * (1.0 if self.is_measured else _MEMORY)
        computing = sum(
            times * max(of.flops / self._flops_per_s(of), of.num_bytes / bytes_per_s)
            for of, times in operators.items()
        )
        return computing + sum(operators.values()) * self.seconds_per_operator

    def _flops_per_s(self, operator: Operator) -> float:
        name, float32 = operator.number_format, self.flops_per_s["float32"]
        if name == "float32" and operator.kind != "matrix product":
            name = "tf32"
        speed = self.flops_per_s.get(name, float32)
        if self.is_measured:
            return speed
        speed = max(_FLOAT32_UNITS * float32, _TENSOR_CORES * speed)
        return speed * (_GROUPED if operator.kind == "grouped convolution" else 1.0)


def _changes_gradients(event: Any) -> bool:
    """Whether an event after the setup allocates or frees a gradient."""
    is_first = isinstance(event, Allocate) and event.phase == "setup"
    is_change = isinstance(event, (Allocate, Free))
    return is_change and event.allocation.owner == "gradients" and not is_first


def _bytes_of_transforms(c: Convolution) -> tuple[int, int]:
    """Workspaces of Winograd's and of Fourier's transform; 0 for a transform that is not used.

    Fourier's is used if the filter's transforms are smaller than the data's, and offsets in both
    fit into 32 bits; Winograd's for 3 x 3 filters.

    Sources: cuDNN's manual on CUDNN_CONVOLUTION_FWD_ALGO_FFT_TILING, whose tiles are 32 x 32; Lavin
    and Gray, "Fast Algorithms for Convolutional Neural Networks", arXiv:1509.09308. The rule that
    few channels are not transformed is fitted to the figures of Detectron2's zoo: a mask head's 80
    are not, and 1230 of LVIS are.
    """
    if len(c.weight) != 4 or set(c.stride) != {1} or c.groups != 1:
        return 0, 0
    channels_out, channels_in, *kernel = c.weight
    num_images, _, *size = c.output

    def tiles_of(lengths: Iterable[int]) -> int:
        return num_images * math.prod(math.ceil(s / n) for s, n in zip(size, lengths))

    of_winograd = 0
    if kernel == [3, 3]:  # tiles of 6 x 6 for each 4 x 4 results
        channels = tiles_of((4, 4)) * (channels_in + channels_out) + channels_in * channels_out
        of_winograd = 36 * 4 * channels
    # Real transforms of 32 x 32 tiles: 32 x 17 complex numbers of 8 bytes.
    data = tiles_of(33 - k for k in kernel) * (channels_in + channels_out) * 32 * 17 * 8
    filters = channels_in * channels_out * 32 * 17 * 8
    is_used = filters < data <= 2**31 and min(channels_in, channels_out) >= _MANY_CHANNELS
    return of_winograd, (data + filters) * is_used


def device_names() -> list[str]:
    return sorted({*(path.stem for path in _FOLDER.glob("*.yaml")), *CARDS})


def _values_of_card(card: Card) -> dict[str, Any]:
    """The values of a current card, with those of a card's row."""
    of_family = load_yaml(_FOLDER / "cuda.yaml")
    if "tf32" not in card.flops_per_s:  # no tensor cores for float32, so no other layout
        of_family["convolution_workspace"] = "transforms"
    if float(card.capability) >= _HOPPER:
        of_family["cublas_workspace_mb"] = _CUBLAS_OF_HOPPER_MB
    shared = f", {card.memory_gb:g} GB shared with the CPU" if card.is_unified else ""
    of_others = f"not tried on this generation of cards (compute capability {card.capability})"
    return {
        **of_family,
        "description": f"NVIDIA {card.name}{shared}",
        "device_name": card.name,
        "compute_capability": card.capability,
        "memory_gb": card.memory_gb,
        "usable_gb": card.usable_gb,
        "context_mb": card.context_mb,
        "flops_per_s": card.flops_per_s,
        "bytes_per_s": card.bytes_per_s,
        "host_bytes_per_s": card.host_bytes_per_s,
        "float16_fails": card.float16_fails,
        "times": "" if card.capability in _FITTED else of_others,
    }
