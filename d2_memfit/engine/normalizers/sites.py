# Copyright (c) the d2_memfit developers.
"""Places where a forward counts something that losses are divided by, and what is counted there."""

from collections.abc import Iterable, Mapping
from typing import Any

from ...counts import Place

# The kind of count, the place in the code, and the number of the call there in one forward. Plain
# types, for checkpoints.
Site = tuple[str, Place, int]
Counts = dict[Site, float]

# Kinds of counts.
SUM = "sum"  # the model adds it up over ranks: all_reduce(num_boxes)
COUNT = "count"  # window_count
MEAN = "mean"  # of a mean over the batch: mean_factor of an adapter, or a weighted F.cross_entropy

IMAGES: Site = ("images", (), 0)
OBJECTS: Site = ("objects", (), 0)  # annotated ones: MEMFIT.NORMALIZERS.LOSSES
IN_FULL: Site = ("in full", (), 0)  # weights of a loss that the forward divides by the window's sum


def added_up(counts: Iterable[Mapping[Site, Any]]) -> Counts:
    """Sums of counts, site by site. They may be tensors of one element, and are waited for."""
    sums: Counts = {}
    for of_forward in counts:
        for site, count in of_forward.items():
            sums[site] = sums.get(site, 0.0) + float(count)
    return sums
