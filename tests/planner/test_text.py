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
    assert [line.partition(":")[0] for line in lines[:2]] == ["Does not fit", "In the way"]
    assert "5.21 GB, not 4 GB" in lines[0]
    assert "BatchNorm is trained" in lines[1]
    assert "--allow exact,recipe" in lines[2]


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
    e = replace(plan.estimate, wider=("one thing", "another"))
    first, *lines = answer_of_estimate(e).splitlines()
    assert first.startswith(f"Needs {e.device_total_gb:.2f} GB of each GPU. Its range: ")
    assert "because one thing (and 1 more)" in first
    assert len(lines) < MOST
    assert "another" in describe_estimate(e)
    assert answer_of_estimate(e, 4.0).startswith("Fits: ")
    assert answer_of_estimate(e, 4.0, fits=False).startswith("Does not fit: ")
    on_cpu = answer_of_estimate(replace(e, expandable_segments=None, at_least=("a part",)))
    assert on_cpu.startswith(f"Needs at least {e.device_total_gb:.2f} GB of a process")


@pytest.mark.parametrize(("number", "said"), [(173, "173"), (1000, "1,000 or more"), (0, "0")])
def test_how_many_objects_fit_is_a_line(plan, number, said):
    e = replace(plan.estimate, objects_that_fit=number)
    line = f"Objects that fit in each image: about {said}"
    for text in (describe_estimate(e), answer_of_plan(replace(plan, estimate=e))):
        assert line in text.splitlines()
    assert "Objects that fit" not in answer_of_plan(plan)
