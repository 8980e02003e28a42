# Copyright (c) the d2_memfit developers.
"""Some blocks of a model recomputed."""

import pytest
from tiny import sized

from d2_memfit import plan_memory
from d2_memfit.config.load import load_cfg
from d2_memfit.job import Job
from d2_memfit.planner.device import DeviceModel
from d2_memfit.planner.estimate import DryJob
from d2_memfit.planner.plan_file import planned, planned_yaml


@pytest.mark.slow
def test_a_plan_recomputes_as_few_blocks_as_fit():
    """BatchNorm that is trained: smaller micro-batches would be another recipe."""
    opts = ["SOLVER.IMS_PER_BATCH", 2, "MODEL.ROI_HEADS.BATCH_SIZE_PER_IMAGE", 32]
    opts += ["MODEL.RESNETS.DEPTH", 18, "MODEL.RESNETS.RES2_OUT_CHANNELS", 64]
    opts += ["MODEL.RESNETS.NORM", "BN", "MEMFIT.BUDGET_GB", 9]
    mask = "COCO-InstanceSegmentation/mask_rcnn_R_50_FPN_3x.yaml"
    cfg = load_cfg(mask, opts)
    job = Job.from_any(cfg, **sized(cfg, (960, 1280), 10))

    def needs(blocks):
        with_blocks = job.with_settings({"MEMFIT.CHECKPOINT.MODULES": blocks})
        dry_job = DryJob(with_blocks, DeviceModel.load("cuda"), evaluates=False)
        return dry_job.budget_bytes(dry_job.use()) / 2**30

    least, most = needs(["backbone"]), needs([])
    names = []
    for share in (0, 0.3, 0.6):
        budget_gb = least + share * (most - least) + 1e-3
        p = plan_memory(job, budget_gb, allow=["exact"], device="cuda", evaluates=False)
        assert p.fits
        config = planned(job.cfg, planned_yaml(job.cfg, p)).MEMFIT
        names.append(config.CHECKPOINT.MODULES)
        assert p.time_factor > 1
    assert names[0] == ["backbone"] or len(names[0]) >= len(names[1])
    assert len(names[1]) > len(names[2]) > 0
    assert all(name.startswith("backbone.bottom_up.res") for name in names[1])
