# Copyright (c) the d2_memfit developers.
"""A recovery in a run of the tool."""

import json
import re
import sys

import pytest
from forks import run_forked
from tiny import ROOT, read_metrics, tiny_cfg

pytestmark = pytest.mark.slow


TRAIN_NET = ROOT / "tools" / "train_net.py"


def read_record(output_dir):
    return [json.loads(line) for line in (output_dir / "memfit_oom.jsonl").open()]


@pytest.fixture
def cfg(coins, tmp_path):
    cfg = tiny_cfg("mask_rcnn")
    cfg.DATASETS.TRAIN, cfg.DATASETS.TEST = ("cli_train",), ("cli_val",)
    cfg.SOLVER.IMS_PER_BATCH = 2
    cfg.MEMFIT.OOM.POLICY = "split"
    cfg.OUTPUT_DIR = str(tmp_path / "output")
    return cfg


def train_net(cfg, coins, tmp_path, *options, code=""):
    """Run the tool, with some code before it."""
    config_file = tmp_path / "config.yaml"
    config_file.write_text(cfg.dump())
    arguments = ["--config-file", config_file]
    for split in ("train", "val"):
        arguments += ["--coco", f"cli_{split}", coins / f"{split}.json", coins / split]
    arguments += options
    program = f"import sys, runpy\n{code}\nrunpy.run_path({str(TRAIN_NET)!r}, run_name='__main__')"
    return run_forked("-c", program, *arguments, timeout_s=300)


SAYS_ALLOCATOR_OPTIONS = """
import atexit, os
os.environ.pop("PYTORCH_CUDA_ALLOC_CONF", None)
atexit.register(lambda: print("options:", os.environ.get("PYTORCH_CUDA_ALLOC_CONF")))
"""


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux limits a process's data")
def test_a_budget_that_detectron2_exceeds_is_kept_and_can_be_planned_for(cfg, coins, tmp_path):
    """In training and in evaluation, and each worker of the loader has one of its own."""
    cfg.INPUT.MIN_SIZE_TRAIN = (640,)
    cfg.INPUT.MAX_SIZE_TRAIN = 1280
    cfg.SOLVER.IMS_PER_BATCH = 8
    cfg.SOLVER.MAX_ITER = 1
    cfg.DATALOADER.NUM_WORKERS = 1
    cfg.MEMFIT.BUDGET_GB = 0.01
    refused = train_net(cfg, coins, tmp_path)
    assert refused.returncode == 2
    taken_gb = float(re.search(r"not more than the ([\d.]+) GB", refused.stderr)[1])

    cfg.MEMFIT.BUDGET_GB = taken_gb + 0.6
    plain = train_net(cfg, coins, tmp_path, "MEMFIT.OOM.POLICY", "raise")
    assert plain.returncode == 1
    assert "can't allocate memory" in plain.stderr or "could not create" in plain.stderr
    ours = train_net(cfg, coins, tmp_path, code=SAYS_ALLOCATOR_OPTIONS)
    assert ours.returncode == 0, ours.stderr[-4000:]
    assert "options: expandable_segments:True" in ours.stdout
    output_dir = tmp_path / "output"
    first = read_record(output_dir)[0]
    assert first["budget_gb"] == cfg.MEMFIT.BUDGET_GB
    assert first["micro_batch"] == 8
    assert first["reserved_gb"] <= first["budget_gb"]
    assert len(first["images"]) == 8
    assert any("segm/AP50" in line for line in read_metrics(output_dir))
    (metrics,) = [m for m in read_metrics(output_dir) if "effective_batch" in m]
    assert metrics["effective_batch"] == 8
    assert metrics["memfit/oom_events"] == len(read_record(output_dir))
    assert metrics["memfit/micro_batch"] < 8

    output_dir = tmp_path / "planned"
    options = ["MEMFIT.PLAN.ENABLED", True, "OUTPUT_DIR", output_dir]
    planned = train_net(cfg, coins, tmp_path, *options)
    assert planned.returncode == 0, planned.stderr[-4000:]
    assert "smaller micro-batches" in planned.stdout
    assert not (output_dir / "memfit_oom.jsonl").exists()
    (metrics,) = [m for m in read_metrics(output_dir) if "effective_batch" in m]
    assert metrics["effective_batch"] == 8
