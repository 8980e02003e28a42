# Copyright (c) the d2_memfit developers.
import copy

import pytest
import torch
from detector_parts import Detector
from detectron2.utils.events import EventStorage
from injection import seed_all
from tiny import images, tiny_cfg, tiny_model

from d2_memfit.config.load import load_cfg
from d2_memfit.job import Job, WorstCase
from d2_memfit.planner.device import DeviceModel
from d2_memfit.planner.estimates import DryJob
from d2_memfit.planner.search import BLOCKWISE, Planner, Trials, choice_of, with_blocks
from d2_memfit.planner.search.block_memory import blocks_of
from d2_memfit.planner.search.knapsack import pack
from d2_memfit.planner.writing import planned, planned_yaml
from d2_memfit.techniques import apply_techniques, offload

MASK = "COCO-InstanceSegmentation/mask_rcnn_R_50_FPN_3x.yaml"
CASE = WorstCase((960, 1280), 10)
KEYS = ("MEMFIT.CHECKPOINT.MODULES", "MEMFIT.OFFLOAD.MODULES")


# The backbone takes most, as with large images; BatchNorm that is trained, for which smaller
# micro-batches would be another recipe.
OPTS = [
    *("SOLVER.IMS_PER_BATCH", 2, "MODEL.ROI_HEADS.BATCH_SIZE_PER_IMAGE", 32),
    *("MODEL.RESNETS.DEPTH", 18, "MODEL.RESNETS.RES2_OUT_CHANNELS", 64),
    *("MODEL.RESNETS.NORM", "BN"),
]
ALL = choice_of(["ActivationCheckpointing"], 2)
PLAIN = choice_of((), 2)


def trials(device):
    job = Job.from_any(load_cfg(MASK, OPTS), batch=CASE)
    t = Trials(job, DeviceModel.load(device), DryJob, False, lambda line: None)
    return t


@pytest.fixture(scope="module", params=["cuda", "cpu"])
def halfway(request):
    """Trials within a limit between what is needed with all blocks recomputed, and with none."""
    t = trials(request.param)
    t.limit_bytes = sum(t.dry_job(c).least_bytes() for c in (ALL, PLAIN)) // 2
    return t


def allowed(t):
    return [name for name in BLOCKWISE if t.device.is_gpu or name != "ActivationOffload"]


@pytest.mark.slow
def test_bytes_and_seconds_of_chosen_blocks_are_those_of_their_dry_run(halfway):
    plain = halfway.dry_job(PLAIN)
    blocks = blocks_of(plain.training, halfway.device)
    limit = blocks.bytes_at.max() - plain.training_bytes() + halfway.limit_bytes
    packing = pack(blocks, limit, offloads=False)
    assert packing.recomputed
    modules = {"ActivationCheckpointing": packing.recomputed}
    found = halfway.dry_job(choice_of(modules, 2, modules.items()))
    saved = plain.training_bytes() - found.training_bytes()
    assert saved == pytest.approx(blocks.bytes_at.max() - packing.peak_bytes, rel=0.05)
    more = found.seconds() - plain.seconds()
    assert more == pytest.approx(
        packing.seconds - blocks.forward_s - blocks.backward_s, abs=0.01 * plain.seconds()
    )


@pytest.mark.slow
def test_chosen_blocks_fit_and_take_less_time_than_all(halfway):
    assert halfway.fits(ALL)
    assert not halfway.fits(PLAIN)
    found, _ = with_blocks(halfway, PLAIN, allowed(halfway))
    assert halfway.fits(found)
    seconds = [halfway.dry_job(c).seconds() for c in (PLAIN, found, ALL)]
    assert seconds[0] < seconds[1] < 0.95 * seconds[2]
    settings = halfway.settings(found)
    names = [name for key in KEYS for name in settings.get(key, ())]
    assert names
    assert set(names) <= set(blocks_of(halfway.dry_job(PLAIN).training, halfway.device).names)


@pytest.mark.slow
def test_blocks_that_take_too_long_are_not_wanted_and_what_fits_needs_none(halfway):
    _, seconds = with_blocks(halfway, PLAIN, allowed(halfway))
    none, at_least = with_blocks(halfway, PLAIN, allowed(halfway), 0.99 * seconds)
    assert none is None
    assert at_least == pytest.approx(seconds, rel=0.01)
    assert with_blocks(halfway, ALL, []) == (ALL, halfway.dry_job(ALL).seconds())
    assert with_blocks(halfway, PLAIN, []) == (None, float("inf"))


@pytest.mark.slow
@pytest.mark.parametrize("halfway", ["cuda"], indirect=True)
def test_a_plan_names_the_modules(halfway):
    planner = Planner(halfway.job, halfway.device, evaluates=False)
    planner._dry_jobs.update(halfway._dry_jobs)  # they need not be made again
    least, most = (halfway.dry_job(choice).total_bytes() / 2**30 for choice in (ALL, PLAIN))
    budget_gb = (least + 3 * most) / 4
    p = planner.plan(budget_gb, ["exact"])
    assert p.fits
    assert p.estimate.device_total_gb <= planner.limit_bytes / 2**30
    config = planned(halfway.job.cfg, planned_yaml(halfway.job.cfg, p)).MEMFIT
    names = [*config.CHECKPOINT.MODULES, *config.OFFLOAD.MODULES]
    assert names
    assert not {"all", "backbone"} & set(names)


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


@pytest.mark.slow
def test_more_memory_makes_no_choice_of_blocks_slower(halfway):
    limit = halfway.limit_bytes
    least, most = (halfway.dry_job(choice).least_bytes() for choice in (ALL, PLAIN))
    seconds = []
    for share in (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9):
        halfway.limit_bytes = int(least + share * (most - least))
        seconds.append(with_blocks(halfway, PLAIN, ["ActivationCheckpointing"])[1])
    halfway.limit_bytes = limit
    assert seconds == pytest.approx(sorted(seconds, reverse=True), rel=0.02)
