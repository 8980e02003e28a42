# Copyright (c) the d2_memfit developers.
"""A GPU that is made up, for code that runs on CUDA only.

Tensors are on the CPU and say that they are on ``cuda:0``. ``torch.cuda`` says what a meter counts,
and a limit raises out-of-memory errors. This shows wrong names, arguments and order. It does not
show what CUDA does: no kernels, no workspaces, no fragments, no streams.
"""

from contextlib import ExitStack, contextmanager
from functools import wraps
from types import SimpleNamespace
from unittest.mock import patch

import torch

from d2_memfit.memory import OwnerMeter, TensorMeter
from d2_memfit.planner.stand_ins import cuda_as_cpu

GB = 2**30
DEVICE = torch.device("cuda", 0)


class Card(TensorMeter):
    """The card's allocator: all tensors from now on, except those of ``on_host``.

    Attributes:
        outside_bytes: what the context takes; a test may let it grow.
        retries: allocations for which the cache was given back.
    """

    def __init__(self, total_gb=24.0, outside_gb=0.5):
        super().__init__()
        self.total_bytes = int(total_gb * GB)
        self.outside_bytes = int(outside_gb * GB)
        self.share = 1.0
        self.retries = 0
        self.out_of_memory = 0
        self.reserved_bytes = self.peak_reserved_bytes = 0

    def _count(self, storage):
        if torch.cuda.memory_allocated != self.memory_allocated:
            return  # a dry run, whose tensors are on the CPU
        super()._count(storage)
        if self.live_bytes > self.share * self.total_bytes:
            self.out_of_memory += 1
            raise torch.OutOfMemoryError("CUDA out of memory. The card is made up.")
        self.reserved_bytes = max(self.reserved_bytes, self.live_bytes)
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)

    def memory_allocated(self, device=None):
        return self.live_bytes

    def mem_get_info(self, device=None):
        taken = self.outside_bytes + self.reserved_bytes
        return self.total_bytes - taken, self.total_bytes

    def memory_stats(self, device=None):
        reserved = {"current": self.reserved_bytes, "peak": self.peak_reserved_bytes}
        live = {"current": self.live_bytes, "peak": self.peak_bytes}
        kinds = {"allocated": live, "active": live, "reserved": reserved}
        stats = {f"{k}_bytes.all.{name}": n for k, v in kinds.items() for name, n in v.items()}
        return {**stats, "num_alloc_retries": self.retries, "num_ooms": self.out_of_memory}

    def reset_peak_memory_stats(self, device=None):
        self.peak_bytes = self.live_bytes
        self.peak_reserved_bytes = self.reserved_bytes

    def empty_cache(self):
        self.reserved_bytes = self.live_bytes

    def limit(self, share, device=None):
        assert isinstance(share, float)
        assert 0 <= share <= 1
        self.share = share

    def functions(self):
        """Replacements of functions in torch.cuda."""
        properties = SimpleNamespace(
            name="Made-up", total_memory=self.total_bytes, major=8, minor=6
        )
        return {
            "is_available": lambda: True,
            "is_initialized": lambda: True,
            "_is_in_bad_fork": lambda: False,
            "_lazy_init": lambda: None,
            "device_count": lambda: 1,
            "current_device": lambda: 0,
            "get_device_properties": lambda device=None: properties,
            "get_device_name": lambda device=None: properties.name,
            "get_device_capability": lambda device=None: (8, 6),
            "is_bf16_supported": lambda including_emulation=True: True,
            "mem_get_info": self.mem_get_info,
            "memory_stats": self.memory_stats,
            "memory_allocated": self.memory_allocated,
            "memory_reserved": lambda device=None: self.reserved_bytes,
            "max_memory_allocated": lambda device=None: self.peak_bytes,
            "max_memory_reserved": lambda device=None: self.peak_reserved_bytes,
            "reset_peak_memory_stats": self.reset_peak_memory_stats,
            "empty_cache": self.empty_cache,
            "synchronize": lambda device=None: None,
            "set_per_process_memory_fraction": self.limit,
            "get_per_process_memory_fraction": lambda device=None: self.share,
            "get_rng_state": lambda device=None: torch.get_rng_state(),
            "set_rng_state": lambda state, device=None: None,
            "manual_seed": lambda seed: None,
            "manual_seed_all": lambda seed: None,
        }


def _pageable(function):
    @wraps(function)
    def make(*args, pin_memory=False, **kwargs):
        return function(*args, **kwargs)

    return make


def _of_cpu(init):
    """Storages still say that they are on the CPU."""

    @wraps(init)
    def init_on_cpu(self, *args, **kwargs):
        init(self, *args, **kwargs)
        self._device = torch.device("cpu")

    return init_on_cpu


def _dump(file):
    with open(file, "w") as f:
        f.write("made up")


@contextmanager
def made_up_card(**options):
    """While open, there is a card; yields it."""
    card = Card(**options)
    with ExitStack() as stack:
        # Dry runs open cuda_as_cpu again, inside: there the memory is their own.
        stack.enter_context(cuda_as_cpu())
        for name, function in card.functions().items():
            stack.enter_context(patch.object(torch.cuda, name, function, create=True))
        for name in ("empty", "empty_like"):
            function = _pageable(getattr(torch, name))
            stack.enter_context(patch.object(torch, name, function))
        for name, value in (("device", DEVICE), ("is_cuda", True)):
            there = property(lambda tensor, value=value: value)
            stack.enter_context(patch.object(torch.Tensor, name, there, create=True))
        stack.enter_context(patch.object(OwnerMeter, "__init__", _of_cpu(OwnerMeter.__init__)))
        clear = patch.object(torch._C, "_cuda_clearCublasWorkspaces", lambda: None, create=True)
        stack.enter_context(clear)
        memory = torch.cuda.memory
        stack.enter_context(patch.object(memory, "_record_memory_history", lambda **_: None))
        stack.enter_context(patch.object(memory, "_dump_snapshot", _dump))
        stack.enter_context(card)
        yield card
