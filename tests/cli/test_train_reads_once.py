# Copyright (c) the d2_memfit developers.
"""What ``d2-memfit train --fit`` reads, counted in the process of a real run."""

import json

import pytest
from forks import run_forked
from small_datasets import coco_of
from tiny import tiny_cfg

from d2_memfit.memory import FIGURES, figures_of_plan, keep_plan

COUNTING = """
import builtins, io, os, sys
from collections import Counter
from detectron2.config import CfgNode

calls, (files, *arguments) = Counter(), sys.argv[1:]
files = files.split(":")

def counted(cls, name):
    original = getattr(cls, name)
    def call(*args, **kwargs):
        calls[name] += 1
        return original(*args, **kwargs)
    setattr(cls, name, call)

def opened(file, *args, **kwargs):
    calls[os.path.basename(str(file))] += str(file) in files
    return open_file(file, *args, **kwargs)

counted(CfgNode, "merge_from_file")
open_file, builtins.open = builtins.open, opened
io.open = opened
sys.argv[1:] = arguments
from d2_memfit.cli.command_line import main
main()
print("calls:", {name: number for name, number in calls.items() if number})
"""


@pytest.mark.parametrize("opts", [[], ["DATASETS.TEST", "('twice',)", "TEST.EVAL_PERIOD", "1"]])
def test_a_fitted_training_loads_its_config_and_reads_its_annotations_thrice(tmp_path, opts):
    (tmp_path / "train.json").write_text(json.dumps(coco_of(4, folder=tmp_path / "images")))
    (tmp_path / "val.json").write_text(json.dumps(coco_of(2)))
    config = tmp_path / "tiny.yaml"
    config.write_text(tiny_cfg("faster_rcnn", fpn=False).dump())
    arguments = ["--config-file", config, "--coco", "once", tmp_path / "train.json"]
    arguments += [tmp_path / "images", "--coco", "twice", tmp_path / "val.json"]
    keys = ["SOLVER.MAX_ITER", 2, "SOLVER.IMS_PER_BATCH", 2, "OUTPUT_DIR", tmp_path / "output"]
    keys += opts or ["DATASETS.TEST", "()"]
    files = f"{tmp_path}/train.json:{tmp_path}/val.json"
    command = [files, "train", "--fit", "--budget", 3, *arguments, tmp_path / "images", *keys]
    run = run_forked("-c", COUNTING, *command)
    assert run.returncode == 0, run.stderr[-4000:]
    (line,) = [line for line in run.stdout.splitlines() if line.startswith("calls: ")]
    calls = eval(line.removeprefix("calls: "))
    assert calls["merge_from_file"] == 1
    assert calls["train.json"] <= 3  # to check, to plan, and to train


def test_a_training_keeps_the_figures_of_the_plan_that_is_its_config(tmp_path):
    plan, folder, figures = tmp_path / "plan.yaml", tmp_path / "output", {"predicted_gb": [1, 2, 3]}
    folder.mkdir()
    kept = folder / "memfit_plan.yaml"
    for text, expected in (
        ("A: 1\n", {}),  # no plan
        (f"{FIGURES}{json.dumps(figures)}\nA: 1\n", figures),
        (f"{FIGURES}{json.dumps({})}\n", figures),  # without figures
        (f'{FIGURES}{{"predicted_gb": [4, 5, 6]}}\n', {"predicted_gb": [4, 5, 6]}),
    ):
        plan.write_text(text)
        keep_plan(plan, folder)
        assert figures_of_plan(folder) == expected
    kept.write_text("of a person")
    keep_plan(plan, folder)
    assert kept.read_text() == "of a person"
