# Copyright (c) the d2_memfit developers.
"""Intervals of estimates, by source."""

from collections import Counter
from dataclasses import replace

import pytest

from d2_memfit.planner.device import DeviceModel, DeviceUse
from d2_memfit.planner.estimates.ranges import widths_of

MB = 2**20
OUTSIDE = Counter({"between blocks": 30 * MB, "context": 400 * MB, "loaded kernels": 200 * MB})
USE = DeviceUse(1000 * MB, 1030 * MB, 1630 * MB, Counter(), OUTSIDE)
CUDA = DeviceModel.load("cuda")


def test_each_source_has_its_width():
    widths = widths_of(USE, CUDA, typical_bytes=900 * MB, is_guess=False)
    assert widths["objects"] == (100 * MB, 0)
    assert widths["software"][0] == widths["software"][1] > 0
    assert widths["allocator"] == (30 * MB, 30 * MB)
    assert widths["context"] == (313 * MB, 206 * MB)


def test_a_guess_of_objects_is_as_uncertain_upwards():
    assert widths_of(USE, CUDA, 900 * MB, is_guess=True)["objects"] == (100 * MB, 100 * MB)
    assert widths_of(USE, CUDA, None, is_guess=True)["objects"] == (0, 0)


def test_a_measured_context_has_no_width_and_a_cpu_only_that_of_objects():
    own = replace(CUDA, name="my_gpu")
    assert widths_of(USE, own, None, is_guess=False)["context"] == (0, 0)
    widths = widths_of(USE, DeviceModel.load("cpu"), 900 * MB, is_guess=False)
    assert {source for source, width in widths.items() if width != (0, 0)} == {"objects"}


@pytest.mark.parametrize("typical_mb", [1000, 1100])
def test_a_typical_batch_that_needs_as_much_makes_no_width(typical_mb):
    assert widths_of(USE, CUDA, typical_mb * MB, is_guess=True)["objects"] == (0, 0)
