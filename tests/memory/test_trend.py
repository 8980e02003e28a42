# Copyright (c) the d2_memfit developers.
import math
import random

import pytest

from d2_memfit.memory import steady_growth

MB = 2**20


def series(num, growth=0.0, noise=0.0, seed=0):
    rng = random.Random(seed)
    return [100 * MB + growth * i + rng.random() * noise for i in range(num)]


@pytest.mark.parametrize("noise", [0, MB, 10 * MB])
def test_growth_is_measured_within_noise(noise):
    assert steady_growth(series(400, 1e5, noise), MB) == pytest.approx(1e5, rel=0.1)


def test_noise_is_no_growth():
    for seed in range(200):
        assert steady_growth(series(400, 0, 50 * MB, seed), MB) == 0


def test_what_rises_and_stays_is_no_growth():
    values = [100 * MB + min(i, 150) * 1e5 for i in range(400)]
    assert steady_growth(values, MB) == 0


@pytest.mark.parametrize("time_constant", [2, 4, 8])
def test_what_fills_ever_more_slowly_is_no_growth(time_constant):
    """A cache of images: all of its blocks rise, and the last half hardly does."""
    blocks = [1 - math.exp(-block / time_constant) for block in range(20)]
    assert steady_growth([100 * MB * block for block in blocks for _ in range(20)], MB) == 0


def test_a_step_is_no_growth():
    assert steady_growth([100 * MB] * 200 + [150 * MB] * 200, MB) == 0


def test_small_rises_with_a_step_between_them_are_no_growth():
    """As of caches that fill: it rises in nine of ten pairs, and nothing is steady about it."""
    first = [0.0, 6.4, 6.6, 7.5, 7.6, 10.1, 11.2, 11.8, 11.9, 12.0, 12.2, 12.9, 13.6]
    then = [82.5, 82.6, 83.4, 83.7, 83.8, 83.9, 84.4]
    values = [megabytes * MB for megabytes in first + then for _ in range(20)]
    assert steady_growth(values, MB) == 0


def test_growth_of_more_than_five_times_the_noise_counts():
    """A curve that rises ever faster: its growth is 5.8 times its deviation from a line."""
    values = [20 * MB * (block / 20) ** 6 for block in range(20) for _ in range(20)]
    assert steady_growth(values, MB) > 0


def test_less_than_what_counts_is_none():
    assert steady_growth(series(400, 1000), MB) == 0


def test_outliers_do_not_count():
    values = series(400)
    for i in range(0, 400, 7):
        values[i] += 1000 * MB
    assert steady_growth(values, MB) == 0
