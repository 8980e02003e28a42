# Copyright (c) the d2_memfit developers.
"""Models of memory allocators: rounding, and free memory between blocks."""

from bisect import bisect_left, insort
from dataclasses import dataclass
from typing import Optional

from ..common import MB

__all__ = ["Block", "CachingAllocator", "PageAllocator"]

# In bytes, from c10/cuda/CUDACachingAllocator.cpp; unchanged since PyTorch 1.3.
_ROUND = 512  # kMinBlockSize
_SMALL = 2**20  # kSmallSize: the largest block of the small pool
_SMALL_SEGMENT = 2 * MB  # kSmallBuffer
_LARGE_SEGMENT = 20 * MB  # kLargeBuffer, for blocks below the next
_MIN_LARGE = 10 * MB  # kMinLargeAlloc
_ROUND_LARGE = 2 * MB  # kRoundLarge, for the segments of larger blocks
_PAGE = 4096  # page of the system's memory


@dataclass(eq=False)
class Block:
    """A part of a segment. Its neighbours in the segment are before and after it."""

    size: int
    is_small: bool  # whether it belongs to the pool of small blocks
    address: int
    is_free: bool = True
    before: Optional["Block"] = None
    after: Optional["Block"] = None


class CachingAllocator:
    """PyTorch's GPU allocator, without a limit: it gives no memory back.

    Args:
        expandable: whether each pool is one segment that grows, as with PyTorch's
            ``expandable_segments``.

    Attributes:
        allocated_bytes: the current value, as of ``torch.cuda.memory_allocated``, with remainders
            that are too small for another block.
        peak_allocated_bytes, peak_reserved_bytes: the peaks of it and of
            ``torch.cuda.memory_reserved``.
    """

    def __init__(self, expandable: bool = False) -> None:
        self.allocated_bytes = self.peak_allocated_bytes = self.peak_reserved_bytes = 0
        self._expandable = expandable
        # Size, address and block of free memory in the pools of small and large blocks, sorted.
        self._free: dict[bool, list[tuple[int, int, Block]]] = {True: [], False: []}
        self._last: dict[bool, Optional[Block]] = {True: None, False: None}  # of growing segments

    def allocate(self, num_bytes: int) -> Block:
        """Allocate a block, the smallest free one that is large enough, or new memory."""
        size = max(_round_up(num_bytes, _ROUND), _ROUND)
        is_small = size <= _SMALL
        free = self._free[is_small]
        i = bisect_left(free, (size,))
        block = free.pop(i)[2] if i < len(free) else self._reserve(size, is_small)
        rest = block.size - size
        if rest >= _ROUND if is_small or self._expandable else rest > _SMALL:
            self._split(block, size)
        return self._take(block)

    def _take(self, block: Block) -> Block:
        block.is_free = False
        self.allocated_bytes += block.size
        self.peak_allocated_bytes = max(self.peak_allocated_bytes, self.allocated_bytes)
        return block

    def free(self, block: Block) -> None:
        self.allocated_bytes -= block.size
        for neighbour in (block.before, block.after):
            if neighbour is not None and neighbour.is_free:
                self._merge(block, neighbour)
        self._put(block)

    def _put(self, block: Block) -> None:
        block.is_free = True
        insort(self._free[block.is_small], (block.size, block.address, block))

    def _split(self, block: Block, size: int) -> None:
        rest = Block(block.size - size, block.is_small, block.address + size)
        rest.before, rest.after, block.after = block, block.after, rest
        if rest.after is not None:
            rest.after.before = rest
        if self._last[block.is_small] is block:
            self._last[block.is_small] = rest
        block.size = size
        self._put(rest)

    def _merge(self, block: Block, neighbour: Block) -> None:
        """Merge a free neighbour into the block."""
        free = self._free[neighbour.is_small]
        del free[bisect_left(free, (neighbour.size, neighbour.address))]
        if neighbour is block.before:
            block.address, block.before = neighbour.address, neighbour.before
        else:
            block.after = neighbour.after
        if block.before is not None:
            block.before.after = block
        if block.after is not None:
            block.after.before = block
        if self._last[block.is_small] is neighbour:
            self._last[block.is_small] = block
        block.size += neighbour.size

    def _reserve(self, size: int, is_small: bool) -> Block:
        """Reserve memory from the device as a free block: a segment, or more of one."""
        last = self._last[is_small]
        if self._expandable:
            there = last.size if last is not None and last.is_free else 0
            size = _round_up(size - there, _SMALL_SEGMENT if is_small else _LARGE_SEGMENT)
        elif is_small or size < _MIN_LARGE:
            size = _SMALL_SEGMENT if is_small else _LARGE_SEGMENT
        else:
            size = _round_up(size, _ROUND_LARGE)
        block = Block(size, is_small, self.peak_reserved_bytes)
        self.peak_reserved_bytes += size
        if self._expandable:
            self._last[is_small] = block
            if last is not None:
                last.after, block.before = block, last
                if last.is_free:
                    self._merge(block, last)
        return block


class PageAllocator(CachingAllocator):
    """The system's allocator: whole pages, returned as soon as they are free.

    On Linux this holds for blocks above a threshold; ``enforce_budget`` sets a low one.
    """

    def allocate(self, num_bytes: int) -> Block:
        block = self._take(Block(_round_up(num_bytes, _PAGE), False, 0))
        self.peak_reserved_bytes = self.peak_allocated_bytes
        return block

    def free(self, block: Block) -> None:
        self.allocated_bytes -= block.size


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
