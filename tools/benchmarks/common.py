# Copyright (c) the d2_memfit developers.
"""Shared parts of the benchmarks: real images, sides in turn, and tables with their sources."""

import csv
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

from d2_memfit.memory import process_memory

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


def write_csv(file: Path, header: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    with open(file, "w", newline="") as f:
        csv.writer(f, lineterminator="\n").writerows([header, *rows])
