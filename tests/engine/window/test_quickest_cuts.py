# Copyright (c) the d2_memfit developers.
"""Cuts of many windows at once, against all ways to cut each of them."""

import numpy as np
import pytest

from d2_memfit.engine.window import quickest_cuts
from d2_memfit.iteration import CostModel, Padding

SUMS = ((100.0, 5.0, 1.0, 10.0, 0.0, 0.0), (90.0, 0.0, 0.5, 0.0, 0.2, 0.1))
LIMIT = 1200
PADDING = Padding(4)


def ways(images):
    """All ways to cut a sequence into parts."""
    if not images:
        yield []
    for end in range(1, len(images) + 1):
        for rest in ways(images[end:]):
            yield [images[:end], *rest]


def needs_and_pixels(part):
    height, width = (-(-max(image[i] for image in part) // 4) * 4 for i in (0, 1))
    objects = [image[2] for image in part]
    sums = [100 + 5 * len(part) + len(part) * height * width + 10 * sum(objects)]
    per_pixel = 0.2 * sum(objects) + 0.1 * max(objects)
    sums.append(90 + 0.5 * len(part) * height * width + height * width * per_pixel)
    return max(sums), len(part) * height * width


def least_pixels(images, overhead):
    """The time of the quickest way, of those that keep the largest together."""
    orders = (
        sorted(images, key=lambda image: -needs_and_pixels([image])[0]),
        sorted(images, key=lambda image: (-image[0], -image[1])),
        sorted(images, key=lambda image: (-image[1], -image[0])),
    )
    times = []
    for order in orders:
        for parts in ways(order):
            found = [needs_and_pixels(part) for part in parts]
            if all(len(p) == 1 or f[0] <= LIMIT for p, f in zip(parts, found)):
                times.append(sum(pixels + overhead for _, pixels in found))
    return min(times)


@pytest.mark.parametrize("overhead", [0.0, 60.0, 5000.0])
def test_cuts_are_the_quickest_that_fit(overhead):
    numbers = np.random.default_rng(1)
    sizes = numbers.integers(1, 22, (60, 6, 3))
    sizes[:, :, 2] -= 1
    cuts = quickest_cuts(sizes, CostModel(SUMS, LIMIT, overhead), PADDING, LIMIT)
    numbers_of_parts = set()
    for window, images in enumerate(sizes.tolist()):
        parts = cuts.parts(window)
        numbers_of_parts.add(len(parts))
        assert sorted(i for part in parts for i in part) == list(range(6))
        found = [needs_and_pixels([images[i] for i in part]) for part in parts]
        assert all(len(p) == 1 or f[0] <= LIMIT for p, f in zip(parts, found))
        assert cuts.largest_bytes[window] == pytest.approx(max(f[0] for f in found))
        assert cuts.pixels[window] == pytest.approx(sum(f[1] + overhead for f in found))
        assert cuts.pixels[window] == pytest.approx(least_pixels(images, overhead))
    assert len(numbers_of_parts) > 1


def test_a_square_of_a_fixed_size_counts_for_all_images():
    sizes = np.array([[(10, 20, 1), (5, 5, 2)]])
    cuts = quickest_cuts(sizes, CostModel(SUMS, 10**6), Padding(1, square=32), 10**6)
    assert cuts.pixels.tolist() == [2 * 32 * 32]
