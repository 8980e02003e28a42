# Copyright (c) the d2_memfit developers.
"""Some blocks of a model recomputed or offloaded."""

import copy

import pytest
import torch
from detector_parts import Detector
from detectron2.utils.events import EventStorage
from injection import seed_all
from tiny import images, tiny_cfg, tiny_model

from d2_memfit import plan_memory
from d2_memfit.config.load import load_cfg
from d2_memfit.job import Job, WorstCase
from d2_memfit.planner.device import DeviceModel
from d2_memfit.planner.estimate import DryJob
from d2_memfit.planner.plan_file import planned, planned_yaml
from d2_memfit.techniques import offload
from d2_memfit.techniques.registry import apply_techniques

KEYS = ("MEMFIT.CHECKPOINT.MODULES", "MEMFIT.OFFLOAD.MODULES")


def test_a_plan_recomputes_as_few_blocks_as_fit():
    """BatchNorm that is trained: smaller micro-batches would be another recipe."""
    opts = ["SOLVER.IMS_PER_BATCH", 2, "MODEL.ROI_HEADS.BATCH_SIZE_PER_IMAGE", 32]
    opts += ["MODEL.RESNETS.DEPTH", 18, "MODEL.RESNETS.RES2_OUT_CHANNELS", 64]
    opts += ["MODEL.RESNETS.NORM", "BN", "MEMFIT.BUDGET_GB", 9]
    mask = "COCO-InstanceSegmentation/mask_rcnn_R_50_FPN_3x.yaml"
    job = Job.from_any(load_cfg(mask, opts), batch=WorstCase((960, 1280), 10))

    def needs(blocks):
        with_blocks = job.with_settings({KEYS[0]: blocks})
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


MODELS = {
    "mask_rcnn": (
        lambda: (tiny_model(tiny_cfg("mask_rcnn")), images(2)),
        ["backbone.bottom_up.res3", "roi_heads.mask_head"],
        ["backbone.bottom_up.res4.0", "proposal_generator.rpn_head"],
    ),
    "transformer": (
        lambda: (Detector(), torch.rand(2, 24, 16)),
        ["vit.1", "encoder.layers.0", "bbox_embed"],
        ["encoder.layers.1", "decoder.layers.0"],
    ),
}


@pytest.mark.parametrize("family", MODELS)
def test_gradients_with_some_blocks_recomputed_and_others_offloaded(family, monkeypatch):
    """To the last bit, in float32."""
    monkeypatch.setattr(offload, "_SMALLEST_BYTES", 1)
    make, recomputed, offloaded = MODELS[family]
    torch.manual_seed(0)
    plain, batch = make()
    cfg = tiny_cfg()
    cfg.merge_from_list([KEYS[0], recomputed, KEYS[1], offloaded])
    changed = apply_techniques("model", copy.deepcopy(plain), cfg)
    losses_and_gradients(copy.deepcopy(plain), batch)  # the first may round differently
    expected, actual = (losses_and_gradients(model, batch) for model in (plain, changed))
    assert expected.keys() == actual.keys()
    assert all(torch.equal(actual[key], expected[key]) for key in expected)


def losses_and_gradients(model, batch):
    seed_all()
    with EventStorage():
        losses = model(copy.deepcopy(batch))
    sum(losses.values()).backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {**losses, **gradients}
