# Copyright (c) the d2_memfit developers.
"""Estimates that start from what a run has measured."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from tiny import tiny_cfg

from d2_memfit import Job, estimate_memory
from d2_memfit.common.errors import ConfigError, DataError
from d2_memfit.memory import RunRecord, device_and_software
from d2_memfit.planner.device import DeviceModel
from d2_memfit.planner.from_run import as_in_run
from d2_memfit.planner.plan import plan_memory
from d2_memfit.planner.text import describe_estimate, describe_plan

MB = 2**20
GB = 2**30


@pytest.fixture(scope="module")
def cfg():
    cfg = tiny_cfg("retinanet", fpn=False)
    cfg.DATASETS.TEST = ()
    cfg.SOLVER.IMS_PER_BATCH = 2
    cfg.freeze()
    return cfg


@pytest.fixture
def wrong():
    """A device with numbers far from those of any CPU."""
    return replace(DeviceModel.load("cpu"), context_mb=4000.0, other_tensors_mb=0.0)


@pytest.fixture
def keep(tmp_path):
    """Keeps a record of a run of a job."""

    def write(cfg, **values):
        record = RunRecord(
            date="2026-11-24 13:05:59",
            here=device_and_software(torch.device("cpu")),
            ranks=1,
            family=Job.from_any(cfg).family,
            predicted_gb=[0.25, 0.25, 0.3],
            iterations=5,
            had_errors=False,
            allocated_bytes=900 * MB,
            outside_bytes=300 * MB,
        )
        replace(record, **values).write(tmp_path / "run")
        return tmp_path / "run"

    return write


def estimate(cfg, device, size=(64, 128), run=None):
    return estimate_memory(cfg, device=device, num_instances=3, image_size=size, run=run)


def predicting(e):
    return [e.peak_allocated_gb, e.peak_reserved_gb, 0.3]


def test_what_a_run_took_more_counts_for_the_next_estimate(cfg, wrong, keep):
    before = estimate(cfg, wrong)
    assert before.from_run == ""
    after = estimate(cfg, wrong, run=keep(cfg, predicted_gb=predicting(before)))
    assert after.peak_allocated_gb == pytest.approx(900 / 1024, rel=1e-3)
    assert after.outside["context"] == pytest.approx(300 / 1024, rel=1e-6)
    line = "Starts from a run here on 2026-11-24 13:05 UTC, 5 iterations: 0.88 GB allocated where "
    assert line in describe_estimate(after)


@pytest.mark.parametrize(("iterations", "less_mb"), [(5, 0), (1000, 100)])
def test_a_run_that_took_less_is_believed_if_it_is_long(cfg, keep, iterations, less_mb):
    before = estimate(cfg, "cpu")
    less = round(before.peak_allocated_gb * GB) - 100 * MB
    run = keep(cfg, predicted_gb=predicting(before), iterations=iterations, allocated_bytes=less)
    after = estimate(cfg, "cpu", run=run).peak_allocated_gb
    assert after == pytest.approx(before.peak_allocated_gb - less_mb / 1024, rel=1e-3)


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"ranks": 2}, "it had 2 ranks, not 1"),
        ({"family": "another"}, "it trained another model"),
        ({"had_errors": True}, "it ran out of memory"),
        ({"here": {"device": "another"}}, "it had another device, or other software"),
        ({"predicted_gb": []}, "has no plan"),
    ],
)
def test_a_run_of_something_else_is_an_error(cfg, values, reason, keep):
    with pytest.raises(ConfigError, match=reason):
        estimate(cfg, "cpu", run=keep(cfg, **values))


def test_a_record_whose_values_are_of_other_types_is_refused(cfg, keep):
    wrong = {"here": "cpu", "ranks": True, "predicted_gb": [float("nan")], "iterations": "5"}
    with pytest.raises(DataError, match=f"peaks.json: {', '.join(wrong)} must have other types"):
        estimate(cfg, "cpu", run=keep(cfg, **wrong))


def test_plans_start_from_a_run_too_and_say_so(cfg, wrong, keep):
    run = keep(cfg)
    options = {"num_instances": 3, "image_size": (64, 128)}
    plan = plan_memory(cfg, 4.0, device=wrong, run=run, **options)
    before = estimate(cfg, wrong)
    more = (900 * MB / GB) - 0.25
    assert plan.estimate.peak_allocated_gb == pytest.approx(
        before.peak_allocated_gb + more, rel=1e-3
    )
    assert "Starts from a run here on 2026-11-24" in describe_plan(plan)


def test_on_a_gpu_a_run_tells_what_is_outside(cfg, monkeypatch, keep):
    gpu = SimpleNamespace(name="NVIDIA GeForce RTX 3060", total_memory=12 * GB, major=8)
    for name, value in (("is_available", True), ("current_device", 0)):
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: gpu)
    here = device_and_software(torch.device("cpu"))
    monkeypatch.setattr("d2_memfit.planner.from_run.device_and_software", lambda _: here)
    job = Job.from_cfg(cfg, num_instances=3, image_size=(64, 128))
    found = as_in_run(DeviceModel.load("rtx_3060"), job, keep(cfg))
    assert (found.context_mb, found.kernels_mb, found.nccl_mb) == (300, 0, (0, 0))
    assert found.margin == (0.02, 0)  # of what was measured
    assert found.other_tensors_mb == pytest.approx(900 - 256, abs=1)
    with pytest.raises(ConfigError, match="another device"):
        as_in_run(DeviceModel.load("rtx_3070"), job, keep(cfg))
