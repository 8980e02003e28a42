"""What a job allocates and frees, in order."""

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Union

import torch

__all__ = ["Allocate", "Allocation", "Convolution", "Event", "Free", "Timeline", "Work"]


@dataclass(eq=False)
class Allocation:
    """Memory that was allocated at once.

    Attributes:
        owner: as in :class:`~d2_memfit.memory.OwnerMeter`.
        phase: of the job, in which it was allocated, such as "forward".
    """

    num_bytes: int
    owner: str
    phase: str


@dataclass(frozen=True)
class Convolution:
    """One that runs, with what a library's choice of an algorithm for it depends on.

    Attributes:
        direction: "forward", or in the backward the gradient of "data" or of the "filter".
        input: [N, channels, H, W].
        weight: [output channels, input channels / groups, height, width].
    """

    direction: str
    input: torch.Size
    weight: torch.Size
    output: torch.Size
    stride: tuple[int, ...]
    groups: int
    dtype: torch.dtype
    phase: str


@dataclass(frozen=True)
class Allocate:
    allocation: Allocation


@dataclass(frozen=True)
class Free:
    allocation: Allocation


Event = Union[Allocate, Free, Convolution]


@dataclass
class Work:
    """What operators do.

    Attributes:
        flops: floating-point operations of convolutions and products of matrices, by the name of
            their number format.
        bytes_moved: read and written.
        num_operators: that were called.
    """

    flops: Counter = field(default_factory=Counter)
    bytes_moved: int = 0
    num_operators: int = 0


@dataclass
class Timeline:
    """
    Attributes:
        events: in the order in which they happen. A convolution comes after what it allocates.
        work: by phase.
    """

    events: list[Event] = field(default_factory=list)
    work: defaultdict[str, Work] = field(default_factory=lambda: defaultdict(Work))

    def peak(self) -> Counter:
        """Bytes by owner at the time when most is alive."""
        live: Counter = Counter()
        most, total, peak = 0, 0, Counter()
        for event in self.events:
            if isinstance(event, Convolution):
                continue
            sign = 1 if isinstance(event, Allocate) else -1
            live[event.allocation.owner] += sign * event.allocation.num_bytes
            total += sign * event.allocation.num_bytes
            if total > most:
                most, peak = total, +live
        return peak
