# Copyright (c) the d2_memfit developers.
"""Limits in which a job fits."""

import pytest
from tiny import tiny_cfg

from d2_memfit import Job
from d2_memfit.job import WorstCase
from d2_memfit.planner.device import DeviceModel
from d2_memfit.planner.estimates import DryJob

RESOLUTION = 16 * 2**20


@pytest.mark.slow
def test_the_least_limit_is_the_lowest_in_which_the_allocator_has_room():
    """Without a limit, a GPU's allocator takes more than it needs, and its tensors need less."""
    cfg = tiny_cfg("retinanet", fpn=False)
    cfg.SOLVER.IMS_PER_BATCH = 4
    job = Job.from_cfg(cfg, 1, batch=WorstCase((800, 1200), 20))
    dry_job = DryJob(job, DeviceModel.load("cuda"), evaluates=False)
    least = dry_job.least_bytes()
    assert dry_job.training_bytes() + RESOLUTION < least < dry_job.total_bytes() - RESOLUTION
    assert dry_job.fits(least)
    assert not dry_job.fits(least - RESOLUTION)
    use = dry_job.training_use()
    outside = sum(dry_job.device.outside_bytes(1).values())
    assert dry_job.training_bytes() == use.allocated_bytes + outside
