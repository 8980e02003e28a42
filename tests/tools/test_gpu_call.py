# Copyright (c) the d2_memfit developers.
"""A rehearsal of the call on a machine with a card, on the made-up one."""

import json
import os
import shutil
import subprocess
import sys
from unittest.mock import patch

import pytest
import torch.distributed as dist
from tiny import ROOT

with patch.dict(os.environ, GPU_REHEARSE="1"):
    from gpu_call import items, prepare
    from gpu_call.card import card

pytestmark = pytest.mark.long

OWN_TESTS = ("train", "crowded")


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    folder = tmp_path_factory.mktemp("prepared")
    prepare.make_data(folder)
    return folder


@pytest.fixture
def no_process_group():
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.parametrize("name", [n for n in items.MEASUREMENTS if n not in OWN_TESTS])
def test_an_item_runs_on_the_made_up_card(name, no_process_group):
    with card():
        rows = list(items.MEASUREMENTS[name].run())
    assert rows
    json.dumps(rows)
    assert name.startswith("fraction") or not any("error" in row for row in rows)
    if name.startswith("full_"):  # others need no more memory on a CPU
        assert rows[0]["recognised"] or name not in ("full_allocator", "full_step", "full_host")


def test_on_the_made_up_card_recovery_goes_on_where_detectron2_ends():
    with card():
        _, theirs, ours = items.crowded()
    assert theirs["recognised"]
    assert theirs["iterations"] == 2
    assert ours["iterations"] == 4
    assert ours["oom_events"] >= 1


def test_a_planned_training_runs(prepared, monkeypatch):
    """The plan is small here; otherwise it is the one that prepare.py makes."""
    monkeypatch.setattr(items, "PREPARED", prepared)
    prepare.make_plan(prepared, "cpu", items.SMALL_TRAINING)
    result, *rows = items.train()
    assert result["status"] == 0, result["end"]
    assert {row["file"] for row in rows} >= {"metrics.json"}


def run(tmp_path, **settings):
    environment = {
        **os.environ,
        **{"GPU_SECONDS": "2000", "GPU_FIRST": "600", "GPU_REST": "600"},  # on a busy machine
        **{"GPU_PYTHON": sys.executable, "GPU_TESTS": "0"},
        **{"GPU_MEASURE": "0", "GPU_DEVICE": "cpu", "OMP_NUM_THREADS": "1"},
        **{"OUT": str(tmp_path / "out"), "GPU_KEPT": str(tmp_path / "kept"), **settings},
    }
    command = ["bash", str(ROOT / "tools" / "gpu_call" / "run.sh")]
    done = subprocess.run(
        command, check=False, cwd=ROOT, env=environment, capture_output=True, text=True
    )
    return done.returncode, (tmp_path / "out" / "log.txt").read_text()


def test_the_call_leaves_its_records_and_goes_on_where_it_ended(tmp_path):
    status, log = run(tmp_path, GPU_REHEARSE="1", GPU_ITEMS="defaults")
    assert status == 0, log
    assert "trainers/d2_memfit, with recovery {" in log
    lines = (tmp_path / "out" / "more.jsonl").read_text().splitlines()
    assert [json.loads(line)["key"] for line in lines] == ["defaults", "defaults"]
    _, _, table = log.partition("the end")
    assert '"card": "Made-up"' in table
    shutil.rmtree(tmp_path / "out")  # some machines empty it
    status, log = run(tmp_path, GPU_REHEARSE="1", GPU_ITEMS="defaults one_rank")
    assert status == 0, log
    assert log.count("gpu_call.call first") == 1
    again = (tmp_path / "out" / "more.jsonl").read_text().splitlines()
    assert again[: len(lines)] == lines
    assert {json.loads(line)["key"] for line in again[len(lines) :]} == {"one_rank"}


def test_if_nothing_can_work_it_ends_at_once(tmp_path):
    status, log = run(tmp_path, GPU_DEVICE="cuda:0", CUDA_VISIBLE_DEVICES="")
    assert status == 3
    assert "NVIDIA" in log or "CUDA" in log
    assert "nothing can work yet" in log
