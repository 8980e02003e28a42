# Copyright (c) the d2_memfit developers.
"""The timeline of a job's allocations and frees."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Optional, Union

import numpy as np
import torch

__all__ = ["Allocate", "Allocation", "BlockCall", "Change", "Free", "Timeline", "Workspace"]


@dataclass(eq=False)
class Allocation:
    """Memory from one allocation.

    Attributes:
        owner: as in :class:`~d2_memfit.memory.OwnerMeter`.
        phase: phase of the job in which it was allocated, such as "forward".
        module: full name of the module whose forward or backward allocated it, or of its parameter;
            "" if neither is known.
        operator: the operator that allocated it; "" if none did.
        dtype, shape: those of its tensor; None and () without one.
    """

    num_bytes: int
    owner: str
    phase: str
    module: str = ""
    operator: str = ""
    dtype: Optional[torch.dtype] = None
    shape: tuple[int, ...] = ()

    def __str__(self) -> str:
        """Short text about the tensor, such as "convolution float32 [2, 64, 400, 672]"."""
        dtype = str(self.dtype).replace("torch.", "") if self.dtype else ""
        shape = str(list(self.shape)) if self.dtype else ""
        return " ".join(filter(None, (self.operator, dtype, shape)))


@dataclass(frozen=True)
class Workspace:
    """Memory that an operator takes while it runs, in addition to its tensors.

    Attributes:
        most_bytes: what another algorithm takes.
    """

    num_bytes: int
    phase: str
    most_bytes: int = 0


@dataclass(frozen=True)
class _Change:
    allocation: Allocation


class Allocate(_Change):
    @property
    def num_bytes(self) -> int:
        return self.allocation.num_bytes


class Free(_Change):
    @property
    def num_bytes(self) -> int:
        """The bytes that are freed, as a negative number."""
        return -self.allocation.num_bytes


Change = Union[Allocate, Free]
Event = Union[Change, Workspace]


@dataclass
class BlockCall:
    """The forward of a block of the model, one of ``techniques.blocks.find_blocks``.

    Attributes:
        name: name of the module.
        begin, end: positions in the timeline's events between which it runs.
        flops: its floating-point operations.
        outputs: memory of its output tensors.
    """

    name: str
    begin: int
    end: int
    flops: int
    outputs: set[Allocation]


@dataclass(eq=False)
class Timeline:
    """The events of a dry run.

    Attributes:
        events: in the order in which they happen. A workspace comes after the allocations of its
            operator.
        flops: floating-point operations by phase, of convolutions and matrix products.
        offloaded: bytes of each copy to the host in a forward.
        calls: forwards of the model's blocks in training, in the order in which they end.
        notes: lines about parts that may be larger in a real batch.
        host_bytes: peak of the tensors that a GPU's evaluation makes on the host.
    """

    events: list[Event] = field(default_factory=list)
    flops: Counter[str] = field(default_factory=Counter)
    offloaded: list[int] = field(default_factory=list)
    calls: list[BlockCall] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    host_bytes: int = 0

    def left(self) -> list[Event]:
        """The allocations that are not freed."""
        return [*_left(self.events)]

    def more_with_other_algorithms(self) -> int:
        """What the peak of tensors and workspaces grows by, if each workspace is its largest."""
        live = peak = most = 0
        for event in self.events:
            if isinstance(event, Workspace):
                peak = max(peak, live + event.num_bytes)
                most = max(most, live + event.most_bytes)
            else:
                live += event.num_bytes
                peak, most = max(peak, live), max(most, live)
        return max(most - peak, 0)

    def alive_at_peak(self) -> set[Allocation]:
        changes = self.changes()
        end = int(np.cumsum([0, *(change.num_bytes for change in changes)]).argmax())
        return {event.allocation for event in _left(changes[:end])}

    def changes(self) -> list[Change]:
        """Allocations and frees."""
        return [event for event in self.events if not isinstance(event, Workspace)]


def _left(events: Sequence[Event]) -> Iterator[Allocate]:
    gone = {event.allocation for event in events if isinstance(event, Free)}
    made = (event for event in events if isinstance(event, Allocate))
    return (event for event in made if event.allocation not in gone)
