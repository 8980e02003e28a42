# Copyright (c) the d2_memfit developers.
import json
import logging
import os
import re
import shlex
import sys

import pytest
from pasted import paste
from tiny import run_process, tiny_cfg

from d2_memfit import __version__
from d2_memfit.cli.command_line import main
from d2_memfit.config.files import find_config_file
from d2_memfit.config.load import load_cfg
from d2_memfit.memory import figures_of_plan


@pytest.fixture
def config_file(tmp_path):
    cfg = tiny_cfg("proposal_network", fpn=False)
    cfg.DATASETS.TEST, cfg.SOLVER.IMS_PER_BATCH = (), 4
    file = tmp_path / "tiny.yaml"
    file.write_text(cfg.dump())
    return str(file)


def test_an_estimate_is_a_table_or_json_with_the_names_of_python(config_file, capsys):
    main(["estimate", "--config-file", config_file, "--device", "cuda", "--details"])
    table = capsys.readouterr().out
    assert "peak reserved" in table
    assert "activations: backbone" in table
    assert "Assumed: the training dataset" in table
    args = ["--config-file", config_file, "--device", "cuda", "--json", "--num-gpus", "2"]
    main(["estimate", *args, "DATASETS.TEST", "('nobody_has_it',)"])
    estimate = json.loads(capsys.readouterr().out)
    assert estimate["images_per_gpu"] == 2
    assert 0 < estimate["peak_allocated_gb"] <= estimate["peak_reserved_gb"]
    assert estimate["peak_reserved_gb"] < estimate["device_total_gb"]
    assert estimate["evaluation_gb"] > 0
    assert sum(estimate["breakdown"].values()) == pytest.approx(estimate["peak_allocated_gb"])
    assert {"context", "loaded kernels", "NCCL"} < set(estimate["outside"])
    of_training = estimate["peak_allocated_gb"] + sum(estimate["outside"].values())
    assert of_training == pytest.approx(estimate["device_total_gb"])


def test_a_plan_is_a_config_that_can_be_used_as_it_is(config_file, tmp_path, capsys):
    plan_file = tmp_path / "plan.yaml"
    common = ["--config-file", config_file, "--device", "cuda", "SOLVER.MAX_ITER", "7"]
    main(["plan", "--card", "6GB", "--output", str(plan_file), *common])
    assert " of 5.5 GB, without a change" in capsys.readouterr().out.splitlines()[0]
    planned = load_cfg(str(plan_file))
    assert planned.MEMFIT.BUDGET_GB == 5.5
    assert planned.MEMFIT.OOM.POLICY == "split"
    assert not planned.MEMFIT.PLAN.ENABLED
    expected = load_cfg(config_file, ["SOLVER.MAX_ITER", 7])
    expected.MEMFIT.BUDGET_GB, expected.MEMFIT.OOM.POLICY = 5.5, "split"
    expected.MEMFIT.PRESET = "6GB"
    plan_file.rename(tmp_path / "memfit_plan.yaml")
    allocated, reserved, outside = figures_of_plan(tmp_path)["predicted_gb"]
    assert 0 < allocated <= reserved
    assert outside == pytest.approx(600 / 1024, abs=1e-3)  # context and kernels
    assert planned == expected


@pytest.mark.parametrize(
    ("card", "expected"),
    [
        (
            "GTX 1650 4GB",
            (" of 3.5 GB, ", "float16 is known to fail on NVIDIA GeForce GTX 1650\n"),
        ),
        ("RTX 4090 24GB", (" of 23.4 GB, ", "SOLVER.AMP.ENABLED True")),
        ("6GB", (" of 5.5 GB, ", "SOLVER.AMP.ENABLED True")),
    ],
)
def test_a_plan_has_the_budget_and_the_guards_of_the_card(config_file, capsys, log, card, expected):
    plan = ["plan", "--config-file", config_file, "--card", card, "--details"]
    plan += ["--prefer", "speed"]
    main([*plan, *(["--device", "cuda"] if card == "6GB" else [])])
    printed = capsys.readouterr().out
    for text in expected:
        assert text in printed
    assert "sold as" not in log.text  # the budget of a card is one that it has


