# Copyright (c) the d2_memfit developers.
import sys

import pytest
import torch
from tiny import images, tiny_cfg

from d2_memfit.iteration import CostModel
from d2_memfit.job import Job
from d2_memfit.measure.steps import train_under_budget
from d2_memfit.memory import process_memory

CPU = torch.device("cpu")


@pytest.mark.exhaustive
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux limits a process")
def test_events_are_those_of_a_number_of_images():
    """Four ordinary images are 1 million pixels, and four with the large one 9 million."""
    window = images(8, size=512)
    window[1] = images(1, size=1536)[0]
    job = Job.from_cfg(tiny_cfg(), 1, batch=window[:1])
    budget_gb = process_memory().data_bytes / 2**30 + 0.9
    job = job.with_settings({"MEMFIT.BUDGET_GB": budget_gb})
    by_pixels = CostModel(((0.0, 0.0, 1.0, 0.0, 0.0, 0.0),), limit_bytes=1536**2)
    cut = train_under_budget(job, [window], 1, {"cost_model": by_pixels}, CPU)
    assert cut["oom_events"] == 0
    assert 1 in cut["last_micro_batches"]
    fixed = train_under_budget(job, [window], 1, {"micro_batch_size": 4}, CPU)
    assert fixed["oom_events"] >= 1
    assert fixed["retried_images"] >= 4
