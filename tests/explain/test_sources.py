# Copyright (c) the d2_memfit developers.
import io
import itertools
import os
import re
import sys
import time
from contextlib import suppress

import pytest
import torch
from made_up_logs import CONFIG, OOM, TRACEBACK, headed, log, notebook, progress
from tiny import run_process

from d2_memfit.common.errors import DataError, one_line
from d2_memfit.explain.sources import read_runs

SECONDS = 10  # for any input
TRAINED = headed(["Model:\nRCNN()", "Starting training from iteration 0", progress(19)], "console")


def write(folder, text, name="log.txt"):
    path = folder / name
    path.write_text(text) if isinstance(text, str) else path.write_bytes(text)
    return path


def refused(path, match):
    with pytest.raises(DataError, match=match) as e:
        read_runs(path)
    assert one_line(e.value).isprintable()


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16"])  # utf-16: PowerShell's >
def test_a_file(tmp_path, encoding):
    bars = "".join(f"{i}%|###  |\r" for i in range(100))  # end lines with carriage returns
    (run,) = read_runs(write(tmp_path, (bars + headed(log()) + bars).encode(encoding)))
    assert (run.peak_mib, run.ranks) == (3000, 2)


def test_a_folder(tmp_path):
    write(tmp_path, headed([m for m in log() if "full config" not in m]))
    write(tmp_path, CONFIG.partition("\n")[2], "config.yaml")
    write(tmp_path, headed(log(TRACEBACK + "KeyError: 1")), "log.txt.rank1")
    write(tmp_path, headed(log(TRACEBACK + OOM)), "log.txt.rank2")
    (run,) = read_runs(tmp_path)
    assert "MAX_ITER: 100" in run.config_text
    assert (run.ended, run.error) == ("error", "KeyError: 1")
    (tmp_path / "log.txt.rank1").unlink()
    assert read_runs(tmp_path)[0].oom.total_mib == 10240
    write(tmp_path, headed(log(TRACEBACK + "KeyError: 2")))
    assert read_runs(tmp_path)[0].error == "KeyError: 2"  # of the main rank


