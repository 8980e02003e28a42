# Copyright (c) the d2_memfit developers.
"""Measuring and limiting memory, and handling out-of-memory errors."""

from .allocator import (
    limit_cudnn_cache,
    limit_onednn_cache,
    segments_expand,
    take_blas_buffer,
    use_expandable_segments,
)
from .budget import (
    auto_budget_gb,
    check_budget,
    cuda_context_bytes,
    enforce_budget,
    return_large_blocks,
)
from .census import TensorCensus, bytes_by_kind, holders, live_tensors
from .containers import GrowingContainers
from .host import available_host_bytes
from .meter import TensorMeter, have_operators, is_on_host, on_host, storages, tensors_in
from .oom import (
    RisingRetries,
    error_line,
    is_killed_worker,
    is_loader_out_of_memory,
    is_lost_rank,
    is_out_of_memory,
    release_memory,
    with_room,
)
from .owners import OwnerMeter
from .readings import DeviceMemory, ProcessMemory, device_memory, process_memory, used_bytes
from .run_record import RunRecord, device_and_software, keep_record, records_folder, records_here
from .trend import steady_growth

__all__ = [
    "DeviceMemory",
    "GrowingContainers",
    "OwnerMeter",
    "ProcessMemory",
    "RisingRetries",
    "RunRecord",
    "TensorCensus",
    "TensorMeter",
    "auto_budget_gb",
    "available_host_bytes",
    "bytes_by_kind",
    "check_budget",
    "cuda_context_bytes",
    "device_and_software",
    "device_memory",
    "enforce_budget",
    "error_line",
    "have_operators",
    "holders",
    "is_killed_worker",
    "is_loader_out_of_memory",
    "is_lost_rank",
    "is_on_host",
    "is_out_of_memory",
    "keep_record",
    "limit_cudnn_cache",
    "limit_onednn_cache",
    "live_tensors",
    "on_host",
    "process_memory",
    "records_folder",
    "records_here",
    "release_memory",
    "return_large_blocks",
    "segments_expand",
    "steady_growth",
    "storages",
    "take_blas_buffer",
    "tensors_in",
    "use_expandable_segments",
    "used_bytes",
    "with_room",
]
