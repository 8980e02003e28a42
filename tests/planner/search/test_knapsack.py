# Copyright (c) the d2_memfit developers.
from itertools import product

import numpy as np
import pytest

from d2_memfit.planner.search.knapsack import Blocks, pack

SAVE, RECOMPUTE, OFFLOAD = range(3)


def random_blocks(seed, num=6):
    """Blocks whose forwards come one after another, their backwards in the opposite order; the
    first one has the second inside.
    """
    random = np.random.default_rng(seed)
    kept = random.uniform(10, 200, num) * 2**20
    peaks = kept * random.uniform(1, 2, num)
    times = 2 * num
    is_away = np.zeros((times, num))
    bytes_at = np.full(times, 300.0 * 2**20)
    recomputing = np.zeros((times, num))
    for i in range(num):
        bytes_at[i : times - i] += kept[i]
        is_away[i + 1 : times - i - 1, i] = 1
        recomputing[times - i - 1, i] = peaks[i] - kept[i]
    return Blocks(
        [f"block{i}" for i in range(num)],
        bytes_at,
        recomputing - is_away * kept,
        -is_away * kept * 0.9,
        recompute_s=kept * random.uniform(0.5, 2, num) * 1e-10,
        copy_s=kept / 12e9,
        fetch_s=kept * 1e-12,
        forward_s=0.06,
        backward_s=0.1,
        overlaps=[(0, 1)],
    )


def best_seconds(blocks, limit_bytes, options=(SAVE, RECOMPUTE, OFFLOAD)):
    """Of all choices that there are."""
    best = None
    for choice in product(options, repeat=len(blocks.names)):
        c = np.array(choice)
        if any(c[i] != SAVE and c[j] != SAVE for i, j in blocks.overlaps):
            continue
        recomputed, offloaded = c == RECOMPUTE, c == OFFLOAD
        used = blocks.bytes_at + blocks.recomputed_bytes @ recomputed
        if (used + blocks.offloaded_bytes @ offloaded).max() > limit_bytes:
            continue
        copying = blocks.copy_s @ offloaded
        more = blocks.recompute_s @ recomputed + blocks.fetch_s @ offloaded
        seconds = max(blocks.forward_s, copying) + max(blocks.backward_s + more, copying)
        best = seconds if best is None else min(best, seconds)
    return best


@pytest.mark.parametrize("share", [0.99, 0.85, 0.7, 0.55])
@pytest.mark.parametrize("seed", range(4))
def test_the_packing_is_the_best_of_all(seed, share):
    blocks = random_blocks(seed)
    limit = share * blocks.bytes_at.max()
    packing, best = pack(blocks, limit), best_seconds(blocks, limit)
    assert (packing is None) == (best is None)
    if packing is not None:
        assert packing.seconds == pytest.approx(best, rel=2e-3)
        assert packing.peak_bytes <= limit * (1 + 1e-6)
        assert not set(packing.recomputed) & set(packing.offloaded)


@pytest.mark.parametrize(
    ("allowed", "options"), [((True, False), (SAVE, RECOMPUTE)), ((False, True), (SAVE, OFFLOAD))]
)
def test_only_what_is_allowed_is_chosen(allowed, options):
    blocks = random_blocks(0)
    limit = 0.8 * blocks.bytes_at.max()
    packing = pack(blocks, limit, *allowed)
    assert packing.seconds == pytest.approx(best_seconds(blocks, limit, options), rel=2e-3)
    assert not (packing.offloaded, packing.recomputed)[options[1] - 1]


def test_nothing_is_chosen_where_there_is_room_and_nothing_where_nothing_helps():
    blocks = random_blocks(0)
    packing = pack(blocks, blocks.bytes_at.max())
    assert (packing.recomputed, packing.offloaded) == ((), ())
    assert packing.seconds == pytest.approx(blocks.forward_s + blocks.backward_s)
    assert pack(blocks, 300 * 2**20) is None


@pytest.mark.parametrize(
    ("allowed", "options"),
    [
        ((True, True), (SAVE, RECOMPUTE, OFFLOAD)),
        ((True, False), (SAVE, RECOMPUTE)),
        ((False, True), (SAVE, OFFLOAD)),
    ],
)
@pytest.mark.parametrize("seed", range(4))
def test_no_choice_needs_less_than_the_bound(seed, allowed, options):
    blocks = random_blocks(seed)
    least = blocks.least_bytes(*allowed)
    assert best_seconds(blocks, 0.999 * least, options) is None
    assert least < blocks.bytes_at.max()
