# Copyright (c) the d2_memfit developers.
"""Estimates that start from what a run has measured."""

import json
import sys
from dataclasses import asdict, replace

import pytest
import torch
import yaml
from lazy_configs import lazy_config
from tiny import images, run_process, tiny_cfg

from d2_memfit import Job, estimate_memory
from d2_memfit.engine.hooks import settings_of
from d2_memfit.errors import ConfigError
from d2_memfit.memory import RunRecord, device_and_software
from d2_memfit.planner import device
from d2_memfit.planner.device import DeviceModel
from d2_memfit.planner.estimates import as_in_run
from d2_memfit.planner.search import plan_memory
from d2_memfit.planner.writing import describe_estimate, describe_plan

pytestmark = pytest.mark.slow

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
def wrong(tmp_path):
    """A device file with numbers far from those of any CPU."""
    values = {**asdict(device.DeviceModel.load("cpu")), "is_this_process": False}
    file = tmp_path / "wrong.yaml"
    file.write_text(yaml.safe_dump({**values, "context_mb": 4000, "other_tensors_mb": 0}))
    return str(file)


@pytest.fixture
def keep(tmp_path):
    """Keeps a record of a run of a job, of a micro-batch of 2 images of 64 x 128 pixels."""

    def write(cfg, **values):
        record = RunRecord(
            date="2026-11-24 13:05:59",
            here=device_and_software(torch.device("cpu")),
            ranks=1,
            family=Job.from_any(cfg).family,
            settings={"SOLVER.IMS_PER_BATCH": 2, "MEMFIT.BUDGET_GB": None},
            iterations=5,
            micro_batch=[2, 64, 128, 6],
            had_errors=False,
            allocated_bytes=900 * MB,
            reserved_bytes=900 * MB,
            outside_bytes=300 * MB,
            expandable_segments=False,
        )
        replace(record, **values).write(tmp_path / "run")
        return tmp_path / "run"

    return write


def estimate(cfg, device, size=(64, 128), run=None):
    return estimate_memory(cfg, device=device, num_instances=3, image_size=size, run=run)


def test_what_a_run_took_more_counts_for_the_next_estimate(cfg, wrong, keep):
    before = estimate(cfg, wrong)
    assert before.from_run == ""
    after = estimate(cfg, wrong, run=keep(cfg))
    assert after.peak_allocated_gb == pytest.approx(900 / 1024, rel=1e-3)
    assert after.outside["context"] == pytest.approx(300 / 1024, rel=1e-6)
    assert before.widths["context"][1] > 0
    assert after.widths["context"] == (0, 0)
    line = "Starts from a run here on 2026-11-24 13:05 UTC, 5 iterations: 0.88 GB allocated where "
    assert line in describe_estimate(after)


def test_a_short_run_that_took_less_is_not_believed(cfg, keep):
    before = estimate(cfg, "cpu")
    run = keep(cfg, allocated_bytes=1 * MB)
    assert estimate(cfg, "cpu", run=run).peak_allocated_gb == before.peak_allocated_gb


def test_a_long_run_that_took_less_is_believed(cfg, keep):
    before = estimate(cfg, "cpu").peak_allocated_gb
    run = keep(cfg, iterations=1000, allocated_bytes=round(before * GB) - 100 * MB)
    after = estimate(cfg, "cpu", run=run).peak_allocated_gb
    assert after == pytest.approx(before - 100 / 1024, rel=1e-3)


def test_the_run_is_compared_with_what_it_had_and_not_with_the_largest_images(cfg, keep):
    before = estimate(cfg, "cpu", (64, 64)).peak_allocated_gb
    without_run, run = estimate(cfg, "cpu").peak_allocated_gb, keep(cfg)
    gained = estimate(cfg, "cpu", run=run).peak_allocated_gb - without_run
    after = estimate(cfg, "cpu", (64, 64), run).peak_allocated_gb
    assert gained > 0.5
    assert after - before == pytest.approx(gained, rel=1e-3)


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"ranks": 2}, "it had 2 ranks, not 1"),
        ({"family": "another"}, "it trained another model"),
        ({"had_errors": True}, "it ran out of memory"),
        ({"here": {"device": "another"}}, "it had another device, or other software"),
        ({"settings": {"MEMFIT.BUDGET_GB": 6.0}}, "both must have a budget, or neither"),
        ({"settings": {"MEMFIT.GONE": 1}}, r"MEMFIT\.GONE"),
        ({"settings": {"SOLVER.IMS_PER_BATCH": "2"}}, "."),
        ({"settings": {"MEMFIT.CHECKPOINT.MODULES": 5}}, r"MEMFIT\.CHECKPOINT\.MODULES"),
    ],
)
def test_a_run_of_something_else_is_an_error(cfg, values, reason, keep):
    with pytest.raises(ConfigError, match=reason):
        estimate(cfg, "cpu", run=keep(cfg, **values))


def test_a_context_that_is_measured_in_this_process_stays(cfg, keep):
    assert estimate(cfg, "cpu", run=keep(cfg)).outside["context"] > 310 / 1024


def test_of_several_ranks_the_runs_context_counts(cfg, keep):
    run = keep(cfg, ranks=2, micro_batch=[1, 64, 128, 3])
    options = {"device": "cpu", "num_instances": 3, "image_size": (64, 128)}
    after = estimate_memory(cfg, num_gpus=2, run=run, **options)
    assert after.outside["context"] == pytest.approx(300 / 1024, rel=1e-6)
    assert after.peak_allocated_gb == pytest.approx(900 / 1024, rel=1e-3)


