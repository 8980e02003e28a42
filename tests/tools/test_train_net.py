# Copyright (c) the d2_memfit developers.
"""tools/train_net.py as users run it: as a process where that matters, else as a call."""

import json
import logging
import sys
from argparse import Namespace
from pathlib import Path

import pytest
import torch
import train_net
from forks import FORKED_RANKS, run_forked
from tiny import ROOT, read_metrics, tiny_cfg

from d2_memfit.cli import options, train
from d2_memfit.config.load import get_cfg, load_cfg
from d2_memfit.data.hold_out import hold_out
from d2_memfit.memory import enforce_budget

TRAIN_NET = str(ROOT / "tools" / "train_net.py")


@pytest.fixture
def arguments(coins, tmp_path):
    """Arguments that train for two iterations, and an OUTPUT_DIR in which nothing is yet."""
    cfg = tiny_cfg("mask_rcnn", fpn=False)
    cfg.MODEL.DEVICE = "cuda"  # the default of Detectron2, though there may be none
    cfg.DATASETS.TRAIN, cfg.DATASETS.TEST = ("cli_train",), ("cli_val",)
    cfg.SOLVER.IMS_PER_BATCH = 2
    cfg.SOLVER.ACCUMULATION_STEPS = 2
    cfg.SOLVER.MAX_ITER = 2
    config_file = tmp_path / "tiny.yaml"
    config_file.write_text(cfg.dump())
    arguments = ["--config-file", config_file]
    for split in ("train", "val"):
        arguments += ["--coco", f"cli_{split}", coins / f"{split}.json", coins / split]
    return [str(a) for a in [*arguments, "OUTPUT_DIR", tmp_path / "output"]]


