# Copyright (c) the d2_memfit developers.
"""Ranges and chances as text."""

from dataclasses import replace

import pytest
from tiny import tiny_cfg

from d2_memfit.planner.estimates import MostObjects, ObjectsThatFit, estimate_memory
from d2_memfit.planner.search import plan_memory
from d2_memfit.planner.writing import (
    answer_of_estimate,
    answer_of_plan,
    describe_chance,
    describe_estimate,
    describe_objects,
    describe_sources,
    what_would_tell,
)


@pytest.fixture(scope="module")
def cfg():
    cfg = tiny_cfg("mask_rcnn", device="cuda")
    cfg.DATASETS.TRAIN, cfg.DATASETS.TEST = ("nobody_has_it",), ()
    return cfg


@pytest.fixture(scope="module")
def plan(cfg):
    return plan_memory(cfg, 4, device="cuda")


@pytest.mark.parametrize(
    ("chance", "text"),
    [(0.999, "at least 19"), (0.95, "at least 19"), (0.5, "about 10"), (0.001, "at most 1")],
)
def test_no_more_is_said_of_a_chance_than_runs_of_others_can_tell(plan, chance, text):
    line = f"Chance to fit: {text} of 20 runs like this"
    assert describe_chance(replace(plan, chance=chance)) == line


def test_sources_stand_by_size_and_what_is_known_makes_the_range_narrower(plan):
    e = plan.estimate
    widths = dict.fromkeys(e.widths, (0.0, 0.0))
    widths.update(shape=(0.3, 0.0), software=(0.05, 0.05))
    e = replace(e, peak_allocated_gb=1.0, widths=widths, range_gb=(0.7, 1.05))
    assert describe_sources(e) == ("shape -0.30 +0.00 GB (75%), software -0.05 +0.05 GB (25%)")
    (line,) = what_would_tell(e)
    assert line.startswith("Tell the data (--coco, or --image-size and --instances)")
    assert line.endswith("shrinks from x 1.50 to x 1.11")
    known = replace(e, widths={**widths, "shape": (0.0, 0.0)}, range_gb=(0.95, 1.05))
    assert what_would_tell(known) == []


def test_unknown_photographs_have_a_width_and_told_ones_have_none(cfg):
    unknown = estimate_memory(cfg, 1, "cuda", evaluates=False)
    assert unknown.widths["shape"][0] > 0
    assert unknown.typical_size != unknown.image_size
    told = estimate_memory(cfg, 1, "cuda", image_size=(64, 64), evaluates=False)
    assert told.widths["shape"] == (0, 0)
    assert told.typical_size == told.image_size


@pytest.mark.parametrize(
    ("as_it_is", "with_techniques", "text"),
    [
        ((173, 181), None, "173, and 181 do not"),
        ((1000, None), None, "at least 1,000"),
        ((0, 1), None, "none, 1 is too many"),
        (
            (173, 181),
            (1000, None),
            "173, and 181 do not; at least 1,000 with MEMFIT.CRITERION.CHUNK_SIZE 32",
        ),
    ],
)
def test_how_many_objects_fit_is_a_line(plan, as_it_is, with_techniques, text):
    more = with_techniques and MostObjects(*with_techniques)
    settings = {"MEMFIT.CRITERION.CHUNK_SIZE": 32} if more else {}
    objects = ObjectsThatFit(MostObjects(*as_it_is), more, settings)
    line = describe_objects(objects)
    assert line.startswith(f"Objects that fit in each image: {text}")
    e = replace(plan.estimate, objects_that_fit=objects)
    for written in (describe_estimate(e), answer_of_estimate(e, 4.0, 3.6)):
        assert line in written.splitlines()
    assert line in answer_of_plan(replace(plan, estimate=e)).splitlines()
    assert "Objects that fit" not in answer_of_plan(plan) + describe_estimate(plan.estimate)
