# Copyright (c) the d2_memfit developers.
"""Plans that start from what a log has measured."""

import pytest
from made_up_logs import config_text

from d2_memfit.errors import ConfigError
from d2_memfit.explain.fitting import _as_measured, plan_for
from d2_memfit.explain.rebuild import Help
from d2_memfit.explain.records import LoggedRun, OomText, Progress
from d2_memfit.explain.whole import Predictions
from d2_memfit.planner.estimates import DryJob


@pytest.fixture(scope="module")
def prediction():
    run = LoggedRun(config_text=config_text(INPUT__MIN_SIZE_TRAIN=[256], INPUT__MAX_SIZE_TRAIN=640))
    return Predictions(Help())("run 1", run).prediction


def run_with(peak, iteration=500, **more):
    return LoggedRun(progress=[Progress(iteration, 0.1, peak)], **more)


@pytest.mark.parametrize("share", [0.3, 0.5, 0.9])
def test_the_job_as_measured_has_the_measured_peak(prediction, share):
    """The peak is computed again by a dry run of that shape, within 3%."""
    worst = prediction.estimate.peak_allocated_gb * 1024
    measured = worst - share * prediction.estimate.widths["shape"][0] * 1024
    assert measured < 0.95 * worst
    job, more = _as_measured(run_with(measured), prediction)
    assert more == 0
    again = DryJob(job, prediction.rebuilt.device, evaluates=False).estimate()
    assert again.peak_allocated_gb * 1024 == pytest.approx(measured, rel=0.03)


def test_what_no_dry_run_has_seen_is_added(prediction):
    worst = prediction.estimate.peak_allocated_gb * 1024
    job, more = _as_measured(run_with(worst + 300), prediction)
    assert job is prediction.rebuilt.job
    assert more == pytest.approx(300)


@pytest.mark.parametrize(
    "run",
    [
        LoggedRun(),
        run_with(10.0, iteration=19),  # a larger image may have come later
        run_with(10.0, oom=OomText("", "at once")),  # it had not what it needs
    ],
    ids=["nothing", "short", "died"],
)
def test_a_peak_that_may_not_be_the_largest_changes_nothing(prediction, run):
    assert _as_measured(run, prediction) == (prediction.rebuilt.job, 0)


@pytest.mark.slow
def test_a_plan_is_for_the_card_of_the_log_or_another(prediction):
    assert plan_for(LoggedRun(), prediction) is None
    assert plan_for(LoggedRun(gpus=["Tesla T4"]), prediction).plan.budget_gb == 14.4
    assert plan_for(LoggedRun(gpus=["Tesla T4"]), prediction, "RTX 3060").plan.budget_gb == 11.5
    with_size = plan_for(LoggedRun(gpus=["Tesla T4"]), prediction, "RTX 4090 24GB")
    assert with_size.card_gb == 24
    assert with_size.plan.budget_gb == 23.4
    assert "not tried on this generation" in with_size.plan.estimate.times
    with pytest.raises(ConfigError, match="'Voodoo' is not known"):
        plan_for(LoggedRun(), prediction, "Voodoo")


@pytest.mark.slow
def test_a_plan_has_room_for_what_was_measured(prediction):
    worst = prediction.estimate.peak_allocated_gb * 1024
    plain = plan_for(LoggedRun(), prediction, "8GB").plan
    more = plan_for(run_with(worst + 300), prediction, "8GB").plan
    difference = more.estimate.peak_allocated_gb - plain.estimate.peak_allocated_gb
    assert difference == pytest.approx(300 / 1024, rel=0.05)
