# Copyright (c) the d2_memfit developers.
import random

import pytest

from d2_memfit.planner.device import CachingAllocator, DoesNotFit
from d2_memfit.planner.device.allocators import PageAllocator

MB = 2**20


def test_small_blocks_share_segments_of_2_mib_in_steps_of_512_bytes():
    allocator = CachingAllocator()
    blocks = [allocator.allocate(1000) for _ in range(4)]
    assert allocator.allocated_bytes == 4 * 1024
    assert allocator.reserved_bytes == 2 * MB
    for block in blocks:
        allocator.free(block)
    assert allocator.allocated_bytes == 0
    assert allocator.reserved_bytes == 2 * MB  # kept for the next time
    allocator.allocate(MB)
    assert allocator.reserved_bytes == 2 * MB  # neighbours that are free are one block again


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
    assert allocator.reserved_bytes == 20 * MB
    allocator.allocate(6 * MB)
    assert allocator.reserved_bytes == 40 * MB


def test_what_is_left_of_a_large_block_is_its_own_from_1_mib_on():
    allocator = CachingAllocator()
    whole = allocator.allocate(11 * MB)  # a segment of 12 MiB, whose rest is too small
    assert allocator.allocated_bytes == 12 * MB
    allocator.free(whole)
    allocator.allocate(10 * MB)
    assert allocator.allocated_bytes == 10 * MB
    allocator.allocate(2 * MB)
    assert allocator.reserved_bytes == 12 * MB


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
    assert allocator.reserved_bytes == 70 * MB


def test_at_the_limit_what_is_free_goes_back_first():
    allocator = CachingAllocator(limit_bytes=100 * MB)
    allocator.free(allocator.allocate(60 * MB))
    allocator.allocate(80 * MB)  # does not fit beside the 60 that are free
    assert allocator.reserved_bytes == 80 * MB
    with pytest.raises(DoesNotFit):
        allocator.allocate(30 * MB)


@pytest.mark.parametrize("freed", [0, 2])
def test_a_segment_of_which_a_part_is_in_use_does_not_go_back(freed):
    allocator = CachingAllocator(limit_bytes=30 * MB)
    blocks = [allocator.allocate(6 * MB) for _ in range(3)]
    allocator.free(blocks[freed])
    with pytest.raises(DoesNotFit):
        allocator.allocate(12 * MB)
    assert allocator.reserved_bytes == 20 * MB


@pytest.mark.parametrize("expandable", [False, True])
def test_fragments_are_what_expandable_segments_are_for(expandable):
    allocator = CachingAllocator(expandable=expandable)
    blocks = [allocator.allocate(20 * MB) for _ in range(10)]
    for block in blocks:
        allocator.free(block)
    allocator.allocate(200 * MB)
    assert allocator.reserved_bytes == (200 if expandable else 400) * MB


def test_an_expandable_segment_keeps_every_rest():
    """Of a segment of fixed size, 1 MiB or less stays with its block."""
    for expandable, given in ((True, 19.5 * MB), (False, 20 * MB)):
        allocator = CachingAllocator(expandable=expandable)
        assert allocator.allocate(int(19.5 * MB)).size == given
        assert allocator.reserved_bytes == 20 * MB


def test_expandable_segments_give_back_pages():
    allocator = CachingAllocator(limit_bytes=120 * MB, expandable=True)
    blocks = [allocator.allocate(30 * MB) for _ in range(3)]
    allocator.free(blocks[1])
    allocator.allocate(35 * MB)  # 30 are free in the middle, of which one page of 20 can go
    assert allocator.allocated_bytes == 95 * MB
    assert allocator.reserved_bytes == 120 * MB


def test_what_was_given_back_of_a_growing_segment_is_asked_for_again():
    allocator = CachingAllocator(limit_bytes=70 * MB, expandable=True)
    allocator.allocate(40 * MB)
    allocator.free(allocator.allocate(20 * MB))
    with pytest.raises(DoesNotFit):
        allocator.allocate(40 * MB)
    assert allocator.allocate(20 * MB).size == 20 * MB


@pytest.mark.parametrize("limit", [None, 200 * MB])
@pytest.mark.parametrize("expandable", [False, True])
def test_random_allocations_keep_the_books(expandable, limit):
    rng = random.Random(0)
    allocator = CachingAllocator(limit, expandable)
    live, failed = [], 0
    for _ in range(3000):
        if live and rng.random() < 0.48:
            allocator.free(live.pop(rng.randrange(len(live))))
        else:
            size = int(10 ** rng.uniform(2, 7.8))
            try:
                live.append(allocator.allocate(size))
                assert live[-1].size >= size
            except DoesNotFit:
                failed += 1
        assert allocator.allocated_bytes == sum(block.size for block in live)
        free = sum(e[0] for pool in allocator._free.values() for e in pool)
        assert allocator.allocated_bytes + free == allocator.reserved_bytes
    assert (failed > 0) == (limit is not None)
    assert limit is None or allocator.peak_reserved_bytes <= limit


def test_the_system_takes_pages_back_at_once():
    allocator = PageAllocator(limit_bytes=10 * 4096)
    block = allocator.allocate(5000)
    assert allocator.allocated_bytes == 2 * 4096
    allocator.free(block)
    assert allocator.allocated_bytes == 0
    assert allocator.peak_reserved_bytes == 2 * 4096
    with pytest.raises(DoesNotFit):
        allocator.allocate(11 * 4096)
