# Copyright (c) the d2_memfit developers.
"""Measurements of a device, for a device file of its own."""

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
from torch.nn.functional import conv2d

from ..common.units import GB, MB
from ..compat.pytorch import clear_cublas_workspaces
from ..planner.device import DeviceModel
from .peaks import median_seconds, outside_bytes, wait_for

__all__ = ["calibrate", "workspaces_mb"]


# Convolutions of Detectron2's models: images, channels, channels of the result, height, width, and
# the size of the filter. They are from FPN's largest level, backbones and mask heads.
_CONVOLUTIONS = (
    (2, 256, 256, 200, 336, 3),
    (2, 64, 64, 200, 336, 3),
    (2, 256, 64, 200, 336, 1),
    (2, 128, 128, 100, 168, 3),
    (2, 512, 512, 25, 42, 3),
    (128, 256, 256, 14, 14, 3),
    (128, 256, 80, 28, 28, 1),
)


def calibrate(device: torch.device, seconds: float = 1.0) -> dict[str, Any]:
    """Measure the values of a device file, as far as possible.

    Nothing else should run on the GPU meanwhile. Values that cannot be measured are the family's:
    on a CPU all but the speeds. So are the seconds of an operator, which takes more time in a
    model than alone.

    Args:
        seconds: duration of the measurement of each of six speeds.
    """
    family = DeviceModel.load("cpu" if device.type == "cpu" else "cuda")
    values = {
        **{k: v for k, v in asdict(family).items() if k not in ("name", "is_this_process")},
        "description": f"this {device.type.upper()}",
        "context_mb": None,
        "flops_per_s": {
            name: _flops_per_s(name, device, seconds) if _computes_in(name, device) else value
            for name, value in family.flops_per_s.items()
        },
        "bytes_per_s": _bytes_per_s(device, seconds),
        "host_bytes_per_s": _host_bytes_per_s(device, seconds),
        "is_measured": True,
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        values.update(
            description=properties.name,
            device_name=properties.name,
            compute_capability=f"{properties.major}.{properties.minor}",
            memory_gb=round(properties.total_memory / GB, 2),
            convolution_workspace=_convolution_workspace(device),
            cublas_workspace_mb=sum(workspaces_mb(device).values()),
            context_mb=outside_bytes(device) / MB,
            context_is_measured=True,
        )
    return values


def _computes_in(dtype_name: str, device: torch.device) -> bool:
    """Whether the device computes in a dtype; cuDNN has bfloat16 convolutions from Ampere on."""
    if dtype_name != "bfloat16" or device.type == "cpu":
        return True
    return torch.cuda.is_bf16_supported(including_emulation=False)


def _flops_per_s(dtype_name: str, device: torch.device, seconds: float) -> float:
    """Speed of a convolution of FPN, forward and backward."""
    uses_tf32 = dtype_name == "tf32"
    dtype = torch.float32 if uses_tf32 else getattr(torch, dtype_name)
    num_images, size = (4, 96) if device.type == "cuda" else (1, 24)
    shape = (num_images, 256, size, size)
    x = torch.randn(*shape, device=device, dtype=dtype, requires_grad=True)
    weight = torch.randn(256, 256, 3, 3, device=device, dtype=dtype, requires_grad=True)

    def run() -> None:
        conv2d(x, weight, padding=1).sum().backward()

    with torch.backends.cudnn.flags(enabled=True, allow_tf32=uses_tf32):
        return 3 * 2 * x.numel() * 256 * 9 / _seconds(run, device, seconds)


def _bytes_per_s(device: torch.device, seconds: float) -> float:
    x = torch.empty(64 * MB, dtype=torch.uint8, device=device)
    y = torch.empty_like(x)
    return 2 * x.nbytes / _seconds(lambda: y.copy_(x), device, seconds)


def _host_bytes_per_s(device: torch.device, seconds: float) -> float:
    x = torch.empty(64 * MB, dtype=torch.uint8, device=device)
    host = torch.empty(64 * MB, dtype=torch.uint8, pin_memory=device.type == "cuda")
    return x.nbytes / _seconds(lambda: host.copy_(x, non_blocking=True), device, seconds)


def _seconds(run: Callable[[], Any], device: torch.device, seconds: float) -> float:
    run()
    return median_seconds(run, device, seconds)


def _convolution_workspace(device: torch.device) -> str:
    """The name in ``WORKSPACES`` that is nearer to what convolutions take in addition."""
    taken = copies = 0
    for num_images, channels, channels_out, height, width, kernel in _CONVOLUTIONS:
        x = torch.randn(num_images, channels, height, width, device=device)
        weight = torch.randn(channels_out, channels, kernel, kernel, device=device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        y = conv2d(x, weight, padding=kernel // 2)
        wait_for(device)
        taken += torch.cuda.max_memory_allocated(device) - before - y.nbytes
        copies += x.nbytes + weight.nbytes + y.nbytes
    return "layout" if 2 * taken > copies else "none"


def workspaces_mb(device: torch.device) -> dict[str, float]:
    """Memory that the allocator keeps for libraries after a forward and a backward, in MB.

    The backward runs in another thread, which has its own workspace. Tensors are freed at once.
    """
    x = torch.randn(512, 512, device=device, requires_grad=True)
    x.grad = torch.zeros_like(x)
    weight, bias = torch.randn(512, 512, device=device), torch.zeros(512, device=device)
    clear_cublas_workspaces()
    workspaces = {}
    for name, product in {
        "cuBLAS": lambda: x @ weight,
        "cuBLASLt": lambda: torch.nn.functional.linear(x, weight, bias),
    }.items():
        wait_for(device)
        before = torch.cuda.memory_allocated(device)
        product().sum().backward()
        wait_for(device)
        workspaces[name] = (torch.cuda.memory_allocated(device) - before) / MB
    return workspaces
