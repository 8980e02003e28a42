# Copyright (c) the d2_memfit developers.
"""State that exists before the dry run of an iteration."""

import pytest
from tiny import owners_at_peak, sized, tiny_cfg

from d2_memfit import Job
from d2_memfit.planner import steps
from d2_memfit.planner.device import DeviceModel
from d2_memfit.planner.estimate import DryJob


def job_of(ranks=1, **keys):
    """A RetinaNet whose activations are far more than all else."""
    cfg = tiny_cfg("retinanet", fpn=False)
    cfg.SOLVER.IMS_PER_BATCH = 4 * ranks
    cfg.merge_from_list([part for item in keys.items() for part in item])
    return Job.from_cfg(cfg, ranks, **sized(cfg, (320, 480), 20))


def test_gradients_of_earlier_micro_batches_count_at_a_peak_of_the_forward():
    peaks = []
    for micro_batch in (4, 2):  # the whole batch, and the second half of it
        job = job_of(**{"MEMFIT.MICRO_BATCH": micro_batch})
        peaks.append(owners_at_peak(DryJob(job, DeviceModel.load("cpu"), evaluates=False).whole()))
    gradients = steps.Session(job).gradient_bytes
    assert [peak["gradients"] for peak in peaks] == [0, gradients]


@pytest.mark.parametrize("ranks", [2, 3])
def test_zero_keeps_an_equal_share_of_the_optimizers_parameters(ranks):
    whole, share = (
        [p.numel() for group in steps.Session(job)._optimizer.param_groups for p in group["params"]]
        for job in (job_of(ranks), job_of(ranks, **{"MEMFIT.OPTIMIZER.ZERO": True}))
    )
    assert 1 <= ranks * sum(share) / sum(whole) < 1.1
