# Copyright (c) the d2_memfit developers.
"""Leaks and healthy memory, as series of measurements with noise."""

import itertools
import math
import random

import pytest

from d2_memfit.engine.hooks.leak_detector import rises_steadily

MB = 2**20
AT_LEAST = 8 * 2**10  # bytes per step


def series(num, growth=0.0, noise=0.0, seed=0):
    rng = random.Random(seed)
    return [100 * MB + growth * i + rng.random() * noise for i in range(num)]


def rises(values):
    return rises_steadily(values, AT_LEAST * len(values))


@pytest.mark.parametrize("noise", [0, MB, 10 * MB])
def test_growth_is_seen_within_noise(noise):
    assert rises(series(400, 1e5, noise))


def test_growth_is_seen_below_large_images():
    rng = random.Random(0)
    assert rises([v + rng.choice([0, 50 * MB]) for v in series(400, 1e5)])


def test_noise_is_no_growth():
    assert not any(rises(series(400, 0, 50 * MB, seed)) for seed in range(200))


@pytest.mark.parametrize("full_after", [150, 320])
def test_what_rises_and_stays_is_no_growth(full_after):
    assert not rises([100 * MB + min(i, full_after) * 1e5 for i in range(400)])


@pytest.mark.parametrize("time_constant", [2, 4, 8])
def test_what_fills_ever_more_slowly_is_no_growth(time_constant):
    """A cache of images: all of its blocks rise, and the last quarter hardly does."""
    blocks = [1 - math.exp(-block / time_constant) for block in range(20)]
    assert not rises([100 * MB * block for block in blocks for _ in range(20)])


def test_a_step_is_no_growth():
    assert not rises([100 * MB] * 200 + [150 * MB] * 200)


@pytest.mark.parametrize("num", [50, 100, 400])
def test_steps_of_evaluations_are_no_growth(num):
    """Ten in a window, each of which leaves something: nearly all pairs of blocks rise."""
    assert not rises([100 * MB + 2 * MB * (i * 10 // num) for i in range(num)])


def test_small_rises_with_a_step_between_them_are_no_growth():
    """As of caches that fill: it rises in nine of ten pairs, and nothing is steady about it."""
    first = [0.0, 6.4, 6.6, 7.5, 7.6, 10.1, 11.2, 11.8, 11.9, 12.0, 12.2, 12.9, 13.6]
    then = [82.5, 82.6, 83.4, 83.7, 83.8, 83.9, 84.4]
    assert not rises([megabytes * MB for megabytes in first + then for _ in range(20)])


def test_what_rises_ever_faster_is_growth():
    assert rises([20 * MB * (i / 400) ** 2 for i in range(400)])


@pytest.mark.parametrize("num", [50, 75, 400])
def test_the_whole_window_counts(num):
    """The last values do, too, if the window is no multiple of 20."""
    values = series(num, 2 * AT_LEAST)
    assert rises(values)
    assert not rises(values[: num * 4 // 5] + values[num * 4 // 5 : num * 4 // 5 + 1] * (num // 5))


def test_less_than_what_counts_is_none():
    assert not rises(series(400, 1000))


def test_outliers_do_not_count():
    values = series(400)
    for i in range(0, 400, 7):
        values[i] += 1000 * MB
    assert not rises(values)


def healthy(kind, num, rng):
    """A series of ``num`` values without a leak, whose size and noise are random."""
    size = MB * 10 ** rng.uniform(-1, 2)
    noise = MB * 10 ** rng.uniform(-4, -1)
    after = num * rng.uniform(0.05, 0.8)
    period = rng.uniform(num / 20, num / 2)
    shape = {
        "noise": lambda i: rng.gauss(0, size),
        "images of all sizes": lambda i: size * rng.paretovariate(2),
        "one step": lambda i: size * (i > after),
        "a full cache": lambda i: size * min(i / after, 1),
        "a cache that fills ever more slowly": lambda i: size * (1 - math.exp(-4 * i / after)),
        "steps of evaluations": lambda i: size * 0.3 * (1 - 0.7 ** (i // period)),
        "garbage until it is collected": lambda i: size * (i / period % 1),
    }[kind]
    return [100 * MB + shape(i) + rng.gauss(0, noise) for i in range(num)]


KINDS = [
    "noise",
    "images of all sizes",
    "one step",
    "a full cache",
    "a cache that fills ever more slowly",
    "steps of evaluations",
    "garbage until it is collected",
]


WINDOWS = (50, 100, 400)
NUM_SERIES = [20, pytest.param(1000, marks=pytest.mark.exhaustive)]


@pytest.mark.parametrize("num_series", NUM_SERIES)
def test_of_1000_healthy_series_of_each_kind_at_most_10_rise(num_series):
    rates = {}
    for window, kind in itertools.product(WINDOWS, KINDS):
        rng = random.Random(window)
        rises_in = [rises(healthy(kind, window, rng)) for _ in range(num_series)]
        rates[window, kind] = sum(rises_in) / num_series
    print(rates)
    assert max(rates.values()) <= 0.01


@pytest.mark.parametrize("num_series", NUM_SERIES)
def test_nine_of_ten_leaks_of_10_kib_rise(num_series):
    """The noise is a part of the growth in a window."""
    rates = {}
    for window, noise in itertools.product(WINDOWS, (0, 0.02, 0.05)):
        rng = random.Random(window)
        leaks = [
            [10 * 2**10 * (i + rng.gauss(0, noise * window)) for i in range(window)]
            for _ in range(num_series)
        ]
        rates[window, noise] = sum(map(rises, leaks)) / num_series
    print(rates)
    assert min(rates.values()) >= 0.9
