# Copyright (c) the d2_memfit developers.
"""One way to make a trainer: each check, hook and ending, in each way that a run is started."""

import contextlib
import io
import logging
import os
import re
import resource
import signal

import pytest
import torch
from detectron2.data import DatasetCatalog
from detectron2.utils import comm
from resumed import coins_cfg
from tiny import read_metrics

from d2_memfit import AccumulatingTrainer
from d2_memfit.cli import train as command
from d2_memfit.cli import train_lazy
from d2_memfit.common.files import FolderLock
from d2_memfit.config import load_cfg
from d2_memfit.data import register_coco
from d2_memfit.errors import MemfitError, one_line
from d2_memfit.memory import enforce_budget, process_memory
from d2_memfit.settings import lazy_name, overrides_of

pytestmark = pytest.mark.slow

NORMALIZERS = "off"  # testing the losses takes longer than all else

LAZY = """
import torch
from detectron2.config import LazyCall as L
from detectron2.data import (
    DatasetMapper,
    build_detection_test_loader,
    build_detection_train_loader,
    get_detection_dataset_dicts,
)
from detectron2.evaluation import COCOEvaluator
from detectron2.solver.build import get_default_optimizer_params
from fvcore.common.param_scheduler import CosineParamScheduler

from resumed import coins_cfg
from tiny import tiny_model

cfg = coins_cfg("FOLDER", "faster_rcnn")
cfg.MODEL.ROI_HEADS.SCORE_THRESH_TEST = 0.0


def build():
    return tiny_model(cfg)


def mapper(is_train):
    return DatasetMapper(cfg, is_train)


model = L(build)()
dataloader = dict(
    train=L(build_detection_train_loader)(
        dataset=L(get_detection_dataset_dicts)(names="coins_train"),
        mapper=L(mapper)(is_train=True),
        total_batch_size=2,
        num_workers=0,
    ),
    test=L(build_detection_test_loader)(
        dataset=L(get_detection_dataset_dicts)(names="coins_val", filter_empty=False),
        mapper=L(mapper)(is_train=False),
    ),
    evaluator=L(COCOEvaluator)(dataset_name="coins_val", output_dir="FOLDER/inference"),
)
optimizer = L(torch.optim.SGD)(params=L(get_default_optimizer_params)(base_lr=0.01), lr=0.01)
lr_multiplier = L(CosineParamScheduler)(start_value=1.0, end_value=0.1)
train = dict(
    output_dir="FOLDER", init_checkpoint="", max_iter=2, amp=dict(enabled=False), device="cpu",
    ddp=dict(broadcast_buffers=False), checkpointer=dict(period=100), eval_period=0, log_period=1,
)
"""


def cfg_of(folder, keys):
    cfg = coins_cfg(folder, "faster_rcnn", **{"SOLVER.MAX_ITER": 2, **keys})
    cfg.SOLVER.ACCUMULATION_STEPS = 2
    cfg.MEMFIT.NORMALIZERS.POLICY = NORMALIZERS
    cfg.DATASETS.TEST = ("coins_val",)
    cfg.MODEL.ROI_HEADS.SCORE_THRESH_TEST = 0.0  # so that there is an AP
    return cfg


def by_command(folder, keys, resume):
    file = folder / f"command_{comm.get_rank()}.yaml"
    file.write_text(cfg_of(folder, keys).dump())
    args = command.argument_parser().parse_args(["--config-file", str(file)])
    args.resume, args.notes = resume, []
    cfg = load_cfg(args.config_file)
    cfg.freeze()
    batch = cfg.SOLVER.IMS_PER_BATCH * cfg.SOLVER.ACCUMULATION_STEPS
    command.main(args, cfg, batch, command.Trainer)


