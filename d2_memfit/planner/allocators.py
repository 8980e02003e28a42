# Copyright (c) the d2_memfit developers.
"""Models of memory allocators: rounding, and free memory between blocks."""

from bisect import bisect_left, insort
from typing import NamedTuple

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


class Block(NamedTuple):
    """Memory from one address to another, in the pool of small blocks or in that of large ones."""

    begin: int
    end: int
    is_small: bool

    @property
    def size(self) -> int:
        return self.end - self.begin


class _Pool:
    """The free memory of small or of large blocks.

    Attributes:
        end: the first address after all segments.
        free: sizes and addresses, sorted. Neighbours are one piece.
        begins, ends: where free memory begins, by its end; and where it ends.
    """

    def __init__(self) -> None:
        self.end = 0
        self.free: list[tuple[int, int]] = []
        self.begins: dict[int, int] = {}
        self.ends: dict[int, int] = {}

    def put(self, begin: int, end: int) -> None:
        first, last = self.begins.get(begin, begin), self.ends.get(end, end)
        if first < begin:
            self.take(first, begin)
        if last > end:
            self.take(end, last)
        insort(self.free, (last - first, first))
        self.begins[last], self.ends[first] = first, last

    def take(self, begin: int, end: int) -> None:
        del self.free[bisect_left(self.free, (end - begin, begin))]
        del self.begins[end], self.ends[begin]


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
        self._pools = {True: _Pool(), False: _Pool()}  # of small and of large blocks

    def allocate(self, num_bytes: int) -> Block:
        """Allocate a block, in the smallest free memory that is large enough, or in new memory."""
        size = max(_round_up(num_bytes, _ROUND), _ROUND)
        is_small = size <= _SMALL
        pool = self._pools[is_small]
        if not pool.free or pool.free[-1][0] < size:
            self._reserve(size, is_small)
        there, begin = pool.free[bisect_left(pool.free, (size,))]
        pool.take(begin, begin + there)
        rest = there - size
        if rest >= _ROUND if is_small or self._expandable else rest > _SMALL:
            pool.put(begin + size, begin + there)
            there = size
        return self._count(Block(begin, begin + there, is_small))

    def _count(self, block: Block) -> Block:
        self.allocated_bytes += block.size
        self.peak_allocated_bytes = max(self.peak_allocated_bytes, self.allocated_bytes)
        return block

    def free(self, block: Block) -> None:
        self.allocated_bytes -= block.size
        self._pools[block.is_small].put(block.begin, block.end)

    def _reserve(self, size: int, is_small: bool) -> None:
        """Reserve memory from the device: a segment, or more of one."""
        pool = self._pools[is_small]
        begin = pool.end if self._expandable else pool.end + 1  # segments have no neighbours
        if self._expandable:
            there = pool.end - pool.begins.get(pool.end, pool.end)
            size = _round_up(size - there, _SMALL_SEGMENT if is_small else _LARGE_SEGMENT)
        elif is_small or size < _MIN_LARGE:
            size = _SMALL_SEGMENT if is_small else _LARGE_SEGMENT
        else:
            size = _round_up(size, _ROUND_LARGE)
        pool.end = begin + size
        pool.put(begin, pool.end)
        self.peak_reserved_bytes += size


class PageAllocator(CachingAllocator):
    """The system's allocator: whole pages, returned as soon as they are free.

    On Linux this holds for blocks above a threshold; ``enforce_budget`` sets a low one.
    """

    def allocate(self, num_bytes: int) -> Block:
        block = self._count(Block(0, _round_up(num_bytes, _PAGE), False))
        self.peak_reserved_bytes = self.peak_allocated_bytes
        return block

    def free(self, block: Block) -> None:
        self.allocated_bytes -= block.size


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