TRAINING = """
import sys
from argparse import Namespace

import torch
from detectron2.engine import default_setup, hooks
from detectron2.utils.events import CommonMetricPrinter
from injection import FailingTrainer
from tiny import images, tiny_cfg, tiny_model

from d2_memfit.common.errors import start_logging
from d2_memfit.config.settings import RecoveryOptions

cfg = tiny_cfg("proposal_network", fpn=False)
cfg.OUTPUT_DIR, most = sys.argv[1], int(sys.argv[2])
default_setup(cfg, Namespace(config_file="", eval_only=False))
start_logging(cfg.OUTPUT_DIR)
model = tiny_model(cfg)
optimizer = torch.optim.SGD(model.parameters(), 0.01)
recovery = RecoveryOptions(output_dir=cfg.OUTPUT_DIR)
trainer = FailingTrainer(
    model, [images(2)] * 6, optimizer, recovery=recovery, fails=lambda ids: len(ids) > most
)
trainer.register_hooks([hooks.IterationTimer(), hooks.PeriodicWriter([CommonMetricPrinter(6)], 2)])
trainer.train(0, 6)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("most", "ended"), [(1, "running"), (0, "out of memory")])
def test_the_output_of_a_training_here(tmp_path, most, ended):
    """It is "running", because its config has 40,000 iterations."""
    process = run_process([sys.executable, "-c", TRAINING, tmp_path, most])
    (run,) = read_runs(tmp_path)
    assert (run.ended, run.start_iter, run.ranks) == (ended, 0, 1), process.stderr
    assert run.torch == torch.__version__
    assert "META_ARCHITECTURE: ProposalNetwork" in run.config_text
    if most:
        assert run.iteration == 5
    else:
        assert (run.oom.case, run.oom.iteration) == ("at once", 0)


CODE = """%matplotlib inline
import torch
!pip install made-up
base = "COCO-InstanceSegmentation/mask_rcnn_R_50_FPN_3x.yaml"
batch_size = 2
cfg = get_cfg()
cfg.merge_from_file(model_zoo.get_config_file(base))
cfg.MODEL.WEIGHTS = model_zoo.get_checkpoint_url(base)
cfg.DATASETS.TEST = ()
cfg.SOLVER.IMS_PER_BATCH = batch_size
cfg.SOLVER.STEPS = []
cfg.SOLVER.MAX_ITER = 300
cfg.SOLVER.WARMUP_ITERS = int(0.1 * cfg.SOLVER.MAX_ITER)
cfg.MODEL.ROI_HEADS.NUM_CLASSES = len(names)
cfg.MODEL.MASK_ON = False
"""


def test_a_notebook(tmp_path):
    text = notebook(
        ("!nvidia-smi -L", "GPU 0: Tesla T4 (UUID: GPU-1)\n"),
        (CODE, ""),
        ("trainer.train()", TRAINED),
        ("cfg.MODEL.ROI_HEADS.NUM_CLASSES = 3\ncfg.SOLVER.MAX_ITER = 40", ""),
        ("trainer = DefaultTrainer(cfg)\ntrainer.train()", TRAINED),
        ("trainer.train()", TRAINED.replace("3000M", "9000M")),
        ("predictor(image)", ["\x1b[0;31mOutOfMemoryError\x1b[0m Traceback (most recent call last)",
                              "in __call__\n    predictions = self.model([inputs])[0]", OOM]),
    )  # fmt: skip
    one, two, three = read_runs(write(tmp_path, text, "a.ipynb"))
    assert one.zoo_config == "COCO-InstanceSegmentation/mask_rcnn_R_50_FPN_3x.yaml"
    assert one.overrides == {
        "DATASETS.TEST": (),
        "SOLVER.IMS_PER_BATCH": 2,
        "SOLVER.STEPS": [],
        "SOLVER.MAX_ITER": 300,
        "MODEL.MASK_ON": False,
    }
    assert [note.partition(" is")[0] for note in one.notes] == [
        "SOLVER.WARMUP_ITERS", "MODEL.ROI_HEADS.NUM_CLASSES",
    ]  # fmt: skip
    assert (one.gpus, one.max_iter, one.peak_mib, one.ended) == (["Tesla T4"], 300, 3000, "running")
    assert two.overrides["MODEL.ROI_HEADS.NUM_CLASSES"] == 3
    assert (two.gpus, two.max_iter) == (["Tesla T4"], 40)
    assert (three.peak_mib, three.ended, three.oom.case) == (9000, "out of memory", "evaluation")


@pytest.mark.parametrize(
    "code",
    [
        "cfg.A.B = " + "(" * 900,
        "a = [0]\n" + "a = [a, a]\n" * 5_000,
        "raise SystemExit",
        "cfg.A.B = '\\x1b[2J'",
    ],
)
def test_code_is_never_run_nor_deep(tmp_path, code):
    start = time.process_time()
    (run,) = read_runs(write(tmp_path, notebook((code, ""), ("", TRAINED)), "a.ipynb"))
    assert run.overrides == {}
    assert time.process_time() - start < SECONDS


@pytest.mark.parametrize(
    ("content", "match"),
    [
        pytest.param(bytes(range(256)) * 400, "binary", id="bytes"),
        ("a poem\nof two lines", "no line about"),
        ('{"cells": [', "not valid JSON"),
        ('{"cells": [{"cell_type": "code", "outputs": [3]}]}', "not a notebook"),
    ],
)
def test_what_is_no_log(tmp_path, content, match):
    name = "a.ipynb" if "cells" in str(content) else "log.txt"
    refused(write(tmp_path, content, name), match)


def test_what_cannot_be_read(tmp_path):
    refused(tmp_path / "missing", "No such file")
    refused(tmp_path, "log.txt cannot be read")
    os.mkfifo(tmp_path / "log.txt")
    refused(tmp_path / "log.txt", "not a file")
    refused(tmp_path, "not a file")


def test_standard_input(monkeypatch):
    text = headed(log()).encode()
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BufferedReader(io.BytesIO(text))))
    assert read_runs("-")[0].peak_mib == 3000


def test_a_cut_log_with_nul_bytes_is_read(tmp_path):
    text = headed(log()).encode()
    (run,) = read_runs(write(tmp_path, text[:-30] + bytes(500)))
    assert (run.iteration, run.ended) == (19, "running")


@pytest.mark.parametrize(
    "line",
    [
        progress(19) + "\n",
        "(" * 20 + "\n",
        "[01/02 03:04:05] \n",
        "iter: 1 lr: " * 50 + "\n",
        "|   0  Tesla" + " " * 300 + "\n",
        "\x1b[" + "1;" * 100,
        "Command line arguments: config_file='\n",
        "GPU 0   x (arch=" * 20 + "\n",
    ],
)
def test_hostile_text_takes_no_time(tmp_path, line):
    """No more than a few plain searches in each line of it and of an ordinary log of its size."""
    size = 2**20
    path = write(tmp_path, line * (size // len(line.encode())))
    ordinary = write(tmp_path, (progress(19) + "\n") * (size // len(progress(19))), "ordinary.txt")
    assert cpu_seconds(read_runs, path) < 4 * sum(cpu_seconds(search, p) for p in (path, ordinary))


def search(path):
    with open(path, errors="replace") as f:
        for line in itertools.islice(f, 2_000_000):  # as many are read of a log
            for word in ("iter", "eta", "max_mem", "Model", "Error", "GPU", "Rank", "memory"):
                re.search(word + r"\s*(\d+)", line)


def cpu_seconds(function, path):
    start = time.process_time()
    with suppress(DataError):
        function(path)
    return time.process_time() - start
