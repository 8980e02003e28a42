"""Where memory goes, how it is limited, and how it runs out."""

from .budget import check_budget, enforce_budget, use_expandable_segments
from .meter import DeviceMemory, ProcessMemory, TensorMeter, device_memory, process_memory
from .oom import error_line, is_loader_out_of_memory, is_out_of_memory
from .pressure import RisingRetries
from .release import release_memory

__all__ = [
    "DeviceMemory",
    "ProcessMemory",
    "RisingRetries",
    "TensorMeter",
    "check_budget",
    "device_memory",
    "enforce_budget",
    "error_line",
    "is_loader_out_of_memory",
    "is_out_of_memory",
    "process_memory",
    "release_memory",
    "use_expandable_segments",
]
