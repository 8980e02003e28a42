# Copyright (c) the d2_memfit developers.
from pathlib import Path

import pytest

from d2_memfit.planner.device import slowdown_of_16_bits


def test_the_measured_speed_of_16_bits_follows_the_instructions_of_the_cpu():
    info = Path("/proc/cpuinfo")
    flags = set(info.read_text().split()) if info.exists() else set()
    if flags & {"amx_bf16", "avx512_bf16"}:
        assert slowdown_of_16_bits() < 2
    elif "avx2" in flags and not flags & {"avx512f", "avx_ne_convert"}:
        assert slowdown_of_16_bits() > 5
    else:
        pytest.skip("nothing is known of this CPU")
