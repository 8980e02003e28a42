# Copyright (c) the d2_memfit developers.
"""That the benchmarks run, with as little as possible; their figures are for people."""

import pytest
from forks import run_forked
from tiny import ROOT


def benchmark(*arguments):
    result = run_forked(ROOT / "tools" / "benchmark.py", *arguments, timeout_s=600)
    assert result.returncode == 0, result.stderr[-4000:]
    lines = [line.split("|")[1:-1] for line in result.stdout.splitlines() if line.startswith("|")]
    return {name.strip(): [cell.strip() for cell in cells] for name, *cells in lines}


@pytest.mark.slow
def test_gradients():
    exact = "RPN, every anchor sampled"
    table = benchmark("gradients", exact, "--train", 2, "--size", 64, 64)
    cuts = table.pop("")
    assert len(cuts) == 4
    assert all(float(gap) < 1e-4 for gap in table[exact])
