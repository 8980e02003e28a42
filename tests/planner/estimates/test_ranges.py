# Copyright (c) the d2_memfit developers.
"""Intervals of estimates, by source."""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from d2_memfit.config import load_cfg
from d2_memfit.job import Job
from d2_memfit.planner.device import DeviceModel, DeviceUse, device_model
from d2_memfit.planner.estimates import DryJob
from d2_memfit.planner.estimates.ranges import OF_MARGIN, margin_of, widths_of

FOLDER = Path(device_model.__file__).parent / "devices"
MB = 2**20
OUTSIDE = Counter({"between blocks": 30 * MB, "context": 400 * MB, "loaded kernels": 200 * MB})
USE = DeviceUse(1000 * MB, 1030 * MB, 1630 * MB, Counter(), OUTSIDE)
CUDA = DeviceModel.load("cuda")
CPU = DeviceModel.load("cpu")
AFTER_A_RUN = replace(CUDA, context_is_measured=True, tensors_are_measured=True)


def test_each_source_has_its_width():
    widths = widths_of(USE, CUDA, typical_bytes=900 * MB, is_guess=False)
    assert widths["objects"] == (100 * MB, 0)
    assert widths["software"][0] == widths["software"][1] > 0
    assert widths["allocator"] == (30 * MB, 30 * MB)
    assert widths["context"] == (313 * MB, 206 * MB)


def test_a_guess_of_objects_is_as_uncertain_upwards():
    assert widths_of(USE, CUDA, 900 * MB, is_guess=True)["objects"] == (100 * MB, 100 * MB)
    assert widths_of(USE, CUDA, None, is_guess=True)["objects"] == (0, 0)


def test_a_measured_context_has_no_width():
    own = replace(CUDA, context_is_measured=True)
    assert widths_of(USE, own, None, is_guess=False)["context"] == (0, 0)


def test_the_name_of_a_file_changes_no_width(tmp_path):
    for name in ("mine", "cuda"):
        file = tmp_path / f"{name}.yaml"
        file.write_text((FOLDER / "cuda.yaml").read_text())
        widths = widths_of(USE, DeviceModel.load(file), None, is_guess=False)
        assert widths["context"] == (313 * MB, 206 * MB)


def test_a_cpus_process_takes_50_to_360_mb_in_addition_to_its_tensors():
    widths = widths_of(USE, CPU, 900 * MB, is_guess=False)
    assert widths["context"] == (170 * MB, 140 * MB)
    assert widths["allocator"] == (0, 0)


@pytest.mark.parametrize("device", [CUDA, CPU])
def test_a_run_of_the_same_model_narrows_the_range(device):
    measured = replace(device, context_is_measured=True, tensors_are_measured=True)
    widths = widths_of(USE, measured, None, is_guess=False)
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
    widths = widths_of(use, device, None, is_guess=False)
    margin = sum(widths[source][1] for source in OF_MARGIN)
    assert limit + margin == pytest.approx(budget_gb * 2**30, abs=4)
    assert margin_of(job, device).budget_bytes(limit) == pytest.approx(budget_gb * 2**30, abs=4)


def test_a_share_by_hand_is_of_the_budget():
    cfg = load_cfg("COCO-Detection/retinanet_R_50_FPN_1x.yaml", ["MEMFIT.PLAN.MARGIN", 0.1])
    margin = margin_of(Job.from_cfg(cfg, 1), CUDA)
    assert margin.limit_bytes(1000) == 900
    assert margin.budget_bytes(900) == pytest.approx(1000)


def test_the_range_includes_a_typical_batch_that_needs_more():
    assert widths_of(USE, CUDA, 1010 * MB, is_guess=False)["objects"] == (0, 10 * MB)


@pytest.mark.slow
@pytest.mark.parametrize("chunk_size", [None, 4096])
def test_no_batch_of_retinanet_needs_more_than_the_most_crowded_one(chunk_size):
    """Its losses leave out the anchors that overlap an object by less than half.

    The allocator's blocks may differ by some hundred kilobytes.
    """
    cfg = load_cfg("COCO-Detection/retinanet_R_18_FPN_3x")
    cfg.SOLVER.IMS_PER_BATCH = 1
    cfg.MEMFIT.MATCHING.CHUNK_SIZE = chunk_size
    dry_job = DryJob(Job.from_cfg(cfg, 1, image_size=(480, 640)), CUDA, evaluates=False)
    estimate = dry_job.estimate(with_typical=True)
    assert estimate.typical_instances < estimate.num_instances
    assert estimate.typical_gb < 1.001 * estimate.peak_allocated_gb