def test_a_batch_that_cannot_be_made_again_counts_only_if_it_took_more(cfg, keep):
    """A loader without a mapper makes no images of a given size."""
    cpu = DeviceModel.load("cpu")

    def other_tensors_mb(**values):
        run = keep(cfg, micro_batch=[0, 0, 0, 0], iterations=1000, **values)
        job = Job.from_cfg(cfg, batch=images(2, size=64))
        return as_in_run(cpu, job, run, False).other_tensors_mb

    assert other_tensors_mb(allocated_bytes=1 * MB) == cpu.other_tensors_mb
    assert other_tensors_mb() > 600


def test_a_lazyconfigs_run_counts_if_it_took_more(keep):
    cfg = lazy_config(memfit={"checkpoint": {"modules": ["backbone"]}})
    job = Job.from_lazy(cfg, batch=images(4))
    settings = settings_of(job.cfg)
    assert settings["MEMFIT.CHECKPOINT.MODULES"] == ["backbone"]
    run = keep(job, settings=settings, micro_batch=[4, 64, 64, 12])
    cpu = DeviceModel.load("cpu")
    assert as_in_run(cpu, job, run, False).other_tensors_mb > 600
    assert as_in_run(cpu, Job.from_lazy(lazy_config(), batch=images(4)), run, False).from_run
    cfg.model.cfg.family = "retinanet"
    with pytest.raises(ConfigError, match="another model"):
        as_in_run(cpu, Job.from_lazy(cfg, batch=images(4)), run, False)


def test_plans_start_from_a_run_too_and_say_so(cfg, wrong, keep):
    run = keep(cfg, settings={"SOLVER.IMS_PER_BATCH": 2, "MEMFIT.BUDGET_GB": 3.0})
    options = {"num_instances": 3, "image_size": (64, 128)}
    plan = plan_memory(cfg, 4.0, device=wrong, run=run, **options)
    assert plan.estimate.peak_allocated_gb == pytest.approx(900 / 1024, rel=1e-3)
    assert "Starts from a run here on 2026-11-24" in describe_plan(plan)


class Gpu:
    """What the planner asks of a GPU that is not there."""

    def __init__(self, monkeypatch, name):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: name)
        here = device_and_software(torch.device("cpu"))
        monkeypatch.setattr(
            "d2_memfit.planner.estimates.from_runs.device_and_software", lambda _: here
        )


def test_on_a_gpu_a_run_tells_what_is_outside_and_what_is_reserved(cfg, monkeypatch, keep):
    Gpu(monkeypatch, "NVIDIA GeForce RTX 3060")
    job = Job.from_cfg(cfg, num_instances=3, image_size=(64, 128))
    card = DeviceModel.load("rtx_3060")
    found = as_in_run(card, job, keep(cfg), True)
    assert (found.context_mb, found.kernels_mb, found.nccl_mb) == (300, 0, (0, 0))
    run = keep(cfg, reserved_bytes=1100 * MB)
    found = as_in_run(card, job, run, True)
    assert found.other_tensors_mb > 600
    assert found.reserved_factor == pytest.approx(1100 / 900, rel=0.03)
    with pytest.raises(ConfigError, match="another device"):
        as_in_run(DeviceModel.load("rtx_3070"), job, run, True)


def command(name, *options):
    """Run d2-memfit in a process of its own, under a budget of 3 GB."""
    opts = ["MEMFIT.BUDGET_GB", "3", "MODEL.DEVICE", "cpu", "DATALOADER.NUM_WORKERS", "0"]
    opts += ["SOLVER.MAX_ITER", "5", "SOLVER.IMS_PER_BATCH", "2", "SOLVER.BASE_LR", "1e-6"]
    opts += ["INPUT.MIN_SIZE_TRAIN", "(160,)", "MODEL.WEIGHTS", "", "SEED", "1"]
    config = ["--config-file", "COCO-Detection/retinanet_R_50_FPN_1x.yaml"]
    first = [sys.executable, "-m", "d2_memfit", name, *config]
    run = run_process([*first, *options[:-2], *opts, *options[-2:]])
    assert run.returncode == 0, run.stderr
    return run.stdout


@pytest.mark.long
def test_a_wrong_device_file_is_put_right_by_one_run(coins, wrong, tmp_path):
    """End to end: what the job takes in another run is within 2% of the estimate."""
    data = "--coco", "learned_train", coins / "train.json", coins / "train"
    ask = *data, "--training-only", "--json", "--device", wrong, "OUTPUT_DIR", "none"

    def needs(*run):
        e = json.loads(command("estimate", *run, *ask))
        return e["peak_allocated_gb"], e["device_total_gb"]

    def runs(folder):
        command("train", *data, "OUTPUT_DIR", tmp_path / folder)
        record = json.loads((tmp_path / folder / "memfit_peaks.json").read_text())
        allocated, outside = record["allocated_bytes"], record["outside_bytes"]
        return allocated / GB, (allocated + outside) / GB

    before = needs()
    runs("first")
    after, real = needs("--run", tmp_path / "first"), runs("second")
    assert before[1] > 2 * real[1]
    assert before[0] < 0.98 * real[0]
    assert after == pytest.approx(real, rel=0.02)
