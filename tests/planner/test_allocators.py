# Copyright (c) the d2_memfit developers.
import random

import pytest

from d2_memfit.planner.allocators import CachingAllocator, PageAllocator

MB = 2**20


def test_small_blocks_share_segments_of_2_mib_in_steps_of_512_bytes():
    allocator = CachingAllocator()
    blocks = [allocator.allocate(1000) for _ in range(4)]
    assert allocator.allocated_bytes == 4 * 1024
    assert allocator.peak_reserved_bytes == 2 * MB
    for block in blocks:
        allocator.free(block)
    assert allocator.allocated_bytes == 0
    assert allocator.peak_reserved_bytes == 2 * MB  # kept for the next time
    allocator.allocate(MB)
    assert allocator.peak_reserved_bytes == 2 * MB  # neighbours that are free are one block again


@pytest.mark.parametrize(("asked", "given"), [(1, 512), (512, 512), (513, 1024), (700, 1024)])
def test_no_block_is_smaller_than_512_bytes(asked, given):
    allocator = CachingAllocator()
    assert allocator.allocate(asked).size == given
    assert allocator.allocated_bytes == given


def test_blocks_below_10_mib_share_segments_of_20_mib():
    allocator = CachingAllocator()
    allocator.allocate(6 * MB)
    allocator.allocate(6 * MB)
    allocator.allocate(6 * MB)
    assert allocator.peak_reserved_bytes == 20 * MB
    allocator.allocate(6 * MB)
    assert allocator.peak_reserved_bytes == 40 * MB


def test_what_is_left_of_a_large_block_is_its_own_from_1_mib_on():
    allocator = CachingAllocator()
    whole = allocator.allocate(11 * MB)  # a segment of 12 MiB, whose rest is too small
    assert allocator.allocated_bytes == 12 * MB
    allocator.free(whole)
    allocator.allocate(10 * MB)
    assert allocator.allocated_bytes == 10 * MB
    allocator.allocate(2 * MB)
    assert allocator.peak_reserved_bytes == 12 * MB


@pytest.mark.parametrize(("rest", "given"), [(MB, 12 * MB), (MB + 512, 11 * MB - 512)])
def test_a_rest_of_more_than_1_mib_is_split_off(rest, given):
    """``kSmallSize`` of PyTorch's CUDACachingAllocator, in ``should_split``."""
    assert CachingAllocator().allocate(12 * MB - rest).size == given


def test_any_rest_of_a_small_block_is_split_off():
    """In the pool of small blocks, ``should_split`` compares with ``kMinBlockSize``."""
    allocator = CachingAllocator()
    pair = allocator.allocate(1024)
    allocator.allocate(512)  # keeps the pair from being merged with the rest of its segment
    allocator.free(pair)
    assert allocator.allocate(512).size == 512


def test_the_smallest_block_that_is_large_enough_is_taken():
    allocator = CachingAllocator()
    large, small = allocator.allocate(40 * MB), allocator.allocate(30 * MB)
    allocator.free(large)
    allocator.free(small)
    assert allocator.allocate(29.5 * MB).size == 30 * MB
    assert allocator.peak_reserved_bytes == 70 * MB


@pytest.mark.parametrize("expandable", [False, True])
def test_fragments_are_what_expandable_segments_are_for(expandable):
    allocator = CachingAllocator(expandable=expandable)
    blocks = [allocator.allocate(20 * MB) for _ in range(10)]
    for block in blocks:
        allocator.free(block)
    allocator.allocate(200 * MB)
    assert allocator.peak_reserved_bytes == (200 if expandable else 400) * MB


def test_an_expandable_segment_keeps_every_rest():
    """Of a segment of fixed size, 1 MiB or less stays with its block."""
    for expandable, given in ((True, 19.5 * MB), (False, 20 * MB)):
        allocator = CachingAllocator(expandable=expandable)
        assert allocator.allocate(int(19.5 * MB)).size == given
        assert allocator.peak_reserved_bytes == 20 * MB


@pytest.mark.parametrize("expandable", [False, True])
def test_random_allocations_keep_the_books(expandable):
    rng = random.Random(0)
    allocator, live = CachingAllocator(expandable), []
    for _ in range(3000):
        if live and rng.random() < 0.48:
            allocator.free(live.pop(rng.randrange(len(live))))
        else:
            size = int(10 ** rng.uniform(2, 7.8))
            live.append(allocator.allocate(size))
            assert live[-1].size >= size
        assert allocator.allocated_bytes == sum(block.size for block in live)
        free = sum(e[0] for pool in allocator._free.values() for e in pool)
        assert allocator.allocated_bytes + free == allocator.peak_reserved_bytes


def test_a_cpu_has_whole_pages_and_keeps_none():
    allocator = PageAllocator()
    allocator.free(allocator.allocate(5000))
    assert allocator.allocated_bytes == 0
    assert allocator.peak_allocated_bytes == allocator.peak_reserved_bytes == 8192
