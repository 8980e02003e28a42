# Copyright (c) the d2_memfit developers.
"""One way to make a trainer: its checks, hooks and endings, in a run of the command."""

import contextlib
import io
import resource

import torch
from detectron2.utils import comm
from resumed import coins_cfg, register_coins
from tiny import read_metrics

from d2_memfit.cli import train as command
from d2_memfit.common.files import lock_folder
from d2_memfit.config.load import load_cfg
from d2_memfit.memory import enforce_budget, process_memory


def cfg_of(folder, keys):
    cfg = coins_cfg(folder, "faster_rcnn", **{"SOLVER.MAX_ITER": 2, **keys})
    cfg.SOLVER.ACCUMULATION_STEPS = 2
    cfg.DATASETS.TEST = ("coins_val",)
    cfg.MODEL.ROI_HEADS.SCORE_THRESH_TEST = 0.0  # so that there is an AP
    return cfg


def run(folder, keys, resume):
    file = folder / f"command_{comm.get_rank()}.yaml"
    file.write_text(cfg_of(folder, keys).dump())
    args = command.argument_parser().parse_args(["--config-file", str(file)])
    args.resume = resume
    cfg = load_cfg(args.config_file)
    cfg.freeze()
    command.main(args, cfg, command.Trainer)


def error_of(folder, keys, resume=False):
    """The line of the error that ends a run."""
    folder.mkdir(exist_ok=True)
    printed = io.StringIO()
    try:
        with contextlib.redirect_stderr(printed):
            run(folder, keys, resume)
    except SystemExit:
        return printed.getvalue().strip().rpartition("error: ")[2]
    return ""


def train_with_all(rank, folder, coins):
    """What a run with a budget and a monitor leaves."""
    register_coins(coins)
    budget = process_memory().data_bytes / 2**30 + 20
    keys = {"MEMFIT.MONITOR.PERIOD": 1, "MEMFIT.BUDGET_GB": budget, "TEST.EVAL_PERIOD": 1}
    try:
        assert error_of(folder, keys) == ""
        return resource.getrlimit(resource.RLIMIT_DATA)[0] / 2**30 - budget
    finally:
        enforce_budget(None, "cpu")


def test_budget_and_monitor_work_on_two_ranks(coins, tmp_path, two_ranks):
    for over in two_ranks.run(train_with_all, tmp_path, coins):
        assert abs(over) < 1
    assert any("memfit/allocated_gb" in line for line in read_metrics(tmp_path))
    assert {m["effective_batch"] for m in read_metrics(tmp_path) if "effective_batch" in m} == {4}
    state = torch.load(tmp_path / "model_final.pth", weights_only=True)["trainer"]
    state = state.get("_trainer", state)
    assert "optimizer" in state
    assert None not in state["run_state"]["ranks"]


def resume_in_two_folders(rank, folder, coins):
    register_coins(coins)
    assert error_of(folder / "one", {}) == ""
    return error_of(folder / ("one" if rank == 0 else "other"), {"SOLVER.MAX_ITER": 4}, True)


def test_ranks_that_would_go_on_from_different_iterations_are_told(coins, tmp_path, two_ranks):
    for error in two_ranks.run(resume_in_two_folders, tmp_path, coins):
        assert error.startswith("the ranks would go on from different iterations, [2, 0]: OUTPUT")


def train_in_a_folder_in_use(rank, folder, coins):
    register_coins(coins)
    lock = lock_folder(str(folder)) if rank == 1 else None  # the first rank is another process
    comm.synchronize()
    try:
        return error_of(folder, {})
    finally:
        if lock is not None:
            lock.close()


def test_a_rank_that_cannot_begin_ends_all(coins, tmp_path, two_ranks):
    one, other = two_ranks.run(train_in_a_folder_in_use, tmp_path, coins)
    assert one.startswith(f"OUTPUT_DIR {tmp_path} is in use by process")
    assert other == f"rank 0 cannot start the run: {one}"
