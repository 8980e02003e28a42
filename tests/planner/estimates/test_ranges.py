# Copyright (c) the d2_memfit developers.
"""Intervals of estimates, by source."""

import math
from collections import Counter
from dataclasses import replace

import pytest

from d2_memfit.config.load import load_cfg
from d2_memfit.job import Job
from d2_memfit.planner.device import DeviceModel, DeviceUse
from d2_memfit.planner.estimates import DryJob
from d2_memfit.planner.estimates.ranges import (
    OF_MARGIN,
    OF_TENSORS,
    Others,
    chance_of_need,
    margin_of,
    range_of,
    widths_of,
)

MB = 2**20
OUTSIDE = Counter({"between blocks": 30 * MB, "context": 400 * MB, "loaded kernels": 200 * MB})
USE = DeviceUse(1000 * MB, 1030 * MB, 1630 * MB, Counter(), OUTSIDE)
CUDA = DeviceModel.load("cuda")
CPU = DeviceModel.load("cpu")
AFTER_A_RUN = replace(CUDA, context_is_measured=True, tensors_are_measured=True)


NOTHING = Others()


def test_each_source_has_its_width():
    others = Others(
        smallest=800 * MB,
        mean_objects=750 * MB,
        few_on_objects=700 * MB,
        no_workspaces=690 * MB,
        most_workspaces=1040 * MB,
        kept_gradients=1030 * MB,
    )
    unknown = replace(CUDA, card_is_known=False)
    widths = widths_of(USE, unknown, others, is_guess=False)
    assert widths["shape"] == (200 * MB, 0)
    assert widths["objects"] == (100 * MB, 0)  # of the smallest images
    assert widths["workspaces"] == (10 * MB, 40 * MB)
    assert widths["card"] == (0, 500 * MB)
    assert widths["release"] == (0, 30 * MB)
    assert widths["software"] == (60 * MB, 60 * MB)
    assert widths["allocator"] == (30 * MB, 30 * MB)
    assert widths["context"] == (313 * MB, 206 * MB)
    assert widths_of(USE, CUDA, others, is_guess=False)["card"] == (0, 0)


def test_the_least_batch_has_all_that_is_less_and_other_sources_are_independent():
    others = Others(smallest=800 * MB, few_on_objects=700 * MB, most_workspaces=1080 * MB)
    widths = widths_of(USE, CUDA, others, is_guess=False)
    low, high = range_of(1000 * MB, widths, OF_TENSORS)
    assert 1000 * MB - low == pytest.approx((300**2 + 60**2) ** 0.5 * MB, abs=1)
    assert high - 1000 * MB == pytest.approx((80**2 + 60**2) ** 0.5 * MB, abs=1)


def test_a_guess_of_objects_is_as_uncertain_upwards():
    fewer = Others(mean_objects=900 * MB)
    assert widths_of(USE, CUDA, fewer, is_guess=True)["objects"] == (100 * MB, 100 * MB)
    assert widths_of(USE, CUDA, NOTHING, is_guess=True)["objects"] == (0, 0)
    few = fewer._replace(few_on_objects=800 * MB)  # proposals are no objects
    assert widths_of(USE, CUDA, few, is_guess=True)["objects"] == (200 * MB, 100 * MB)


def test_a_measured_context_has_no_width():
    own = replace(CUDA, context_is_measured=True)
    assert widths_of(USE, own, NOTHING, is_guess=False)["context"] == (0, 0)


def test_a_cpus_process_takes_50_to_360_mb_in_addition_to_its_tensors():
    widths = widths_of(USE, CPU, NOTHING, is_guess=False)
    assert widths["context"] == (170 * MB, 140 * MB)
    assert widths["allocator"] == (0, 0)


@pytest.mark.parametrize("device", [CUDA, CPU])
def test_a_run_of_the_same_model_narrows_the_range(device):
    measured = replace(device, context_is_measured=True, tensors_are_measured=True)
    widths = widths_of(USE, measured, NOTHING, is_guess=False)
    assert widths["context"] == (0, 0)
    assert widths["software"] == (20 * MB, 20 * MB)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("budget_gb", [3.5, 24])
@pytest.mark.parametrize("device", [CUDA, CPU, AFTER_A_RUN, DeviceModel.load("h100")])
def test_the_margin_is_the_width_of_software_and_context_of_what_is_planned(
    device, budget_gb, ranks
):
    job = Job.from_cfg(load_cfg("COCO-Detection/retinanet_R_50_FPN_1x.yaml"), ranks)
    limit = margin_of(job, device).limit_bytes(budget_gb * 2**30)
    outside = device.outside_bytes(ranks)
    tensors = limit - sum(outside.values())
    use = DeviceUse(tensors, tensors, limit, Counter(), outside)
    widths = widths_of(use, device, NOTHING, is_guess=False)
    margin = sum(widths[source][1] for source in OF_MARGIN)
    assert limit + margin == pytest.approx(budget_gb * 2**30, abs=4)
    assert margin_of(job, device).budget_bytes(limit) == pytest.approx(budget_gb * 2**30, abs=4)


