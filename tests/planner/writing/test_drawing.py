# Copyright (c) the d2_memfit developers.
"""Pages of dry runs, as the command writes them."""

import json
import re
from dataclasses import replace

import pytest
import torch
import yaml
from lazy_configs import lazy_config
from tiny import tiny_cfg

from d2_memfit.cli.commands import main
from d2_memfit.job import Job
from d2_memfit.planner.dry_run import Allocate
from d2_memfit.planner.estimates import run_dry
from d2_memfit.planner.search import plan_memory
from d2_memfit.planner.writing import keys_as_yaml

pytestmark = pytest.mark.slow

GB = 2**30


@pytest.fixture
def config_file(tmp_path):
    cfg = tiny_cfg("faster_rcnn", fpn=False)
    cfg.SOLVER.IMS_PER_BATCH = 8
    file = tmp_path / "tiny.yaml"
    file.write_text(cfg.dump())
    return str(file)


@pytest.fixture(scope="module")
def dry_job():
    return run_dry(Job.from_cfg(tiny_cfg("mask_rcnn")), "cuda", evaluates=False)


def allocations(dry_job):
    return [e.allocation for e in dry_job.training.events if isinstance(e, Allocate)]


def data_of(page):
    return json.loads(re.search(r'id="data">(.*?)</script>', page.read_text(), re.DOTALL)[1])


def sum_at(chart, step):
    return chart["context_bytes"] + sum(
        size
        for begin, end, size, *_ in chart["tensors"]
        if begin <= step and (step < end or end == chart["num_steps"])
    )


def test_a_tensor_has_the_module_of_its_forward_and_of_its_backward(dry_job):
    of = {
        phase: {a.module for a in allocations(dry_job) if a.phase == phase}
        for phase in ("setup", "forward", "backward")
    }
    for module in ("backbone.bottom_up.stem.conv1", "roi_heads.box_predictor.cls_score"):
        assert f"{module}.weight" in of["setup"]  # its weights
        assert module in of["forward"]
    assert "roi_heads.box_predictor.cls_score" in of["backward"]
    (first,) = [
        a
        for a in allocations(dry_job)
        if a.module == "backbone.bottom_up.stem.conv1" and a.operator == "convolution"
    ]
    assert first.num_bytes == 4 * torch.Size(first.shape).numel()
    assert str(first) == f"convolution float32 {list(first.shape)}"


def test_little_of_the_memory_has_no_name(dry_job):
    at_peak = dry_job.training.alive_at_peak()
    unnamed = sum(a.num_bytes for a in at_peak if not a.module and a.owner != "inputs")
    assert unnamed < 0.05 * sum(a.num_bytes for a in at_peak)


def test_an_estimate_is_drawn(config_file, tmp_path, capsys):
    page = tmp_path / "page.html"
    common = ["--config-file", config_file, "--device", "cuda", "--json", "--training-only"]
    main(["estimate", *common, "--html", str(page)])
    estimate = json.loads(capsys.readouterr().out)
    data = data_of(page)
    (chart,) = data["charts"]
    peak = max(sum_at(chart, step) for step in range(chart["num_steps"]))
    beside = estimate["device_total_gb"] - estimate["peak_reserved_gb"]
    assert peak / GB == pytest.approx(beside + estimate["peak_allocated_gb"], rel=0.02)
    assert [name for name, _ in chart["phases"]] == ["forward", "backward", "optimizer"]
    assert {"parameters", "workspace", "activations: roi_heads"} < set(data["owners"])
    names = [bar["name"] for bar in data["bars"]]
    assert names[:2] == ["as it is", "1 image at a time"]
    assert "MixedPrecision" in names
    assert "4GB card, of which a process gets 3.5 GB" in data["limits_gb"]
    assert data["answer"].startswith("Needs ")
    assert "d2-memfit plan --config-file" in data["next_step"]


def test_keys_to_copy_are_those_of_the_job_s_kind_of_config(dry_job):
    plan = plan_memory(Job.from_lazy(lazy_config()), 1.0, device="cuda", evaluates=False)
    lazy = yaml.safe_load(keys_as_yaml(Job.from_lazy(lazy_config()), plan))
    assert lazy["train.memfit.budget_gb"] == 1.0
    assert lazy["train.memfit.oom.policy"] == "split"
    assert yaml.safe_load(keys_as_yaml(dry_job.job, plan))["MEMFIT"]["OOM"] == {"POLICY": "split"}
    assert keys_as_yaml(dry_job.job, replace(plan, fits=False)) == ""


@pytest.mark.exhaustive  # a search
def test_a_plan_is_drawn_before_and_after(config_file, tmp_path, capsys):
    page = tmp_path / "page.html"
    opts = ["INPUT.MIN_SIZE_TRAIN", "(640,)", "INPUT.MAX_SIZE_TRAIN", "640"]
    args = ["--config-file", config_file, "--device", "cuda", "--training-only", "--json"]
    main(["plan", "--budget", "1", "--allow", "exact", *args, "--html", str(page), *opts])
    plan = json.loads(capsys.readouterr().out)
    before, after = data_of(page)["charts"]
    assert [before["name"], after["name"]] == ["without the plan", "with the plan"]
    assert after["total_bytes"] / GB == pytest.approx(plan["estimate"]["device_total_gb"])
    assert after["total_bytes"] < plan["budget_gb"] * GB < before["total_bytes"]
    assert data_of(page)["limits_gb"]["budget"] == plan["budget_gb"]
    assert data_of(page)["answer"].startswith("Fits: ")
    assert yaml.safe_load(data_of(page)["keys"])["MEMFIT"]["BUDGET_GB"] == 1
