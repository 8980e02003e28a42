"""Where memory goes, how it is limited, and how it runs out."""

from .budget import (
    check_budget,
    cuda_context_bytes,
    enforce_budget,
    return_large_blocks,
    use_expandable_segments,
)
from .census import TensorCensus, bytes_by_kind, holders, live_tensors
from .host import available_host_bytes
from .meter import (
    DeviceMemory,
    ProcessMemory,
    TensorMeter,
    device_memory,
    is_on_host,
    on_host,
    process_memory,
    storages,
    used_bytes,
)
from .oom import error_line, is_loader_out_of_memory, is_out_of_memory
from .owners import OwnerMeter
from .pressure import RisingRetries
from .release import release_memory
from .trend import steady_growth

__all__ = [
    "DeviceMemory",
    "OwnerMeter",
    "ProcessMemory",
    "RisingRetries",
    "TensorCensus",
    "TensorMeter",
    "available_host_bytes",
    "bytes_by_kind",
    "check_budget",
    "cuda_context_bytes",
    "device_memory",
    "enforce_budget",
    "error_line",
    "holders",
    "is_loader_out_of_memory",
    "is_on_host",
    "is_out_of_memory",
    "live_tensors",
    "on_host",
    "process_memory",
    "release_memory",
    "return_large_blocks",
    "steady_growth",
    "storages",
    "use_expandable_segments",
    "used_bytes",
]
