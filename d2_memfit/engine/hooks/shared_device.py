# Copyright (c) the d2_memfit developers.
"""A hook that makes room when other processes take memory of the device."""

import logging
import math
from typing import Any

import torch
from torch import nn

from ...memory import available_host_bytes, device_memory, release_memory
from ..window import SizeLimit
from .after_forwards import AfterForwards

__all__ = ["MakeRoom"]

logger = logging.getLogger(__name__)

_PERIOD = 5  # iterations between looks at the device
_FIRST_ITERATIONS = 10  # these load kernels and libraries
_MARGIN = 1.1  # of what a micro-batch has needed
_NOTICEABLE_BYTES = 2**27  # taken by others
_GB = 2**30


class MakeRoom(AfterForwards):
    """Halves the micro-batch before an error, if other processes leave less than it needs.

    On a GPU that a desktop shares, other programs take memory while training runs. Every few
    iterations the device's free memory plus this process's is compared with the most that the
    process has taken with micro-batches of this size. The driver's counter is read, so nothing
    waits for the device. The micro-batch grows back as after an out-of-memory error, after
    MEMFIT.OOM.GROW_AFTER iterations. On the CPU it is the RAM, with the limits of cgroups.

    Register it on each rank. It needs an ``AccumulatingTrainer`` with recovery.
    """

    def __init__(self) -> None:
        self._needs: dict[float, int] = {}  # bytes, by the limit of micro-batches
        self._last = math.inf
        self._most_room = 0

    def after_step(self) -> None:
        done = self.trainer.iter + 1 - self.trainer.start_iter
        limit = self._size.limit
        has_grown = limit > self._last
        self._last = limit
        if done >= _FIRST_ITERATIONS and (done % _PERIOD == 0 or has_grown):
            self._look(has_grown)

    @property
    def _size(self) -> SizeLimit:
        size: SizeLimit = self._inner.recovery.size
        return size

    def after_forward(self, model: nn.Module, *_: Any) -> None:
        if model.training:
            limit = self._size.limit
            self._needs[limit] = max(self._needs.get(limit, 0), self._taken())

    def _taken(self) -> int:
        memory = device_memory(self._device)
        is_gpu = self._device.type == "cuda"
        return memory.reserved_bytes if is_gpu else memory.allocated_bytes

    def _look(self, has_grown: bool) -> None:
        is_gpu = self._device.type == "cuda"
        free = torch.cuda.mem_get_info(self._device)[0] if is_gpu else available_host_bytes()
        room = free + self._taken()
        need = self._needs.get(self._size.limit, 0)
        self._most_room = max(self._most_room, room)
        taken = self._most_room - room
        largest = self._inner.recovery.largest
        # If ranks communicate in the forward, their micro-batches must stay equal.
        may_shrink = not self._inner.normalizers.communication.known
        if room >= _MARGIN * need or taken < _NOTICEABLE_BYTES or not may_shrink:
            return
        if has_grown:  # no window was cut by this limit yet
            self._size.lower(None)
        elif largest is not None and largest.can_be_split:
            self._size.lower(largest)
        else:
            return
        logger.warning(
            "Iteration %d: other processes have taken %.2f GB of the device %s and left %.2f GB, "
            "and %.2f GB were needed. The micro-batch is halved before it fails",
            self.trainer.iter,
            taken / _GB,
            self._device,
            room / _GB,
            need / _GB,
        )
        release_memory(self._device, thorough=False)
