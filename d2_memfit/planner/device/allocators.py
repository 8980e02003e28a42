# Copyright (c) the d2_memfit developers.
"""Models of memory allocators: rounding, and free memory between blocks."""

from bisect import bisect_left, insort
from dataclasses import dataclass
from typing import Optional

from ...common.units import MB

__all__ = ["Block", "CachingAllocator", "DoesNotFit", "PageAllocator"]

# In bytes, from c10/cuda/CUDACachingAllocator.cpp; unchanged since PyTorch 1.3.
_ROUND = 512  # kMinBlockSize
_SMALL = 2**20  # kSmallSize: the largest block of the small pool
_SMALL_SEGMENT = 2 * MB  # kSmallBuffer
_LARGE_SEGMENT = 20 * MB  # kLargeBuffer, for blocks below the next
_MIN_LARGE = 10 * MB  # kMinLargeAlloc
_ROUND_LARGE = 2 * MB  # kRoundLarge, for the segments of larger blocks
_PAGE = 4096  # page of the system's memory


class DoesNotFit(Exception):
    """The limit is too low for the memory that must be reserved."""


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
    """PyTorch's GPU allocator, which returns memory only when a limit is reached.

    Args:
        limit_bytes: bytes that it may reserve; None is no limit.
        expandable: whether each pool is one segment that grows, as with PyTorch's
            ``expandable_segments``.

    Attributes:
        allocated_bytes, reserved_bytes: current values, as of ``torch.cuda.memory_allocated`` (with
            remainders that are too small for another block) and ``torch.cuda.memory_reserved``.
        peak_allocated_bytes, peak_reserved_bytes: their peaks.
    """

    def __init__(self, limit_bytes: Optional[int] = None, expandable: bool = False) -> None:
        self.allocated_bytes = self.peak_allocated_bytes = 0
        self.reserved_bytes = self.peak_reserved_bytes = 0
        self._limit_bytes = limit_bytes
        self._expandable = expandable
        # Size, address and block of free memory in the pools of small and large blocks, sorted.
        self._free: dict[bool, list[tuple[int, int, Block]]] = {True: [], False: []}
        self._last: dict[bool, Optional[Block]] = {True: None, False: None}  # of growing segments
        self._next_address = 0

    def allocate(self, num_bytes: int) -> Block:
        """Allocate a block.

        Raises:
            DoesNotFit: the limit is too low.
        """
        size = max(_round_up(num_bytes, _ROUND), _ROUND)
        is_small = size <= _SMALL
        block = self._best_fit(size, is_small) or self._reserve(size, is_small)
        remaining = block.size - size
        if remaining >= _ROUND if is_small or self._expandable else remaining > _SMALL:
            self._split(block, size)
        block.is_free = False
        self.allocated_bytes += block.size
        self.peak_allocated_bytes = max(self.peak_allocated_bytes, self.allocated_bytes)
        return block

    def free(self, block: Block) -> None:
        self.allocated_bytes -= block.size
        for neighbour in (block.before, block.after):
            if neighbour is not None and neighbour.is_free:
                self._take(neighbour)
                self._merge(block, neighbour)
        self._put(block)

    def _best_fit(self, size: int, is_small: bool) -> Optional[Block]:
        free = self._free[is_small]
        i = bisect_left(free, (size,))
        return free.pop(i)[2] if i < len(free) else None

    def _put(self, block: Block) -> None:
        block.is_free = True
        insort(self._free[block.is_small], (block.size, block.address, block))

    def _take(self, block: Block) -> None:
        free = self._free[block.is_small]
        del free[bisect_left(free, (block.size, block.address))]

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
        """Reserve memory from the device as a free block."""
        if self._expandable:
            return self._grow(size, is_small)
        if is_small:
            size = _SMALL_SEGMENT
        elif size < _MIN_LARGE:
            size = _LARGE_SEGMENT
        else:
            size = _round_up(size, _ROUND_LARGE)
        self._ask_device(size)
        return self._new_block(size, is_small)

    def _grow(self, size: int, is_small: bool) -> Block:
        if not self._has_room(self._missing(size, is_small)):
            self._give_back()  # perhaps including the free end of this segment
        added = self._missing(size, is_small)
        self._ask_device(added)
        last = self._last[is_small]
        block = self._new_block(added, is_small)
        self._last[is_small] = block
        if last is not None:
            last.after, block.before = block, last
            if last.is_free:
                self._take(last)
                self._merge(block, last)
        return block

    def _missing(self, size: int, is_small: bool) -> int:
        """Bytes by which a growing segment must grow to end with a free block of this size."""
        last = self._last[is_small]
        there = last.size if last is not None and last.is_free else 0
        return _round_up(size - there, _page(is_small))

    def _has_room(self, size: int) -> bool:
        return self._limit_bytes is None or self.reserved_bytes + size <= self._limit_bytes

    def _ask_device(self, size: int) -> None:
        if not self._has_room(size):
            self._give_back()
            if not self._has_room(size):
                raise DoesNotFit
        self.reserved_bytes += size
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)

    def _give_back(self) -> None:
        """Return free memory to the device: whole segments, or pages of growing segments."""
        for block in [entry[2] for free in self._free.values() for entry in free]:
            if self._expandable:
                size = block.size // _page(block.is_small) * _page(block.is_small)
            else:
                size = block.size if block.before is block.after is None else 0
            self._take(block)
            self.reserved_bytes -= size
            block.size -= size
            if block.size:
                self._put(block)
            else:
                self._unlink(block)

    def _unlink(self, block: Block) -> None:
        if block.before is not None:
            block.before.after = block.after
        if block.after is not None:
            block.after.before = block.before
        if self._last[block.is_small] is block:
            self._last[block.is_small] = block.before

    def _new_block(self, size: int, is_small: bool) -> Block:
        self._next_address += size
        return Block(size, is_small, self._next_address - size)


class PageAllocator:
    """The system's allocator: whole pages, returned as soon as they are free.

    On Linux this holds for blocks above a threshold; ``enforce_budget`` sets a low one.

    Args and attributes are those of :class:`CachingAllocator`.
    """

    def __init__(self, limit_bytes: Optional[int] = None) -> None:
        self.allocated_bytes = self.peak_allocated_bytes = self.peak_reserved_bytes = 0
        self._limit_bytes = limit_bytes

    def allocate(self, num_bytes: int) -> int:
        size = _round_up(num_bytes, _PAGE)
        if self._limit_bytes is not None and self.allocated_bytes + size > self._limit_bytes:
            raise DoesNotFit
        self.allocated_bytes += size
        self.peak_allocated_bytes = max(self.peak_allocated_bytes, self.allocated_bytes)
        self.peak_reserved_bytes = self.peak_allocated_bytes
        return size

    def free(self, size: int) -> None:
        self.allocated_bytes -= size


def _page(is_small: bool) -> int:
    """Bytes by which a segment grows."""
    return _SMALL_SEGMENT if is_small else _LARGE_SEGMENT


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
