# Copyright (c) the d2_memfit developers.
"""What a run's numbers mean: who held the card, whether it fits, seconds."""

from types import SimpleNamespace

import pytest

from d2_memfit.explain.records import LoggedRun, Oom
from d2_memfit.explain.verdict import Prediction, explain_run

GIB = 1024.0
# The least and most of a context, in MiB, of planner/estimates/ranges.py: 287, and 426 + 380.
LEAST = 287.0


def oom(total=10, free=0.1, allocated=8.0, reserved=9.0, tried=0.5, process=None, **more):
    numbers = {"total": total, "free": free, "allocated": allocated, "reserved": reserved}
    numbers |= {"tried": tried, "process": process}
    mib = {f"{name}_mib": None if n is None else n * GIB for name, n in numbers.items()}
    return Oom(more.pop("case", "at once"), **mib, **more)


def explained(text, **run):
    return explain_run("run 1", LoggedRun(oom=text, **run), None).oom


def predicted(range_gb):
    estimate = SimpleNamespace(range_gb=range_gb, peak_allocated_gb=range_gb[0], typical_gb=None)
    vars(estimate).update(images_per_gpu=2, assumptions=(), at_least=())
    return Prediction(None, estimate, [])


def test_what_others_hold_is_the_rest():
    # The driver's numbers: total 10, free 0.1; this process 9.4 with its context, so others 0.5.
    assert oom(process=9.4).held_by_others_mib == pytest.approx(0.5 * GIB)
    assert oom().held_by_others_mib == pytest.approx(0.9 * GIB - LEAST)  # the context is not said
    assert oom(reserved=9.9).held_by_others_mib == 0  # never below 0
    assert oom(reserved=None).held_by_others_mib is None


@pytest.mark.parametrize(
    ("text", "fits"),
    [
        (oom(), False),  # had the whole card, and died
        (oom(reserved=5.0, allocated=4.5), None),  # others held 5: without a prediction not known
        (oom(reserved=5.0, allocated=4.5, tried=6.0), False),  # more than the whole card
        (oom(free=4.0, reserved=5.0, allocated=4.5), None),  # a limit: there was room for it
        (oom(reserved=None), None),  # nobody knows how much others held
        (oom(case="host"), None),
    ],
    ids=range(6),
)
def test_whether_the_job_fits_by_the_message_alone(text, fits):
    assert explained(text).fits is fits


@pytest.mark.parametrize(
    ("range_gb", "fits"), [((4, 8), True), ((4, 9.6), None), ((9.5, 9.7), False)]
)
def test_whether_the_job_fits_by_its_range_on_a_card_that_others_used(range_gb, fits):
    run = LoggedRun(oom=oom(reserved=5.0, allocated=4.5))
    assert explain_run("run 1", run, predicted(range_gb)).oom.fits is fits


@pytest.mark.parametrize(("release", "high"), [("1.11.0", 4.8), ("1.12.1", 4.1), ("", 4.1)])
def test_old_software_may_take_a_fifth_more(release, high):
    explained = explain_run("run 1", LoggedRun(torch=release), predicted((4, 4.1)))
    assert explained.range_mib == (4 * GIB, pytest.approx(high * GIB))


def test_seconds_are_a_median_without_the_first_ones():
    run = LoggedRun(seconds=[9.0] * 2 + [0.2] * 9 + [0.3] * 9)  # the first tenth warms up
    assert explain_run("run 1", run, None).seconds == pytest.approx(0.25)


@pytest.mark.parametrize(
    ("config", "ranks", "overrides", "images"),
    [
        ("SOLVER:\n  IMS_PER_BATCH: 16\n", 8, {}, 2),
        ("SOLVER:\n  IMS_PER_BATCH: 3\n", 4, {}, 1),
        ("", None, {"SOLVER.IMS_PER_BATCH": 2}, 2),
        ("", None, {}, None),
    ],
    ids=range(4),
)
def test_images_of_a_gpu_are_known_without_the_models_code(config, ranks, overrides, images):
    run = LoggedRun(config_text=config, ranks=ranks, overrides=overrides, notes=["a doubt"])
    explained = explain_run("run 1", run, None, "its code is not here")
    assert explained.images_per_gpu == images
    assert explained.assumed == ["a doubt"]
    assert explained.not_rebuilt == "its code is not here"
