# Copyright (c) the d2_memfit developers.
"""Hooks that enforce a budget, and make room when other processes take device memory."""

import logging
import math
from typing import Any

import torch
from torch import nn

from ...common.units import GB
from ...memory import available_host_bytes, device_memory, enforce_budget, release_memory
from .memory_hook import MemoryHook

__all__ = ["EnforceBudget", "MakeRoom"]

logger = logging.getLogger(__name__)

_PERIOD = 5  # iterations between looks at the device
_BUDGET_PERIOD = 100
_FIRST_ITERATIONS = 10  # these load kernels, cuBLAS handles and NCCL buffers
_MARGIN = 1.1  # times the memory that a micro-batch has needed
_NOTICEABLE_BYTES = 2**27  # taken by others


class EnforceBudget(MemoryHook):
    """Lowers the limit of a GPU's allocator as memory outside it grows.

    The limit set at the start cannot include kernels and buffers that are loaded at first use. This
    memory is measured after each forward and step of the first 10 iterations, then every 100.

    Args:
        budget_gb, device: as for :func:`~d2_memfit.memory.enforce_budget`.
    """

    def __init__(self, budget_gb: float, device: str) -> None:
        self._budget_gb = budget_gb
        self._device_name = device

    def after_step(self) -> None:
        done = self.trainer.iter + 1 - self.trainer.start_iter
        if done <= _FIRST_ITERATIONS or done % _BUDGET_PERIOD == 0:
            enforce_budget(self._budget_gb, self._device_name)
        if done == _FIRST_ITERATIONS:
            self._forward_hook.remove()  # later forwards load nothing new

    def after_forward(self, *_: Any) -> None:
        enforce_budget(self._budget_gb, self._device_name)


class MakeRoom(MemoryHook):
    """Halves the micro-batch before an error, if other processes leave less than it needs.

    On a GPU that a desktop shares, other programs take memory while training runs. Every few
    iterations, the hook adds the device's free memory and that of this process. It compares the sum
    with the most that micro-batches of this size have taken. The driver's counter is read, so
    nothing waits for the device. The micro-batch grows back as after an out-of-memory error. On the
    CPU, the memory is RAM, within the limits of cgroups.

    Register it on each rank. It needs an ``AccumulatingTrainer`` with recovery.
    """

    def __init__(self) -> None:
        self._needs: dict[float, int] = {}  # bytes, by the limit of micro-batches
        self._last = math.inf
        self._most_room = 0

    def after_step(self) -> None:
        done = self.trainer.iter + 1 - self.trainer.start_iter
        limit = self._inner.cutter.limit
        has_grown = limit > self._last
        self._last = limit
        if done >= _FIRST_ITERATIONS and (done % _PERIOD == 0 or has_grown):
            self._look(has_grown)

    def after_forward(self, model: nn.Module, *_: Any) -> None:
        if model.training:
            limit = self._inner.cutter.limit
            self._needs[limit] = max(self._needs.get(limit, 0), self._taken())

    def _taken(self) -> int:
        memory = device_memory(self._device)
        is_gpu = self._device.type == "cuda"
        return memory.reserved_bytes if is_gpu else memory.allocated_bytes

    def _look(self, has_grown: bool) -> None:
        is_gpu = self._device.type == "cuda"
        free = torch.cuda.mem_get_info(self._device)[0] if is_gpu else available_host_bytes()
        room = free + self._taken()
        need = self._needs.get(self._inner.cutter.limit, 0)
        self._most_room = max(self._most_room, room)
        taken = self._most_room - room
        largest = self._inner.recovery.largest
        # If ranks communicate in the forward, their micro-batches must stay equal.
        may_shrink = not self._inner.loss_rules.communication.known
        if room >= _MARGIN * need or taken < _NOTICEABLE_BYTES or not may_shrink:
            return
        if has_grown:  # no window was cut by this limit yet
            self._inner.cutter.lower(None)
        elif largest is not None and largest.can_be_split:
            self._inner.cutter.lower(largest)
        else:
            return
        logger.warning(
            "Iteration %d: other processes have taken %.2f GB of the device %s and left %.2f GB, "
            "but micro-batches need %.2f GB. The micro-batch is halved before it fails",
            self.trainer.iter,
            taken / GB,
            self._device,
            room / GB,
            need / GB,
        )
        release_memory(self._device, thorough=False)
