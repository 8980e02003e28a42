# Copyright (c) the d2_memfit developers.
"""Reports between ranks about the counts of their windows. They are pickled and small."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from .count_rules import SeenAt
from .window import MicroBatch, count_objects

__all__ = ["CountReport", "Part"]


@dataclass
class CountReport:
    """One rank's report about the counts of its window."""

    news: SeenAt = field(default_factory=dict)
    asks_for_ranks: bool = False
    communicates: str = ""
    is_cut_anew: bool = False
    has_objects: bool = False


@dataclass
class Part:
    """A rank's share of the effective batch."""

    images: int
    objects: int
    micro_batches: int

    @classmethod
    def of(cls, micro_batches: Sequence[MicroBatch]) -> "Part":
        return cls(
            sum(m.num_images for m in micro_batches),
            sum(count_objects(m.data) for m in micro_batches),
            len(micro_batches),
        )
