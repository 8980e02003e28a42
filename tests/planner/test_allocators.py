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


def test_blocks_below_10_mib_share_segments_of_20_mib():
    allocator = CachingAllocator()
    for _ in range(3):
        allocator.allocate(6 * MB)
    assert allocator.peak_reserved_bytes == 20 * MB
    allocator.allocate(6 * MB)
    assert allocator.peak_reserved_bytes == 40 * MB


def test_the_smallest_free_memory_that_is_enough_is_taken():
    allocator = CachingAllocator()
    for block in [allocator.allocate(size * MB) for size in (12, 16)]:
        allocator.free(block)
    assert [allocator.allocate(size * MB).size // MB for size in (12, 16)] == [12, 16]
    assert allocator.peak_reserved_bytes == 28 * MB


@pytest.mark.parametrize(("rest", "given"), [(MB, 12 * MB), (MB + 512, 11 * MB - 512)])
def test_a_rest_of_more_than_1_mib_is_split_off(rest, given):
    """``kSmallSize`` of PyTorch's CUDACachingAllocator, in ``should_split``."""
    assert CachingAllocator().allocate(12 * MB - rest).size == given


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
        free = sum(size for pool in allocator._pools.values() for size, _ in pool.free)
        assert allocator.allocated_bytes + free == allocator.peak_reserved_bytes


def test_a_cpu_has_whole_pages_and_keeps_none():
    allocator = PageAllocator()
    allocator.free(allocator.allocate(5000))
    assert allocator.allocated_bytes == 0
    assert allocator.peak_allocated_bytes == allocator.peak_reserved_bytes == 8192