def call(capsys, *arguments):
    """Exit status and what was printed to standard error."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["train_net.py", *map(str, arguments)])
        try:
            train_net.run()
        except SystemExit as e:
            return e.code, capsys.readouterr().err
        finally:
            enforce_budget(None, "cpu")  # this process runs other tests
    return 0, capsys.readouterr().err


def outputs(folder):
    """Every file in the folder with its content."""
    return {f: f.read_bytes() for f in sorted(Path(folder).rglob("*")) if f.is_file()}


def test_training_evaluation_and_resuming(arguments, tmp_path, capsys):
    output_dir = tmp_path / "output"
    assert call(capsys, *arguments)[0] == 0
    assert (output_dir / "model_final.pth").exists()
    assert list(output_dir.glob("events.out.tfevents.*"))
    (last,) = [m for m in read_metrics(output_dir) if "effective_batch" in m]
    assert last["iteration"] == 1
    assert last["effective_batch"] == 4
    log = (output_dir / "log.txt").read_text()
    assert torch.cuda.is_available() or "No GPU is visible: running on the CPU" in log

    checkpoint = torch.load(output_dir / "model_final.pth", weights_only=True)
    assert checkpoint["trainer"]["_trainer"]["optimizer"]["state"]
    assert call(capsys, "--resume", *arguments, "SOLVER.MAX_ITER", 4)[0] == 0
    assert "Starting training from iteration 2" in (output_dir / "log.txt").read_text()

    results = output_dir / "inference" / "coco_instances_results.json"
    results.unlink()
    weights = output_dir / "model_final.pth"
    config = (output_dir / "config.yaml").read_text()
    options = ["MODEL.WEIGHTS", weights, "DATASETS.TEST", "('cli_train',)"]
    assert call(capsys, "--eval-only", *arguments, *options)[0] == 0
    assert results.exists()
    assert (output_dir / "config.yaml").read_text() == config
    other = ["MODEL.ROI_BOX_HEAD.FC_DIM", 48, "SOLVER.MAX_ITER", 6]
    assert "does not fit the config" in call(capsys, "--resume", *arguments, *other)[1]
    assert (output_dir / "config.yaml").read_text() == config


def test_fit_plans_for_what_is_free_here_and_trains(arguments, tmp_path):
    """In a process of its own, which gets a limit."""
    run = run_forked(TRAIN_NET, "--fit", *arguments, "TEST.AUG.ENABLED", "False")
    assert run.returncode == 0, run.stderr[-4000:]
    output_dir = tmp_path / "output"
    log = (output_dir / "log.txt").read_text()
    planned = load_cfg(str(output_dir / "memfit_plan.yaml"))
    assert planned.MEMFIT.OOM.POLICY == "split"
    assert isinstance(planned.MEMFIT.BUDGET_GB, float)
    assert "Plan for MEMFIT.BUDGET_GB" in log
    assert (output_dir / "model_final.pth").exists()
    kept = load_cfg(str(output_dir / "config.yaml")).MEMFIT  # for evaluations later
    assert (kept.OOM.POLICY, kept.BUDGET_GB, kept.PLAN.ENABLED) == ("split", "auto", False)


def test_fit_takes_the_card_that_is_named(arguments, coins):
    args = train.argument_parser().parse_args(["--fit", "--card", "6GB", *arguments])
    cfg = train.prepare(args)
    assert (cfg.MEMFIT.PRESET, cfg.MEMFIT.BUDGET_GB) == ("6GB", None)
    assert cfg.MEMFIT.PLAN.ENABLED


YAML = "MEMFIT.PLAN.ENABLED False MEMFIT.OOM.POLICY raise MEMFIT.BUDGET_GB None"
LAZY = "train.memfit.plan.enabled=False ++train.memfit.oom.policy=raise +train.memfit.budget_gb=6"


@pytest.mark.parametrize("opts", [YAML, LAZY])
def test_fit_leaves_the_keys_that_the_user_gives(opts):
    for eval_only in (False, True):
        args = Namespace(fit=True, eval_only=eval_only, opts=opts.split())
        assert options.settings_of_fit(get_cfg(), args) == {}
        args.opts = []
        key, value = ("OOM.POLICY", "split") if eval_only else ("PLAN.ENABLED", True)
        expected = {f"MEMFIT.{key}": value, "MEMFIT.BUDGET_GB": "auto"}
        assert options.settings_of_fit(get_cfg(), args) == expected


def test_with_training_only_nothing_is_evaluated(arguments):
    args = train.argument_parser().parse_args(["--training-only", *arguments])
    cfg = train.prepare(args)
    assert (cfg.DATASETS.TRAIN, cfg.DATASETS.TEST) == (("cli_train",), ())


@pytest.mark.skipif(torch.cuda.device_count() == 1, reason="two ranks cannot share one GPU")
def test_an_error_of_a_rank_is_one_line(arguments):
    """Of a file that no one looks into before training."""
    weights = Path(arguments[1]).with_name("weights.pkl")
    weights.write_text("not weights")
    arguments = [*arguments, "MODEL.WEIGHTS", weights]
    result = run_forked(*RANKS["num-gpus"], *arguments)
    assert result.returncode == 2
    errors = [x for x in result.stderr.splitlines() if x.startswith("error: ")]
    assert any(str(weights) in error for error in errors)
    assert "Traceback" not in result.stderr


def test_evaluation_needs_nothing_of_what_training_needs(arguments, tmp_path, capsys):
    """No batch that can be shared, no dataset to train on; no GPUs are asked for either."""
    options = ["--num-gpus", 0, "--eval-only", *arguments, "SOLVER.IMS_PER_BATCH", 7]
    assert call(capsys, *options, "DATASETS.TRAIN", "()")[0] == 0
    assert (tmp_path / "output" / "inference" / "coco_instances_results.json").exists()


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (["MODEL.WEIGHTS", "BROKEN.pth"], "cannot read the checkpoint"),
        (["--resume"], "cannot read the checkpoint"),
        (["--coco", "cli_val", "again.json", "."], "--coco: a name is given twice"),
        (["SEED", 1, "--fit"], "KEY VALUE pairs: options such as --fit come before all of them"),
    ],
    ids=lambda value: " ".join(map(str, value)) if isinstance(value, list) else "",
)
def test_bad_input_is_one_line_and_leaves_the_output_alone(
    arguments, tmp_path, capsys, monkeypatch, extra, message
):
    monkeypatch.setattr(logging, "raiseExceptions", False)  # the streams of earlier tests
    monkeypatch.chdir(tmp_path)
    (tmp_path / "BROKEN.pth").write_text("not weights")
    output_dir = tmp_path / "output"
    output_dir.mkdir()
    (output_dir / "config.yaml").write_text(tiny_cfg(fpn=False).dump())
    (output_dir / "model_0000001.pth").write_text("truncated")
    (output_dir / "last_checkpoint").write_text("model_0000001.pth")
    before = outputs(output_dir)
    extra = [*extra, *arguments] if extra[0].startswith("--") else [*arguments, *extra]
    status, printed = call(capsys, *extra)
    assert (status, printed.count("\n")) == (2, 1)
    assert printed.startswith("error: ")
    assert message in printed
    assert outputs(output_dir) == before


def held_out(arguments, coins):
    """Arguments that hold a quarter of the images out, instead of naming two datasets."""
    whole = ["--coco", "mine", coins / "val.json", coins / "val", "--hold-out", 0.25]
    return [*arguments[:2], *whole, *arguments[-2:]]


def parts_in(folder):
    return [(folder / name).read_bytes() for name in ("train.json", "val.json")]


def test_one_command_trains_on_one_part_and_evaluates_on_the_other(
    arguments, coins, tmp_path, capsys
):
    arguments, output = held_out(arguments, coins), tmp_path / "output"
    assert call(capsys, *arguments)[0] == 0
    cfg = load_cfg(str(output / "config.yaml"))
    assert (cfg.DATASETS.TRAIN, cfg.DATASETS.TEST) == (("mine_train",), ("mine_val",))
    parts = parts_in(output)
    train, held = ({i["id"] for i in json.loads(part)["images"]} for part in parts)
    assert (len(train), len(held), train & held) == (12, 4, set())
    results = json.loads((output / "inference" / "coco_instances_results.json").read_text())
    assert {result["image_id"] for result in results} <= held
    assert call(capsys, "--resume", *arguments, "SOLVER.MAX_ITER", 3)[0] == 0
    assert read_metrics(output)[-1]["iteration"] == 3  # that of the evaluation
    assert parts_in(output) == parts


def test_a_wrong_value_is_named_before_images_are_held_out(arguments, coins, tmp_path, capsys):
    wrong = ["SOLVER.MAX_ITER", 0, "MEMFIT.MICRO_BATCH", 0]
    status, printed = call(capsys, *held_out(arguments, coins), *wrong)
    assert status == 2
    assert all(f"error: {key} must be" in printed for key in wrong[::2])
    assert not (tmp_path / "output").exists()


RANKS = {
    "num-gpus": ["-c", FORKED_RANKS, TRAIN_NET, "--num-gpus", 2, "--dist-url", "auto"],
    "torchrun": ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2, TRAIN_NET],
}


@pytest.mark.skipif(torch.cuda.device_count() == 1, reason="two ranks cannot share one GPU")
@pytest.mark.parametrize("launcher", ["num-gpus", pytest.param("torchrun", marks=pytest.mark.slow)])
def test_two_ranks_train_together_and_hold_out_the_same_images(
    arguments, coins, tmp_path, launcher
):
    arguments, output = held_out(arguments, coins), tmp_path / "output"
    result = run_forked(*RANKS[launcher], *arguments)
    assert result.returncode == 0, result.stderr
    hold_out([arguments[3:6]], 0.25, str(tmp_path / "expected"), False)
    assert parts_in(output) == parts_in(tmp_path / "expected")
    effective = [m["effective_batch"] for m in read_metrics(output) if "effective_batch" in m]
    assert effective[0] == 4
    log_of_rank_1 = (output / "log.txt.rank1").read_text()
    assert "Rank of current process: 1. World size: 2" in log_of_rank_1


@pytest.mark.parametrize(
    ("opts", "advice"),
    [
        (["SOLVER.IMS_PER_BATCH", "4"], "SOLVER.BASE_LR 0.005"),
        (["SOLVER.IMS_PER_BATCH", "4", "SOLVER.ACCUMULATION_STEPS", "2"], "SOLVER.BASE_LR 0.01"),
        (["SOLVER.IMS_PER_BATCH", "4", "SOLVER.ACCUMULATION_STEPS", "4"], None),
        (["SOLVER.IMS_PER_BATCH", "4", "SOLVER.BASE_LR", "0.01"], None),
    ],
)
def test_another_batch_with_the_same_learning_rate_gets_a_warning(opts, advice):
    file = "COCO-InstanceSegmentation/mask_rcnn_R_50_FPN_3x"
    said = options._batch_notes(load_cfg(file).SOLVER, load_cfg(file, opts).SOLVER)
    assert len(said) == (advice is not None)
    assert all(f"(arXiv:1706.02677): {advice}." in line for line in said)


def test_a_training_gets_this_warning_among_its_notes(arguments):
    args = train.argument_parser().parse_args([*arguments, "SOLVER.IMS_PER_BATCH", "4"])
    train.prepare(args)
    assert sum("is 2 times the batch of the config file" in note for note in args.notes) == 1