def test_a_share_by_hand_is_of_the_budget():
    cfg = load_cfg("COCO-Detection/retinanet_R_50_FPN_1x.yaml", ["MEMFIT.PLAN.MARGIN", 0.1])
    margin = margin_of(Job.from_cfg(cfg, 1), CUDA)
    assert margin.limit_bytes(1000) == 900
    assert margin.budget_bytes(900) == pytest.approx(1000)


def test_the_range_includes_a_typical_batch_that_needs_more():
    more = Others(mean_objects=1010 * MB)
    assert widths_of(USE, CUDA, more, is_guess=False)["objects"] == (0, 10 * MB)


@pytest.mark.slow
@pytest.mark.parametrize("chunk_size", [None, 4096])
def test_no_batch_of_retinanet_needs_more_than_the_most_crowded_one(chunk_size):
    """Its losses leave out the anchors that overlap an object by less than half.

    The allocator's blocks may differ by some hundred kilobytes.
    """
    small = ["MODEL.RESNETS.DEPTH", 18, "MODEL.RESNETS.RES2_OUT_CHANNELS", 64]
    cfg = load_cfg("COCO-Detection/retinanet_R_50_FPN_3x", small)
    cfg.SOLVER.IMS_PER_BATCH = 1
    cfg.MEMFIT.MATCHING.CHUNK_SIZE = chunk_size
    dry_job = DryJob(Job.from_cfg(cfg, 1, image_size=(480, 640)), CUDA, evaluates=False)
    estimate = dry_job.estimate(with_range=True)
    assert estimate.typical_instances < estimate.num_instances
    assert estimate.typical_gb < 1.001 * estimate.peak_allocated_gb


def test_a_plan_with_less_risk_keeps_more_headroom():
    name = "COCO-Detection/retinanet_R_50_FPN_1x.yaml"
    headrooms = []
    for risk in (0.01, 0.05, 0.25, 0.5):
        job = Job.from_cfg(load_cfg(name, ["MEMFIT.PLAN.RISK", risk]), 1)
        headrooms.append(6 * 2**30 - margin_of(job, CUDA).limit_bytes(6 * 2**30))
    default = 6 * 2**30 - margin_of(Job.from_cfg(load_cfg(name), 1), CUDA).limit_bytes(6 * 2**30)
    assert headrooms[1] == default
    # 2.33, 1.64, 0.67 and 0 standard deviations of the normal distribution
    ratios = [headroom / default for headroom in headrooms]
    assert ratios == pytest.approx([2.33 / 1.64, 1, 0.67 / 1.64, 0], abs=0.05)


def test_the_chance_to_fit_is_that_of_the_ranges_ends():
    widths = {
        "shape": (300, 0),
        "objects": (0, 0),
        "workspaces": (0, 500),  # PyTorch does without them
        "card": (0, 500),
        "release": (0, 0),
        "software": (60, 60),
        "context": (0, 80),
    }
    chance = [chance_of_need(gb, 1000, 900, widths) for gb in (500, 900, 1100, 2000)]
    assert chance == pytest.approx([0, 0.5, 0.95, 1], abs=0.01)
    low = 1000 - math.hypot(300, 60)
    assert chance_of_need(low, 1000, 900, widths) == pytest.approx(0.05, abs=0.001)
    nothing = dict.fromkeys(widths, (0, 0))
    assert [chance_of_need(gb, 1000, 1000, nothing) for gb in (999, 1000)] == [0.0, 1.0]


@pytest.mark.slow
def test_a_plan_that_just_keeps_its_margin_fits_with_the_chance_of_its_risk():
    cfg = load_cfg("COCO-Detection/retinanet_R_50_FPN_1x.yaml", ["SOLVER.IMS_PER_BATCH", 1])
    dry_job = DryJob(Job.from_cfg(cfg, 1, image_size=(480, 640)), CUDA, evaluates=False)
    estimate = dry_job.estimate(with_range=True)
    needed = estimate.peak_allocated_gb + estimate.outside["context"]
    needed += estimate.outside["loaded kernels"]
    budget = margin_of(dry_job.job, CUDA).budget_bytes(needed * 2**30) / 2**30
    # The margin adds the widths of software and context up, as if they depended on each other.
    assert 0.95 <= estimate.chance_within(budget) < 0.99
