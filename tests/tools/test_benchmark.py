"""That the benchmarks run, with as little as possible; their figures are for people."""

import sys

from tiny import ROOT, run_process


def benchmark(*arguments):
    command = [sys.executable, "-W", "ignore", ROOT / "tools" / "benchmark.py", *arguments]
    result = run_process(command)
    assert result.returncode == 0, result.stderr[-4000:]
    lines = [line.split("|")[1:-1] for line in result.stdout.splitlines() if line.startswith("|")]
    return {name.strip(): [cell.strip() for cell in cells] for name, *cells in lines}


def test_accumulation():
    table = benchmark("accumulation", "--size", 64, 96, "--steps", 2, "--rounds", 1)
    assert float(table["plain, 2 images"][0]) > float(table["ours, 2 x 1"][0]) > 0


def test_gradients():
    exact = "RPN, every anchor sampled"
    table = benchmark("gradients", exact, "PointRend", "RetinaNet", "--train", 2)
    cuts = table.pop("")
    assert len(cuts) == 4
    assert len(table) == 6  # with the line below the header
    assert all(float(gap) < 1e-4 for gap in table[exact])


def test_recovery():
    table = benchmark("recovery", "--size", 64, 96, "--rounds", 1)
    assert float(table["split, 1 image"][1]) > 0
    assert float(table["the same after a failure, less the forward thrown away"][1]) > 0
