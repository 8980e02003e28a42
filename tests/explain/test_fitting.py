# Copyright (c) the d2_memfit developers.
"""Plans that start from what a log has measured."""

import pytest
from made_up_logs import config_text

from d2_memfit.common.errors import ConfigError
from d2_memfit.explain.rebuild import Help
from d2_memfit.explain.records import LoggedRun
from d2_memfit.explain.verdict import plan_for, predict_run


@pytest.fixture(scope="module")
def prediction():
    run = LoggedRun(config_text=config_text(INPUT__MIN_SIZE_TRAIN=[256], INPUT__MAX_SIZE_TRAIN=640))
    return predict_run(run, Help())[0]


@pytest.mark.slow
def test_a_plan_is_for_the_card_of_the_log_or_another(prediction):
    assert plan_for(LoggedRun(), prediction) is None
    assert plan_for(LoggedRun(gpus=["Tesla T4"]), prediction).budget_gb == 14.4
    assert plan_for(LoggedRun(gpus=["Tesla T4"]), prediction, "RTX 3060").budget_gb == 11.5
    with_size = plan_for(LoggedRun(gpus=["Tesla T4"]), prediction, "RTX 4090 24GB")
    assert with_size.budget_gb == 23.4
    with pytest.raises(ConfigError, match="'Voodoo' is not known"):
        plan_for(LoggedRun(), prediction, "Voodoo")


def test_a_plan_has_room_for_what_was_measured(prediction):
    worst = prediction.estimate.peak_allocated_gb * 1024
    plain = plan_for(LoggedRun(), prediction, "8GB")
    more = plan_for(LoggedRun(peak_mib=worst + 300), prediction, "8GB")
    difference = more.estimate.peak_allocated_gb - plain.estimate.peak_allocated_gb
    assert difference == pytest.approx(300 / 1024, rel=0.05)
