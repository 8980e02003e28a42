"""The largest batch run for real: what is measured, and what is left behind."""

import json

import pytest
import torch
from tiny import tiny_cfg

from d2_memfit.cli import main
from d2_memfit.memory import TensorMeter
from d2_memfit.planner import DryJob, WorstCase, estimate_memory, plan_memory
from d2_memfit.planner.device_model import DeviceModel
from d2_memfit.planner.probe import run_for_real

CASE = WorstCase(((320, 480),), 10, (320, 480), (320, 480))

on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


@pytest.mark.parametrize("family", ["proposal_network", "mask_rcnn", "keypoint_rcnn", "retinanet"])
def test_a_real_run_has_the_peaks_of_the_dry_one(family):
    cfg = tiny_cfg(family)
    cfg.SOLVER.IMS_PER_BATCH = 4
    cfg.MEMFIT.MICRO_BATCH = 2
    dry_job = DryJob(cfg, 1, DeviceModel.load("cpu"), CASE)
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    with TensorMeter() as meter:
        peaks = []
        for _ in run_for_real(dry_job, "cpu"):
            peaks.append(meter.peak_bytes)
            meter.peak_bytes = meter.live_bytes
    assert torch.rand(1) == expected
    timelines = dry_job.training, dry_job.evaluation
    training, evaluation = (sum(t.peak().values()) for t in timelines)
    assert peaks[0] == pytest.approx(training, rel=0.01)
    assert peaks[1] == pytest.approx(evaluation, rel=0.01)


@pytest.fixture
def cfg():
    cfg = tiny_cfg("mask_rcnn", image_size=512)
    cfg.MODEL.DEVICE = "cuda"
    cfg.SOLVER.IMS_PER_BATCH = 8
    return cfg


def state_of_gpu():
    torch.cuda.empty_cache()
    return (
        torch.cuda.memory_allocated(),
        torch.cuda.memory_reserved(),
        torch.cuda.get_rng_state().tolist(),
        torch.get_rng_state().tolist(),
    )


@pytest.mark.gpu
@on_gpu
def test_a_probe_measures_and_leaves_nothing_behind(cfg):
    torch.zeros(1, device="cuda")
    before = state_of_gpu()
    measured = estimate_memory(cfg, case=CASE, probe=True)
    assert state_of_gpu() == before
    estimated = estimate_memory(cfg, case=CASE)
    assert measured.peak_allocated_gb == pytest.approx(estimated.peak_allocated_gb, rel=0.2)
    assert sum(measured.breakdown.values()) == pytest.approx(measured.peak_allocated_gb)
    half = torch.cuda.get_device_properties(0).total_memory // 2
    torch.empty(half, dtype=torch.uint8, device="cuda")  # no limit is left


@pytest.mark.gpu
@on_gpu
def test_a_plan_that_was_probed_fits_for_real(cfg):
    whole = estimate_memory(cfg, case=CASE, probe=True)
    budget_gb = whole.device_total_gb - 0.2 * whole.peak_allocated_gb
    plan = plan_memory(cfg, budget_gb, case=CASE, probe=True)
    assert plan.fits
    assert plan.estimate.images_per_micro_batch < 8
    assert plan.estimate.device_total_gb <= budget_gb


@pytest.mark.gpu
@on_gpu
def test_the_command_probes(cfg, tmp_path, capsys):
    file = tmp_path / "tiny.yaml"
    file.write_text(cfg.dump())
    main(["estimate", "--config-file", str(file), "--probe", "--json"])
    assert "beyond the dry run" in json.loads(capsys.readouterr().out)["breakdown"]