def by_lazy_config(folder, keys, resume):
    file = folder / f"config_{comm.get_rank()}.py"
    file.write_text(LAZY.replace("FOLDER", str(folder)))
    args = command.argument_parser().parse_args(["--config-file", str(file)])
    places = {"train.accumulation_steps": 2}
    places |= overrides_of({"MEMFIT.NORMALIZERS.POLICY": NORMALIZERS})
    for key, value in keys.items():
        places |= (
            {"train.eval_period": value} if key.startswith("TEST") else overrides_of({key: value})
        )
    args.opts = [f"{place}={value!r}" for place, value in places.items()]
    args.resume = resume
    train_lazy.main(args)


WAYS = [by_command, by_lazy_config]  # a MemfitTrainer, and build_trainer


@pytest.fixture(params=WAYS, ids=lambda way: way.__name__)
def way(request):
    return request.param


def error_of(way, folder, keys, resume=False):
    """The line of the error that ends a run, with its class if the way raises it."""
    folder.mkdir(exist_ok=True)
    printed = io.StringIO()
    try:
        with contextlib.redirect_stderr(printed):
            way(folder, keys, resume)
    except SystemExit:
        # Libraries warn before it, in the first run of a process.
        return re.split("^error: ", printed.getvalue().strip(), flags=re.MULTILINE)[-1]
    except MemfitError as e:
        return one_line(e)
    return ""


REFUSED = {
    "a technique for no module": ({"MEMFIT.CHECKPOINT.MODULES": ["no_such"]}, "no module of the"),
    "a plan without a budget": (
        {"MEMFIT.PLAN.ENABLED": True},
        "MEMFIT.PLAN.ENABLED needs a MEMFIT.BUDGET_GB",
    ),
    "a budget that is too small": ({"MEMFIT.BUDGET_GB": 0.001}, "MEMFIT.BUDGET_GB 0.001"),
    "a step that cannot be cut": ({"MEMFIT.MICRO_BATCH": 0}, "must be a positive integer, got 0"),
}


@pytest.mark.parametrize("row", REFUSED)
def test_what_cannot_work_is_an_error(way, row, coins, tmp_path):
    keys, text = REFUSED[row]
    if way is by_lazy_config and "needs a" in text:
        text = re.sub(r"MEMFIT\.[A-Z_.]+", lambda key: lazy_name(key[0]), text)
    assert text in error_of(way, tmp_path, keys)
    assert not list(tmp_path.glob("*.pth"))


def budget_gb():
    return process_memory().data_bytes / 2**30 + 20


def train_with_all(rank, way, folder, coins):
    """What a run with a budget and a monitor leaves."""
    known(coins)
    budget = budget_gb()
    keys = {"MEMFIT.MONITOR.PERIOD": 1, "MEMFIT.BUDGET_GB": budget, "TEST.EVAL_PERIOD": 1}
    try:
        assert error_of(way, folder, keys) == ""
        return resource.getrlimit(resource.RLIMIT_DATA)[0] / 2**30 - budget
    finally:
        enforce_budget(None, "cpu")


def known(coins):
    for split in ("train", "val"):
        if f"coins_{split}" not in DatasetCatalog:
            register_coco(f"coins_{split}", str(coins / f"{split}.json"), str(coins / split))


def check_all(folder, log):
    assert any("memfit/allocated_gb" in line for line in read_metrics(folder))
    assert {m["effective_batch"] for m in read_metrics(folder) if "effective_batch" in m} == {4}
    state = torch.load(folder / "model_final.pth", weights_only=True)["trainer"]
    assert {"optimizer", "run"} <= set(state.get("_trainer", state))
    assert "Effective batch: SOLVER.IMS_PER_BATCH 2 x SOLVER.ACCUMULATION_STEPS 2" in log


def test_budget_and_monitor_work(way, coins, tmp_path, log):
    assert abs(train_with_all(0, way, tmp_path, coins)) < 1
    check_all(tmp_path, log.text)


def test_and_on_two_ranks(way, coins, tmp_path, two_ranks):
    for over in two_ranks.run(train_with_all, way, tmp_path, coins):
        assert abs(over) < 1
    saved = torch.load(tmp_path / "model_final.pth", weights_only=True)["trainer"]
    assert None not in saved.get("_trainer", saved)["run"]["ranks"]


