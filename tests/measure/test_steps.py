# Copyright (c) the d2_memfit developers.
import pytest
import torch
from made_up_card import made_up_card

from d2_memfit.measure.items import Scale, items_of
from d2_memfit.measure.steps import with_fragments
from d2_memfit.memory import release_memory

pytestmark = pytest.mark.slow


def test_errors_under_a_budget_are_counted():
    small, card = Scale.for_device(torch.device("cpu")), torch.device("cuda:0")
    item = next(i for i in items_of(torch.device("cpu")) if i.group == "fragments")
    with made_up_card(outside_gb=0.5):
        job = item.job(card, small)
        enough = with_fragments(item, job, card, small)
        assert enough["oom_events"] == enough["retried_images"] == 0
        assert enough["last_micro_batches"] == [4]
        release_memory(card)  # from Python 3.12 on, cycles keep the first trainer
        budget_gb = 0.5 + 0.7 * enough["allocated_gb"]
        job = job.with_settings({"MEMFIT.BUDGET_GB": budget_gb, "MEMFIT.PRESET": ""})
        tight = with_fragments(item, job, card, small)
    assert tight["budget_gb"] == budget_gb
    assert tight["oom_events"] > 0
    assert tight["retried_images"] >= 4
    assert max(tight["last_micro_batches"]) < 4
    assert sum(tight["last_micro_batches"]) >= 4
    assert tight["device_gb"] <= budget_gb