@pytest.mark.slow
def test_a_card_is_the_budget_of_an_estimate_too(config_file, capsys):
    estimate = ["estimate", "--config-file", config_file, "--instances", "3", "--details"]
    main([*estimate, "--card", "6GB", "--device", "cuda"])
    printed = capsys.readouterr().out
    assert re.search(r"expandable segments +\| True", printed)
    main([*estimate, "--card", "6 gb", "--device", "cuda"])
    of_card, next_step = capsys.readouterr().out.rsplit("\n\n", 1)
    assert of_card == printed.rsplit("\n\n", 1)[0]
    assert "--card '6 gb'" in next_step
    main([*estimate, "--card", "RTX 3060 Laptop 6GB"])
    assert "NVIDIA GeForce RTX 3060 Laptop GPU" in capsys.readouterr().out
    main([*estimate, "--card", "Jetson Orin Nano"])
    assert "NVIDIA Jetson Orin Nano, 8 GB shared with the CPU" in capsys.readouterr().out
    main([*estimate, "--device", "cuda"])
    printed = capsys.readouterr().out
    assert re.search(r"expandable segments +\| False", printed)
    assert "--card 6GB" in printed.rsplit("\n\n", 1)[1]
    main([*estimate, "--device", "rtx_3060"])
    assert "--card rtx_3060" in capsys.readouterr().out.rsplit("\n\n", 1)[1]


def test_the_data_say_classes_and_schedule(coins, tmp_path, capsys):
    plan_file = tmp_path / "plan.yaml"
    args = ["--config-file", "COCO-Detection/faster_rcnn_R_50_FPN_3x", "--device", "cuda"]
    for split in ("train", "val"):  # no image is looked at
        args += ["--coco", f"plan_{split}", str(coins / f"{split}.json"), "images"]
    opts = ["SOLVER.IMS_PER_BATCH", "1", "INPUT.MAX_SIZE_TRAIN", "96", "TEST.EVAL_PERIOD", "7"]
    opts += ["MODEL.RESNETS.DEPTH", "18", "MODEL.RESNETS.RES2_OUT_CHANNELS", "64"]
    opts += ["INPUT.MIN_SIZE_TEST", "64", "INPUT.MAX_SIZE_TEST", "96"]
    main(["plan", "--details", "--card", "6GB", "--output", str(plan_file), *args, *opts])
    printed = capsys.readouterr().out
    assert "From the data: MODEL.ROI_HEADS.NUM_CLASSES 1: the categories of plan_train" in printed
    assert "From the data: SOLVER.MAX_ITER 4160: a fine-tuning on 64 images, 1 in each" in printed
    planned = load_cfg(str(plan_file))
    assert planned.DATASETS.TRAIN == ("plan_train",)
    assert planned.DATASETS.TEST == ("plan_val",)
    assert planned.MODEL.ROI_HEADS.NUM_CLASSES == 1
    assert planned.SOLVER.MAX_ITER == 4160
    assert planned.TEST.EVAL_PERIOD == 7
    main(["estimate", "--json", *args, *opts])
    printed = capsys.readouterr()
    assert json.loads(printed.out)["num_instances"] < 30  # as in the annotations
    assert "From the data: " in printed.err


def test_what_a_file_says_of_other_data_does_not_hold_for_the_users(coins, tmp_path, capsys):
    """As a plan for a recipe of COCO does."""
    plan_file = tmp_path / "plan.yaml"
    plan_file.write_text(
        """
DATASETS:
  TRAIN: ("coco_2017_train",)
  TEST: ("coco_2017_val",)
MEMFIT: {MICRO_BATCH: 1}
MODEL: {ROI_HEADS: {NUM_CLASSES: 80}}
SOLVER:
  MAX_ITER: 270000
  STEPS: (210000, 250000)
  IMS_PER_BATCH: 2
INPUT:
  MIN_SIZE_TRAIN: (64,)
  MAX_SIZE_TRAIN: 96
"""
    )
    coco = ["--coco", "plan_train", str(coins / "train.json"), "images"]
    args = ["estimate", "--details", "--config-file", str(plan_file), *coco]
    main(args)
    printed = capsys.readouterr().out
    assert "MODEL.ROI_HEADS.NUM_CLASSES 1: " in printed
    assert "SOLVER.MAX_ITER 2080: a fine-tuning on 64 images, 2 in each" in printed
    with pytest.raises(SystemExit):
        main([*args, "MODEL.ROI_HEADS.NUM_CLASSES", "80"])
    assert "NUM_CLASSES 80" in capsys.readouterr().err


def test_what_a_users_own_file_says_without_datasets_holds(coins, tmp_path, capsys):
    own = tmp_path / "own.yaml"
    base = find_config_file("COCO-Detection/faster_rcnn_R_50_FPN_3x")
    own.write_text(f"_BASE_: {base}\nMODEL: {{ROI_HEADS: {{NUM_CLASSES: 5}}}}\n")
    args = ["estimate", "--details", "--config-file", str(own)]
    args += ["--coco", "plan_train", str(coins / "train.json"), "images"]
    with pytest.raises(SystemExit):
        main(args)
    assert "NUM_CLASSES 5" in capsys.readouterr().err
    own.write_text(f"_BASE_: {base}\nSOLVER: {{MAX_ITER: 200}}\nINPUT: {{MAX_SIZE_TRAIN: 96}}\n")
    main([*args, "SOLVER.IMS_PER_BATCH", "1"])
    printed = capsys.readouterr().out
    assert "SOLVER.MAX_ITER" not in printed
    assert "SOLVER.STEPS (150,): goes with MAX_ITER" in printed