@contextlib.contextmanager
def steps(act=lambda iteration: None):
    """While open, ``act`` is called before each step. Yields the iterations of the steps."""
    original, made = AccumulatingTrainer._step, []

    def step(self, *args):
        act(self.iter)
        original(self, *args)
        made.append(self.iter)

    AccumulatingTrainer._step = step
    try:
        yield made
    finally:
        AccumulatingTrainer._step = original


@contextlib.contextmanager
def lines():
    """The lines that d2_memfit logs, whatever the command does with its loggers."""
    found = []

    class Handler(logging.Handler):
        def emit(self, record):
            found.append(record.getMessage())

    handler, logger = Handler(), logging.getLogger("d2_memfit")
    logger.addHandler(handler)
    try:
        yield found
    finally:
        logger.removeHandler(handler)


def end_early(rank, way, folder, coins, kind):
    """The end of a run that an error, or a signal to its last rank, ends in iteration 1."""
    known(coins)

    def act(iteration):
        if iteration == 1 and kind == "error":
            raise RuntimeError("a bug")
        if iteration == 1 and rank == comm.get_world_size() - 1:
            os.kill(os.getpid(), signal.SIGTERM)

    with lines() as said, steps(act), pytest.raises((SystemExit, RuntimeError)) as e:
        way(folder, {"SOLVER.MAX_ITER": 4}, False)
    status = e.value.code if isinstance(e.value, SystemExit) else 1
    return status, [line.partition(f"{folder}")[0] for line in said if ENDED.match(line)]


ENDED = re.compile("RuntimeError ended|SIGTERM: ended")
ENDINGS = {
    "signal": (143, ["SIGTERM: ended the run in iteration 1. The last checkpoint is "]),
    "error": (1, ["RuntimeError ended the run in iteration 1. The last checkpoint is "]),
}


@pytest.mark.parametrize("kind", ENDINGS)
def test_endings_save_and_say_the_same_and_are_resumed(way, kind, coins, tmp_path):
    assert end_early(0, way, tmp_path, coins, kind) == ENDINGS[kind]
    last = 1 if kind == "signal" else 0
    assert (tmp_path / "last_checkpoint").read_text() == f"model_000000{last}.pth"
    with steps() as made:
        way(tmp_path, {"SOLVER.MAX_ITER": 4}, True)
    assert made == [*range(last + 1, 4)]


def test_a_signal_to_one_rank_ends_both(way, coins, tmp_path, two_ranks):
    ends = two_ranks.run(end_early, way, tmp_path, coins, "signal")
    assert [status for status, _ in ends] == [143] * 2
    assert (tmp_path / "last_checkpoint").read_text() == "model_0000002.pth"


def resume_in_two_folders(rank, way, folder, coins):
    known(coins)
    assert error_of(way, folder / "one", {}) == ""
    return error_of(way, folder / ("one" if rank == 0 else "other"), {"SOLVER.MAX_ITER": 4}, True)


def test_ranks_that_would_go_on_from_different_iterations_are_told(way, coins, tmp_path, two_ranks):
    for error in two_ranks.run(resume_in_two_folders, way, tmp_path, coins):
        assert error.startswith("the ranks would go on from different iterations, [2, 0]: OUTPUT")


def train_in_a_folder_in_use(rank, way, folder, coins):
    known(coins)
    lock = FolderLock(str(folder)) if rank == 1 else None  # the first rank is another process
    comm.synchronize()
    try:
        return error_of(way, folder, {})
    finally:
        if lock is not None:
            lock.release()


def test_a_rank_that_cannot_begin_ends_all(way, coins, tmp_path, two_ranks):
    one, other = two_ranks.run(train_in_a_folder_in_use, way, tmp_path, coins)
    assert one.startswith(f"OUTPUT_DIR {tmp_path} is in use by process")
    assert other == f"rank 0 cannot start the run: {one}"
