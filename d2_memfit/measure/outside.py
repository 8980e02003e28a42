# Copyright (c) the d2_memfit developers.
"""Memory of a process on a GPU in addition to its tensors."""

import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from ..common.units import MB
from ..memory import process_memory
from .calibration import workspaces_mb
from .items import Item, Record, Scale
from .peaks import wait_for
from .steps import Steps

__all__ = ["constants_of", "measure_outside"]

_TIMEOUT = timedelta(seconds=60)  # of ranks that cannot reach each other
_CONTEXT = "the first tensor"


def measure_outside(device: torch.device, scale: Scale) -> Iterator[Record]:
    """Measure memory outside the allocator, workspaces inside it, and NCCL's communicators.

    A new process uses more and more of CUDA.
    """
    yield from _in_processes(_use_more_and_more, 1, str(device), _free_bytes(device))
    there = torch.cuda.device_count() if device.type == "cuda" else 2  # in a rehearsal over gloo
    for num_ranks in (2, max(3, there)):
        if num_ranks > there:
            yield {"ranks": num_ranks, "not_measured": f"NCCL needs {num_ranks} GPUs, not {there}"}
            continue
        with tempfile.TemporaryDirectory() as folder:
            arguments = (device.type, num_ranks, f"file://{folder}/store")
            for record in _in_processes(_communicate, num_ranks, *arguments):
                yield {"ranks": num_ranks, **record}


def constants_of(records: Iterable[Record]) -> dict[str, Any]:
    """Constants of a device file, as far as they were measured.

    Args:
        records: of :func:`measure_outside`.
    """
    records = [r for r in records if "mb" in r]
    after = {r["after"]: r["mb"] for r in records if "after" in r}
    workspaces = [r["mb"] for r in records if "workspace" in r]
    nccl = [r["mb"] for r in records if "ranks" in r]
    constants: dict[str, Any] = {}
    if _CONTEXT in after:
        constants["context_mb"] = after[_CONTEXT]
    if len(after) > 1 and _CONTEXT in after:
        constants["kernels_mb"] = max(after.values()) - after[_CONTEXT]
    if workspaces:
        constants["cublas_workspace_mb"] = sum(workspaces)
    if nccl:
        constants["nccl_mb"] = [nccl[0], nccl[-1]]
    return constants


def _in_processes(function: Callable[..., None], number: int, *args: Any) -> Iterator[Record]:
    """Yield the records that a function sends from new processes; an error is a record, too."""
    receiver, sender = mp.get_context("spawn").Pipe(duplex=False)
    running = mp.spawn(function, (sender, *args), number, join=False)
    sender.close()
    with suppress(EOFError):
        while True:
            yield receiver.recv()
    try:
        while not running.join():
            pass
    except (mp.ProcessRaisedException, mp.ProcessExitedException) as e:
        yield {"error": str(e).strip().splitlines()[-1][:500]}


def _use_more_and_more(rank: int, sender: Connection, device_name: str, free_before: int) -> None:
    device = torch.device(device_name)
    scale = Scale.for_device(device)
    if device.type == "cuda":
        torch.cuda.set_device(device)

    def send(after: str) -> None:
        sender.send({"after": after, "mb": _taken_bytes(device, free_before) / MB})

    x = torch.zeros(1, device=device)
    send(_CONTEXT)
    torch.randn(256, 256, device=device) @ torch.randn(256, 256, device=device)
    send("a product of matrices (cuBLAS)")
    torch.nn.functional.conv2d(x.expand(1, 8, 32, 32), x.expand(8, 8, 3, 3))
    send("a convolution (cuDNN)")
    if device.type == "cuda":
        for name, megabytes in workspaces_mb(device).items():
            sender.send({"workspace": name, "mb": megabytes})
    for name, settings in {"": {}, " in float16": {"SOLVER.AMP.ENABLED": True}}.items():
        if name and device.type == "cpu":  # slow there
            continue
        one = {"SOLVER.IMS_PER_BATCH": 1, **settings}
        item = Item("outside", name, settings=one, evaluates=True)
        steps = Steps(item.job(device, scale), device)
        steps.step()
        send(f"training a Mask R-CNN{name}")
        steps.evaluate()
        send(f"evaluating it{name}")


def _communicate(rank: int, sender: Connection, kind: str, num_ranks: int, store: str) -> None:
    """Sum a tensor over the ranks; rank 0 sends the memory that this takes.

    Each rank has a GPU of its own, because NCCL refuses two ranks on one GPU.
    """
    device = torch.device(kind, rank) if kind == "cuda" else torch.device(kind)
    if kind == "cuda":
        torch.cuda.set_device(device)
    x = torch.ones(2**20, device=device)
    before = _taken_bytes(device, 0)
    backend = "nccl" if kind == "cuda" else "gloo"
    dist.init_process_group(backend, store, _TIMEOUT, num_ranks, rank)
    try:
        dist.all_reduce(x)
        wait_for(device)
        if rank == 0:
            mb = (_taken_bytes(device, 0) - before) / MB
            sender.send({"mb": mb})
        dist.barrier()
    finally:
        dist.destroy_process_group()


def _free_bytes(device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    torch.zeros(1, device=device)  # it makes the context
    wait_for(device)
    return torch.cuda.mem_get_info(device)[0]


def _taken_bytes(device: torch.device, free_before: int) -> int:
    """Bytes that this process takes outside the allocator; on a CPU, all its bytes.

    Args:
        free_before: free bytes of the device before this process, which leave out other processes.
    """
    if device.type != "cuda":
        return process_memory().data_bytes
    wait_for(device)
    free, _ = torch.cuda.mem_get_info(device)
    return free_before - free - torch.cuda.memory_reserved(device)
