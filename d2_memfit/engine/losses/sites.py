# Copyright (c) the d2_memfit developers.
"""Sites: the places in the code of counts that losses are divided by, with the kind of count."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from ...counts import Place

# The kind of count, the place in the code, and the number of the call there in one forward. Plain
# types, for checkpoints.
Site = tuple[str, Place, int]
Counts = dict[Site, torch.Tensor]  # float64 on the host; a vector has a number for each class

# Kinds of counts.
SUM = "sum"  # the model adds it up over ranks: all_reduce(num_boxes)
COUNT = "count"  # window_count
MEAN = "mean"  # of a mean over the batch: mean_factor of an adapter, or a weighted F.cross_entropy

IMAGES: Site = ("images", (), 0)
# Weights of losses, other than the images, by their names in MEMFIT.NORMALIZERS.LOSSES.
OBJECTS: Site = ("objects", (), 0)  # annotated ones: the loss is a mean over them
IN_FULL: Site = ("sum", (), 0)  # a sum over images, or one that is divided by the window's count


def added_up(counts: Iterable[Mapping[Site, Any]]) -> Counts:
    """Sums of counts, site by site. This waits for counts on a device."""
    sums: Counts = {}
    for of_forward in counts:
        for site, count in of_forward.items():
            own = torch.as_tensor(count).detach().to("cpu", torch.float64).reshape(-1)
            if site in sums and sums[site].shape != own.shape:  # not a count of anything
                own = torch.full_like(sums[site], torch.nan)
            sums[site] = sums[site] + own if site in sums else own
    return sums


def place_of(site: Site) -> str:
    """File and line of a count, for messages."""
    file, line = site[1][0] if site[1] else ("a file that is not known", 0)
    return f"{file}:{line}"
