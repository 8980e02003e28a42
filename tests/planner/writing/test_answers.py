# Copyright (c) the d2_memfit developers.
"""Estimates and plans in a few lines."""

from dataclasses import replace

import pytest
from tiny import tiny_cfg

from d2_memfit.planner.search import OtherPlan, PlanStep, plan_memory
from d2_memfit.planner.writing import answer_of_estimate, answer_of_plan, describe_plan, first_of

MOST = 12  # lines; the next command and its title come after them


@pytest.fixture(scope="module")
def plan():
    cfg = tiny_cfg("mask_rcnn", device="cuda")
    cfg.DATASETS.TRAIN, cfg.DATASETS.TEST = ("nobody_has_it",), ()
    return plan_memory(cfg, 4, device="cuda")


def step(tier, name="ActivationCheckpointing", **settings):
    settings = settings or {"MEMFIT.CHECKPOINT.MODULES": ["all"]}
    what = "" if tier == "exact" else "something"
    return PlanStep(name, tier, settings, what, 9.04, 5.01, 1.1, (1.05, 1.16))


@pytest.mark.parametrize(
    ("steps", "times", "words"),
    [
        ([], (1.0, 1.0), "without a change"),
        ([step("exact")], (1.04, 1.1), "exact gradients, 4 to 10% slower"),
        ([step("exact"), step("not known")], (0.98, 1.1), "gradients to be tested, 2% faster to"),
        ([step("not known"), step("precision")], (0.6, 0.8), "other number formats, 20 to 40%"),
        ([step("precision"), step("recipe")], (1.0, 1.0), "another recipe, as fast"),
        ([step("exact")], (1.9, 2.5), "exact gradients, 1.9 to 2.5 times the time"),
    ],
)
def test_the_first_line_is_the_answer(plan, steps, times, words):
    plan = replace(plan, steps=tuple(steps), time_range=times)
    needs = plan.estimate.device_total_gb
    first = answer_of_plan(plan).splitlines()[0]
    assert first.startswith(f"Fits: {needs:.1f} of 4 GB, {words}")


def test_what_does_not_fit_says_what_would(plan):
    refused = replace(
        plan, fits=False, smallest_budget_gb=5.214, must_allow=("exact", "recipe"), chance=0.1
    )
    lines = answer_of_plan(refused).splitlines()
    assert lines[0].startswith("Does not fit: ")
    assert lines[0].endswith("the job needs a budget of 5.21 GB, not 4 GB")
    assert lines[1] == "It fits if more may change: --allow exact,recipe"
    assert "Chance to fit: about 2 of 20 runs like this" in lines


def test_a_job_that_only_headroom_refuses_is_not_said_to_need_more_than_the_budget(plan):
    needs = replace(plan.before, device_total_gb=3.8)
    planned = replace(plan, steps=(step("exact"),), before=needs, margin=0.1)
    line = answer_of_plan(planned).splitlines()[1]
    assert line.startswith("Without the plan: 3.80 GB, and headroom leaves 3.60 GB. Chance")


def test_a_long_plan_is_a_short_answer(plan):
    many = [f"backbone.bottom_up.res{i}.{j}" for i in range(2, 6) for j in range(9)]
    steps = [
        step("exact", **{"MEMFIT.CHECKPOINT.MODULES": many}),
        *(step("recipe", f"Technique{i}", **{f"MEMFIT.KEY{i}": i}) for i in range(7)),
    ]
    e = plan.estimate
    unknown = tuple(f"something number {i} " + 30 * "that nobody can know " for i in range(5))
    long = replace(
        plan,
        steps=tuple(steps),
        evaluation_decides=True,
        estimate=replace(e, assumptions=unknown, at_least=unknown),
        other=OtherPlan({}, 3.9, 1.2, (1.1, 1.3)),
    )
    text = answer_of_plan(long)
    assert len(text.splitlines()) <= MOST
    assert "  and 6 more: Technique1, " in text
    assert "Assumed: something number 0" in text
    assert "(and 4 more)" in text
    assert all(line in describe_plan(long) for line in unknown)  # the details have all of it


def test_an_estimate_says_what_the_job_needs_or_whether_it_fits(plan):
    e = plan.estimate
    lines = answer_of_estimate(e).splitlines()
    low, high = e.device_range_gb
    assert lines[0] == (
        f"Needs {e.device_total_gb:.1f} GB of each GPU. Its range: {low:.1f} to {high:.1f} GB"
    )
    assert len(lines) <= MOST
    assert answer_of_estimate(e, 4.0, 3.6).startswith("Fits: needs ")
    refused = answer_of_estimate(e, 4.0, 3.6, fits=False)
    assert refused.startswith("Does not fit: needs ")
    assert " GB of each GPU, 3.60 of 4 GB are left after headroom. " in refused
    on_cpu = answer_of_estimate(replace(e, expandable_segments=None, at_least=("a part",)))
    assert on_cpu.startswith("Needs at least ")
    assert "GB of a process" in on_cpu


def test_the_first_of_several_lines_says_how_many_more_there_are():
    assert first_of(["one"]) == "one"
    assert first_of(["one", "two", "three"]) == "one (and 2 more)"
    assert first_of(["o" * 200]).endswith("oo ...")
