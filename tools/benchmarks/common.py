# Copyright (c) the d2_memfit developers.
"""Shared parts of the benchmarks: real images, sides in turn, and tables with their sources."""

import multiprocessing
import platform
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from detectron2.data import DatasetMapper
from detectron2.data import transforms as T
from detectron2.data.datasets import load_coco_json
from detectron2.modeling import build_model
from detectron2.utils.events import EventStorage

from d2_memfit.config.load import load_cfg
from d2_memfit.memory import process_memory
from d2_memfit.techniques.registry import apply_techniques

SAMPLE_S = 0.002

CONFIG = "COCO-InstanceSegmentation/mask_rcnn_R_50_FPN_3x.yaml"

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "projects" / "Coins"))


@contextmanager
def coins(height: int, width: int) -> Iterator[tuple[list[dict[str, Any]], DatasetMapper]]:
    """Photographs of coins with boxes and masks, all of one size in pixels.

    Yields:
        (dicts, mapper): Detectron2's dataset dicts, and the mapper that makes a model's input from
        one.
    """
    from make_dataset import make_dataset

    mapper = DatasetMapper(
        is_train=True,
        augmentations=[T.Resize((height, width))],
        image_format="BGR",
        use_instance_mask=True,
        instance_mask_format="bitmask",
    )
    with tempfile.TemporaryDirectory() as folder:
        make_dataset(Path(folder))
        # With a dataset name, categories are numbered from 0.
        yield load_coco_json(f"{folder}/train.json", f"{folder}/train", "benchmark_coins"), mapper


@contextmanager
def sampled_data_bytes() -> Iterator[list[tuple[float, int]]]:
    """While open, the yielded list gets the process's private memory every 2 ms.

    Yields:
        pairs of a time, as of ``time.perf_counter``, and bytes.
    """
    samples: list[tuple[float, int]] = []
    is_done = threading.Event()

    def sample() -> None:
        while not is_done.wait(SAMPLE_S):
            samples.append((time.perf_counter(), process_memory().data_bytes))

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield samples
    finally:
        is_done.set()
        thread.join()


class Side:
    """One side of a comparison: a trainer of a Mask R-CNN R50-FPN with random weights.

    Args:
        create_trainer: called with a model, ``loader`` and an optimizer.
        iterations_per_round: iterations of one measurement.
        opts: alternating keys and values for the config, which turn techniques on.

    Attributes:
        seconds: duration of each round on a GPU; on a CPU, the time that this process computed, so
            that other load does not count.
    """

    def __init__(
        self,
        create_trainer: Callable[..., Any],
        loader: Iterable[Any],
        iterations_per_round: int = 1,
        opts: Sequence[Any] = (),
    ) -> None:
        torch.manual_seed(0)
        cfg = load_cfg(CONFIG, opts)
        cfg.MODEL.DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
        model = apply_techniques("model", build_model(cfg), cfg)
        # A rate of 0: all rounds compute the same.
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9)
        optimizer = apply_techniques("optimizer", optimizer, cfg)
        self.trainer = create_trainer(model, loader, optimizer)
        self.iterations_per_round = iterations_per_round
        self.seconds: list[float] = []

    def round(self) -> None:
        torch.manual_seed(0)
        with EventStorage():
            clock = time.perf_counter if torch.cuda.is_available() else time.process_time
            _synchronize()
            start = clock()
            for _ in range(self.iterations_per_round):
                self.trainer.run_step()
            _synchronize()
            self.seconds.append(clock() - start)


def take_turns(sides: Iterable[Any], rounds: int) -> None:
    """Measure all sides in turn, so that other load on the machine affects them equally."""
    sides = list(sides)
    for side in sides:
        side.round()  # to warm up
        side.seconds.clear()
    for _ in range(rounds):
        for side in sides:
            side.round()


def in_own_processes(function: Callable[[Any], Any], items: Iterable[Any]) -> Iterator[Any]:
    """Results of a function of each item, in order.

    Each has its own process, because modules of projects have the same names.
    """
    with multiprocessing.get_context("spawn").Pool(2, maxtasksperchild=1) as pool:
        yield from pool.imap(function, items)


def machine() -> str:
    """One line about the machine and versions."""
    device = f"CPU, {torch.get_num_threads()} threads"
    if torch.cuda.is_available():
        device = torch.cuda.get_device_name()
    return f"{device}, PyTorch {torch.__version__}, Python {platform.python_version()}"


def markdown_table(header: list[str], rows: Iterable[Sequence[Any]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
