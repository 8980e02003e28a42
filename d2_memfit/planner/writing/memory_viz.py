# Copyright (c) the d2_memfit developers.
"""A dry run in the format of PyTorch's memory snapshots."""

import pickle
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Union

from ...common.files import output_file
from ..device import Block, CachingAllocator
from ..dry_run import Allocate, Allocation, Free

__all__ = ["memory_snapshot", "write_memory_snapshot"]

_Dict = dict[str, Any]


def write_memory_snapshot(events: Iterable[Union[Allocate, Free]], path: Path) -> None:
    """Write :func:`memory_snapshot` like ``torch.cuda.memory._dump_snapshot``."""
    with output_file(path) as f:
        pickle.dump(memory_snapshot(events), f)


def memory_snapshot(events: Iterable[Union[Allocate, Free]]) -> _Dict:
    """The result of ``torch.cuda.memory._snapshot()`` after these events.

    Addresses are those of PyTorch's caching allocator without a limit. In place of a call stack, an
    allocation has its tensor, module, owner and phase. Its time is its number.

    Source of the format: torch/cuda/memory.py and torch/cuda/_memory_viz.py.
    """
    allocator = CachingAllocator()
    blocks: dict[Allocation, Block] = {}
    segments: list[_Dict] = []
    trace: list[_Dict] = []

    def note(action: str, address: int, size: int, frames: list[_Dict]) -> None:
        times = {"time_us": len(trace), "stream": 0}
        trace.append({"action": action, "addr": address, "size": size, "frames": frames, **times})

    for event in events:
        a = event.allocation
        if isinstance(event, Allocate) and a.num_bytes:
            reserved = allocator.reserved_bytes
            block = blocks[a] = allocator.allocate(a.num_bytes)
            added = allocator.reserved_bytes - reserved  # segments are consecutive
            if added:
                segments.append(_segment(reserved, added, block.is_small))
                note("segment_alloc", reserved, added, [])
            note("alloc", block.address, a.num_bytes, _frames(a))
            trace[-1]["category"] = a.owner
        elif isinstance(event, Free) and a in blocks:
            block = blocks.pop(a)
            for action in ("free_requested", "free_completed"):
                note(action, block.address, a.num_bytes, _frames(a))
            allocator.free(block)
    _fill(segments, blocks)
    return {"segments": segments, "device_traces": [trace]}


def _frames(a: Allocation) -> list[_Dict]:
    """Frames in the form of a call stack, the innermost first."""
    frames = [("tensor", str(a)), ("module", a.module), ("owner", a.owner), ("phase", a.phase)]
    return [{"filename": what, "line": 0, "name": name} for what, name in frames if name]


def _segment(address: int, size: int, is_small: bool) -> _Dict:
    return {
        "device": 0,
        "address": address,
        "total_size": size,
        "allocated_size": 0,
        "active_size": 0,
        "requested_size": 0,
        "stream": 0,
        "segment_type": "small" if is_small else "large",
        "segment_pool_id": (0, 0),
        "is_expandable": False,
        "frames": [],
        "blocks": [],
    }


def _fill(segments: list[_Dict], live: dict[Allocation, Block]) -> None:
    """Add the blocks that are alive at the end, and the free memory between them."""
    in_order = sorted(live.items(), key=lambda item: item[1].address)
    for segment in segments:
        begin = segment["address"]
        end = begin + segment["total_size"]
        for a, block in in_order:
            if not segment["address"] <= block.address < end:
                continue
            _add_free(segment, begin, block.address)
            segment["blocks"].append(
                {
                    "address": block.address,
                    "size": block.size,
                    "requested_size": a.num_bytes,
                    "state": "active_allocated",
                    "frames": _frames(a),
                }
            )
            begin = block.address + block.size
            segment["allocated_size"] += block.size
            segment["active_size"] += block.size
            segment["requested_size"] += a.num_bytes
        _add_free(segment, begin, end)


def _add_free(segment: _Dict, begin: int, end: int) -> None:
    if begin < end:
        free = {"requested_size": 0, "state": "inactive", "frames": []}
        segment["blocks"].append({"address": begin, "size": end - begin, **free})
