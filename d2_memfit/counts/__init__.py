# Copyright (c) the d2_memfit developers.
"""What losses may be divided by: counts of a model, and what its ranks tell each other."""

from .collectives import (
    Collective,
    Handler,
    Place,
    PretendedRanks,
    noticed_collectives,
    place_of_caller,
)
from .window_counts import counts_answered_by, mean_factor, window_count, window_share

__all__ = [
    "Collective",
    "Handler",
    "Place",
    "PretendedRanks",
    "counts_answered_by",
    "mean_factor",
    "noticed_collectives",
    "place_of_caller",
    "window_count",
    "window_share",
]
