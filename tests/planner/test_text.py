# Copyright (c) the d2_memfit developers.
"""Estimates and plans as text."""

from dataclasses import replace

import pytest
from tiny import tiny_cfg

from d2_memfit.planner.ladder import PlanStep
from d2_memfit.planner.plan import plan_memory
from d2_memfit.planner.text import (
    answer_of_estimate,
    answer_of_plan,
    describe_estimate,
    describe_plan,
)

MOST = 12  # lines; the next command and its title come after them


@pytest.fixture(scope="module")
def plan():
    cfg = tiny_cfg("mask_rcnn", device="cuda")
    cfg.DATASETS.TRAIN, cfg.DATASETS.TEST = ("nobody_has_it",), ()
    return plan_memory(cfg, 4, device="cuda")


def step(tier, name="ActivationCheckpointing", **settings):
    settings = settings or {"MEMFIT.CHECKPOINT.MODULES": ["all"]}
    return PlanStep(name, tier, settings, "" if tier == "exact" else "something")


@pytest.mark.parametrize(
    ("steps", "factor", "words"),
    [
        ([], 1.0, "without a change"),
        ([step("exact")], 1.04, "exact gradients, time x 1.04"),
        ([step("exact")], 1.0, "exact gradients"),
        ([step("exact"), step("precision")], None, "other number formats"),
        ([step("precision"), step("recipe")], 0.8, "another recipe"),
    ],
)
def test_the_first_line_is_the_answer(plan, steps, factor, words):
    plan = replace(plan, steps=tuple(steps), time_factor=factor)
    needs = plan.estimate.device_total_gb
    assert answer_of_plan(plan).splitlines()[0] == f"Fits: {needs:.1f} of 4 GB, {words}"


def test_what_does_not_fit_says_what_is_in_the_way_and_what_would_do(plan):
    refused = replace(
        plan,
        fits=False,
        smallest_budget_gb=5.214,
        must_allow=("exact", "recipe"),
        obstacle="BatchNorm is trained",
    )
    lines = answer_of_plan(refused).splitlines()
    assert lines[0].startswith("Does not fit: ")
    assert lines[0].endswith("the job needs a budget of 5.21 GB, not 4 GB")
    assert lines[1] == "In the way: BatchNorm is trained"
    assert lines[2] == "It fits if more may change: --allow exact,recipe"


def test_a_long_plan_is_a_short_answer(plan):
    steps = [
        step("exact", **{"MEMFIT.CHECKPOINT.MODULES": [f"backbone.res4.{i}" for i in range(36)]}),
        *(step("recipe", f"Technique{i}", **{f"MEMFIT.KEY{i}": i}) for i in range(7)),
    ]
    unknown = tuple(f"something number {i} " + 30 * "that nobody can know " for i in range(5))
    long = replace(
        plan,
        steps=tuple(steps),
        estimate=replace(plan.estimate, assumptions=unknown, at_least=unknown),
    )
    text = answer_of_plan(long)
    assert len(text.splitlines()) <= MOST
    assert "  and 5 more: Technique2, " in text
    assert "Assumed: something number 0" in text
    assert "(and 4 more)" in text
    assert all(line in describe_plan(long) for line in unknown)  # the details have all of it


def test_an_estimate_says_what_the_job_needs_or_whether_it_fits(plan):
    e = replace(plan.estimate, wider=())
    lines = answer_of_estimate(e).splitlines()
    low, high = e.device_range_gb
    assert lines[0] == (
        f"Needs {e.device_total_gb:.2f} GB of each GPU. Its range: {low:.1f} to {high:.1f} GB"
    )
    assert len(lines) <= MOST
    assert answer_of_estimate(e, 4.0).startswith("Fits: needs ")
    refused = answer_of_estimate(e, 4.0, fits=False)
    assert refused.startswith("Does not fit: needs ")
    assert " GB of each GPU, and the budget is 4 GB with its headroom. " in refused
    on_cpu = answer_of_estimate(replace(e, expandable_segments=None, at_least=("a part",)))
    assert on_cpu.startswith("Needs at least ")
    assert "GB of a process" in on_cpu


def test_what_makes_the_range_wider_is_named(plan):
    e = replace(plan.estimate, wider=("one thing", "another"))
    assert "GB, because one thing (and 1 more)" in answer_of_estimate(e)
    assert "Its range is wider because another" in describe_estimate(e)


@pytest.mark.parametrize(("number", "said"), [(173, "173"), (1000, "1,000 or more"), (0, "0")])
def test_how_many_objects_fit_is_a_line(plan, number, said):
    e = replace(plan.estimate, objects_that_fit=number)
    line = f"Objects that fit in each image: about {said}"
    for text in (describe_estimate(e), answer_of_estimate(e, 4.0)):
        assert line in text.splitlines()
    assert line in answer_of_plan(replace(plan, estimate=e)).splitlines()
    assert "Objects that fit" not in answer_of_plan(plan) + describe_estimate(plan.estimate)