@pytest.mark.parametrize(
    "command", [["--version"], pytest.param(["estimate"], marks=pytest.mark.slow)]
)
def test_no_warning_of_a_library_stands_before_the_answer(config_file, command):
    options = ["--config-file", config_file] if "estimate" in command else []
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONWARNINGS"}
    run = run_process(
        [sys.executable, "-m", "d2_memfit", *command, *options],
        env={**environment, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert run.returncode == 0
    assert run.stderr == ""
    assert run.stdout.startswith("Needs ") or run.stdout == f"d2_memfit {__version__}\n"


@pytest.mark.slow
def test_what_does_not_fit_ends_with_status_3_and_the_smallest_budget(
    config_file, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    args = ["plan", "--budget", "0.5", "--allow", "exact", "--device", "cuda"]
    with pytest.raises(SystemExit) as e:
        main([*args, "--config-file", config_file, "SOLVER.IMS_PER_BATCH", "1"])
    assert e.value.code == 3
    printed = capsys.readouterr().out
    assert printed.startswith(
        "Does not fit: with all that may change, the job needs a budget of 0."
    )
    assert "\n\nNext, plan, and write the plan to a file:\n  d2-memfit plan " in printed
    assert " --budget 0." in printed
    # The next command can be pasted, whatever has set the budget.
    command = ["plan", "--allow", "exact", "--device", "cpu", "--config-file", config_file]
    with pytest.raises(SystemExit):
        main([*command, "SOLVER.IMS_PER_BATCH", "1", "MEMFIT.BUDGET_GB", "0.1"])
    printed = capsys.readouterr().out
    assert "--card" not in printed.splitlines()[-1]
    assert "MEMFIT.BUDGET_GB" not in printed.splitlines()[-1]
    assert paste(printed, tmp_path).startswith("Fits: ")


def test_a_project_of_the_current_folder_adds_its_keys(config_file, tmp_path, monkeypatch, capsys):
    (tmp_path / "my_project.py").write_text("def add_keys(cfg):\n    cfg.MODEL.MINE = 1\n")
    monkeypatch.chdir(tmp_path)
    plan_file = tmp_path / "plan.yaml"
    project = ["--project", "my_project:add_keys"]
    args = ["--config-file", config_file, "--budget", "6", "--output", str(plan_file)]
    main(["plan", *project, *args, "--device", "cuda", "MODEL.MINE", "2"])
    assert "MINE: 2" in plan_file.read_text()
    before = sys.path[:], logging.raiseExceptions
    main(["estimate", "--details", *project, "--config-file", str(plan_file), "--device", "cuda"])
    assert "peak reserved" in capsys.readouterr().out
    assert (sys.path, logging.raiseExceptions) == before


@pytest.mark.parametrize(
    "args",
    [
        "plan --budget 0",
        "plan",
        "plan --card 6GB --budget 5",
        "plan --card 6GB --device cpu MEMFIT.BUDGET_GB 5",
        "plan --budget 6 --allow all",
        "estimate --device v10",
        "estimate --device cpu --probe",
        "estimate --num-gpus 0",
        "estimate MODEL.BACKBONE.NAME x",
        "estimate --project fractions:Fraction",
        "estimate --project no.such:add",
        "predict",
    ],
)
def test_bad_input_is_one_line(config_file, prose, capsys, args):
    command, *options = args.split(" ")
    with pytest.raises(SystemExit, match="2"):
        main([command, "--config-file", config_file, *options])
    (line,) = [x for x in capsys.readouterr().err.splitlines() if x.startswith("error: ")]
    prose(line)


def test_each_answer_ends_with_the_next_command(config_file, prose, tmp_path, capsys):
    """The commands of the answers, one after the other, as a user would paste them."""
    job = ["--config-file", config_file, "--num-gpus", "2", "--instances", "3"]
    main(["estimate", *job, "SOLVER.MAX_ITER", "7"])
    estimated = capsys.readouterr().out.splitlines()
    plan = shlex.split(estimated[-1])
    assert plan[:2] == ["d2-memfit", "plan"]
    assert plan[-2:] == ["SOLVER.MAX_ITER", "7"]
    file = str(tmp_path / "plan.yaml")
    main([file if word == "plan.yaml" else word for word in plan[1:]])
    planned = capsys.readouterr().out.splitlines()
    prose("\n".join((estimated[0], planned[0], *planned[-3:])))
    assert load_cfg(file).SOLVER.MAX_ITER == 7
    main(plan[1 : plan.index("--output")])
    again = shlex.split(capsys.readouterr().out.splitlines()[-1])
    assert sorted(again) == sorted(plan[: plan.index("--output") + 2])
