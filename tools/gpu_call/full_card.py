# Copyright (c) the d2_memfit developers.
"""Errors of a full card: their texts, and whether the package recognises them.

Each function makes what is needed before the card is full. It returns the call that then fails, and
the bytes of blocks that stay free in the allocator's cache.
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import conv2d

from d2_memfit.common.units import GB, MB
from d2_memfit.measure.items import Record
from d2_memfit.measure.steps import Steps
from d2_memfit.memory import is_out_of_memory, release_memory

from .card import CARD, REHEARSE, full_size, job_of

Prepared = tuple[Callable[[], Any], list[int]]


def allocator() -> Prepared:
    return partial(torch.empty, GB, dtype=torch.uint8, device=CARD), []


def convolution() -> Prepared:
    number, channels, *size = full_size((8, 256, 200, 336), (2, 8, 16, 16))
    dtype = full_size(torch.float16, torch.float32)
    x = torch.randn(number, channels, *size, device=CARD, dtype=dtype)
    weight = torch.randn(channels, channels, 3, 3, device=CARD, dtype=dtype)
    call = partial(conv2d, x, weight, padding=1)
    return call, [call().nbytes]


def cublas() -> Prepared:
    x, y = torch.ones(2, 512, 512, device=CARD)
    return partial(torch.mm, x, x, out=y), []


def cudnn() -> Prepared:
    x, weight = torch.ones(1, 8, 8, 8, device=CARD), torch.ones(8, 8, 3, 3, device=CARD)
    return partial(conv2d, x, weight), [MB]


def kernels() -> Prepared:
    x, y = torch.rand(2, 512, 512, device=CARD)

    def load() -> None:  # at their first use
        for name in ("erfinv", "lgamma", "digamma", "i0", "sinc", "trunc", "expm1"):
            getattr(torch, name)(x, out=y)

    return load, []


def step() -> Prepared:
    return Steps(job_of(2), CARD).step, full_size([GB // 2, GB // 2], [])


def context() -> Prepared:
    def start() -> None:
        code = f"import torch; torch.zeros(1, device={str(CARD)!r})"
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, capture_output=True, check=False, text=True, timeout=40)
        if done.returncode:
            raise RuntimeError((done.stderr.strip().splitlines() or ["?"])[-1])

    return start, []


def nccl() -> Prepared:
    store = os.path.join(tempfile.mkdtemp(), "store")
    backend = full_size("nccl", "gloo")
    dist.init_process_group(backend, f"file://{store}", world_size=1, rank=0)
    return partial(dist.all_reduce, torch.ones(2**20, device=CARD)), []


def fft() -> Prepared:
    x = torch.rand(1000, 1009, device=CARD)
    y = torch.empty(1000, 1009, device=CARD, dtype=torch.complex64)
    return partial(torch.fft.fft, x, out=y), []


def solver() -> Prepared:
    x, y = torch.eye(700, device=CARD).repeat(2, 1, 1)
    return partial(torch.linalg.cholesky, x, out=y), []


def host() -> Prepared:
    return partial(torch.empty, 2**44, dtype=torch.uint8, pin_memory=True), []


def full(prepare: Callable[[], Prepared]) -> Iterator[Record]:
    """The error, whether it is recognised, and whether the card works afterwards."""
    if REHEARSE:
        total = torch.cuda.get_device_properties(CARD).total_memory
        torch.cuda.set_per_process_memory_fraction(160 * MB / total)
    call, leave = prepare()
    torch.cuda.empty_cache()
    row: Record = {"recognised": None, "text": "no error"}
    blocks = fill(leave)
    try:
        call()
        torch.cuda.synchronize(CARD)
    except Exception as e:
        text = " ".join(str(e).split())[:500]
        row = {"recognised": is_out_of_memory(e), "type": type(e).__name__, "text": text}
    blocks.clear()
    try:
        release_memory(CARD)
        torch.zeros(1, device=CARD).item()
    except RuntimeError as e:
        row["error_after"] = str(e)[:200]
    yield row


def fill(leave: list[int]) -> list[torch.Tensor]:
    """Blocks that fill the card. As many blocks as ``leave`` says are free again."""
    left = [torch.empty(n, dtype=torch.uint8, device=CARD) for n in leave]
    blocks, size = [], full_size(GB, 16 * MB)
    while size >= full_size(2 * MB, MB):
        try:
            blocks.append(torch.empty(size, dtype=torch.uint8, device=CARD))
        except RuntimeError:
            size //= 4
    left.clear()
    return blocks
