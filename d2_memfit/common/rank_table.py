# Copyright (c) the d2_memfit developers.
"""Numbers of all ranks, exchanged in one small tensor."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from detectron2.utils import comm

__all__ = ["rank_table"]


def rank_table(numbers: Sequence[float], device: torch.device) -> list[list[float]]:
    """The numbers of each rank. All ranks must call this, with equally many numbers.

    Args:
        device: device for the tensor, which depends on the process group.
    """
    if comm.get_world_size() == 1:
        return [list(numbers)]
    table = torch.zeros(comm.get_world_size(), len(numbers), dtype=torch.float64)
    table[comm.get_rank()] = torch.tensor(numbers, dtype=torch.float64)
    table = table.to(device)
    dist.all_reduce(table)
    found: list[list[float]] = table.tolist()
    return found
