# Copyright (c) the d2_memfit developers.
"""Facts of runs of others: what is in the files, and what becomes of them."""

import csv
from pathlib import Path

import pytest
from benchmarks import runs as benchmark
from benchmarks.runs import DOUBTS, FOLDER, runs

RUNS = runs()
ROWS = Path(benchmark.__file__).parents[2] / "docs" / "accuracy_runs.csv"


def test_facts_are_small_and_have_no_text_of_a_log():
    for run in RUNS:
        text = (FOLDER / f"{run.name}.json").read_text()
        assert len(text) < 3000, run.name
        values = [*run.settings.values(), *run.oom.values(), run.ended, *run.gpus]
        assert all(len(value) < 50 for value in values if isinstance(value, str)), run.name
        assert set(run.doubts) <= set(DOUBTS)


def test_no_run_is_listed_twice():
    sources = {(run.repo, run.path, run.blob, run.run_in_file) for run in RUNS}
    assert len(sources) == len(RUNS) == 82


def test_at_most_half_of_the_repositories_are_fitted_to():
    repositories = {run.repo: run.is_fitted_to for run in RUNS}
    assert 2 * sum(repositories.values()) <= len(repositories)
    assert repositories["facebookresearch/MaskFormer"]
    assert not repositories["facebookresearch/detr"]


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.name)
def test_a_run_becomes_what_a_log_says(run):
    logged = run.logged()
    assert logged.peak_mib == run.peak_mib
    assert logged.ended == run.ended
    assert logged.ranks == run.ranks
    assert bool(logged.zoo_config) != bool(logged.config_text)


def test_all_runs_have_a_row_beside_the_page():
    with open(ROWS, newline="") as f:
        assert {row["run"] for row in csv.DictReader(f)} == {run.name for run in RUNS}
