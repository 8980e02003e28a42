# Copyright (c) the d2_memfit developers.
"""Measurements that measure-gpu leaves out. Each runs in a process of its own."""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from pathlib import Path
from typing import Any, Optional

import torch
import torch.distributed as dist
from detectron2.engine import SimpleTrainer
from torch.nn.functional import conv2d

from d2_memfit import estimate_memory
from d2_memfit.common.units import GB, MB
from d2_memfit.compat.pytorch import dump_memory_snapshot, record_memory_history
from d2_memfit.engine import AccumulatingTrainer
from d2_memfit.job import WorstCase
from d2_memfit.measure.items import Record
from d2_memfit.measure.jobs import error_record
from d2_memfit.measure.peaks import limited, median_seconds, peaks_of
from d2_memfit.measure.steps import Steps, with_random_pixels
from d2_memfit.memory import (
    enforce_budget,
    is_out_of_memory,
    release_memory,
    segments_expand,
    use_expandable_segments,
)
from d2_memfit.settings import RecoveryOptions

from . import full_card
from .card import CARD, PREPARED, REHEARSE, full_size, job_of, measured, outside

EXPANDS, ORDINARY = "expandable_segments:True", "expandable_segments:False"


def defaults() -> Iterator[Record]:
    """Defaults of PyTorch, and whether segments grow, as they should after the first line."""
    use_expandable_segments()
    x = torch.zeros(32 * MB, dtype=torch.uint8, device=CARD)
    segments = [] if REHEARSE else torch.cuda.memory_snapshot()
    yield {
        "card": torch.cuda.get_device_name(CARD),
        "pytorch": torch.__version__,
        "tf32_of_convolutions": torch.backends.cudnn.allow_tf32,
        "tf32_of_products": torch.backends.cuda.matmul.allow_tf32,
        "cudnn": torch.backends.cudnn.version(),
        "benchmark": torch.backends.cudnn.benchmark,
        "segments_expand": segments_expand(),
        "is_expandable": [s["is_expandable"] for s in segments],
        "bytes": x.nbytes,
        **outside(),
    }


SMALL_TRAINING = [
    *("MODEL.DEVICE", "cpu", "MODEL.RESNETS.DEPTH", "50", "MODEL.FPN.OUT_CHANNELS", "16"),
    *("INPUT.MIN_SIZE_TRAIN", "(96,)", "INPUT.MIN_SIZE_TEST", "96", "SOLVER.IMS_PER_BATCH", "2"),
    *("MEMFIT.BUDGET_GB", "3.0", "MEMFIT.PRESET", ""),
]


def train() -> Iterator[Record]:
    """`d2-memfit train` with a plan for 6 GB, on data with crowded images that it does not know."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "d2_memfit", "train"]
        command += ["--config-file", str(PREPARED / "plan.yaml")]
        for part in ("train", "val"):
            files = (PREPARED / f"{part}.json", PREPARED / "images")
            command += ["--coco", f"my_{part}", *map(str, files)]
        command += ["OUTPUT_DIR", folder, "SOLVER.MAX_ITER", full_size("30", "2")]
        command += ["MODEL.WEIGHTS", "", "MODEL.PIXEL_STD", "[300.,300.,300.]"]
        command += ["SOLVER.BASE_LR", "1e-5", "DATALOADER.NUM_WORKERS", full_size("4", "0")]
        command += ["MEMFIT.MONITOR.PERIOD", "5", *full_size([], SMALL_TRAINING)]
        start = time.monotonic()
        done = subprocess.run(
            command, check=False, stdin=subprocess.DEVNULL, capture_output=True, text=True
        )
        yield {
            "status": done.returncode,
            "seconds": time.monotonic() - start,
            "end": (done.stdout + done.stderr)[-1500:],
        }
        for name in ("metrics.json", "memfit_oom.jsonl"):
            file = Path(folder, name)
            for line in file.read_text().splitlines()[-8:] if file.exists() else []:
                values = json.loads(line)
                values.pop("images", None)
                yield {"file": name, "values": values}


def crowded() -> Iterator[Record]:
    """Iterations under a limit that two crowded batches exceed: Detectron2's trainer, and ours."""
    job = job_of(2)
    sizes = full_size(((800, 1088), (800, 1344)), ((64, 96), (128, 160)))
    ordinary, crowd = (
        with_random_pixels(job.with_batch(WorstCase(size, objects)).training_batch(2))
        for size, objects in zip(sizes, (10, 200))
    )
    mixed = [crowd[0], ordinary[0]]
    peaks = {}
    for name, batch in (("ordinary", ordinary), ("alone", crowd[:1]), ("both", mixed)):
        with peaks_of(CARD) as peak:
            steps = Steps(job, CARD, windows=repeat(batch))
            for _ in range(2):
                peak.take()
                steps.step()
            peaks[name] = peak.take()["reserved_gb"]
        del steps
        release_memory(CARD)
    limit_gb = (max(peaks["ordinary"], peaks["alone"]) + peaks["both"]) / 2
    yield {"peaks": peaks, "limit_gb": limit_gb}
    number, at = full_size((30, (12, 20)), (4, (2,)))
    ours = partial(AccumulatingTrainer, recovery=RecoveryOptions())
    for side, make in (("Detectron2", SimpleTrainer), ("d2_memfit", ours)):
        windows = (mixed if i in at else ordinary for i in range(number))
        row: Record = {"side": side, "iterations": 0}
        with limited(CARD, int(limit_gb * GB)), peaks_of(CARD) as peak:
            training = Steps(job, CARD, make, windows)
            try:
                for _ in range(number):
                    training.step()
                    row["iterations"] += 1
            except RuntimeError as e:
                row.update(error_record(e), recognised=is_out_of_memory(e))
            row.update(peak.take())
        recovery = getattr(training.trainer, "recovery", None)
        yield {**row, "oom_events": getattr(recovery, "oom_events", None)}
        del training, recovery
        release_memory(CARD)


def fraction() -> Iterator[Record]:
    """How far PyTorch's share of the card, and a budget of the process, can be used."""
    torch.zeros(1, device=CARD)
    total = torch.cuda.get_device_properties(CARD).total_memory
    for kind, gb in (("share", 2.0), ("share", 6.0), ("budget", 3.0), ("budget", 6.0)):
        if kind == "share":
            torch.cuda.set_per_process_memory_fraction(gb * GB / total, CARD)
        else:
            enforce_budget(gb, str(CARD))
        for block_mb in (1, 64, 700):
            row: Record = {"kind": kind, "gb": gb, "block_mb": block_mb}
            blocks = []
            try:
                while True:
                    blocks.append(torch.empty(block_mb * MB, dtype=torch.uint8, device=CARD))
            except RuntimeError as e:
                row.update(error=str(e)[:300], recognised=is_out_of_memory(e))
            yield {**row, "reserved_gb": torch.cuda.memory_reserved(CARD) / GB, **outside()}
            blocks.clear()
            torch.cuda.empty_cache()
        enforce_budget(None, str(CARD))
        torch.cuda.set_per_process_memory_fraction(1.0, CARD)


# Images, channels, channels of the result, height, width, filter, stride and groups of convolutions
# of R50-FPN and X101-FPN at 800 x 1344 pixels.
CONVOLUTIONS = [
    *((2, 3, 64, 800, 1344, 7, 2, 1), (2, 64, 64, 200, 336, 1, 1, 1)),
    *((2, 64, 64, 200, 336, 3, 1, 1), (2, 64, 256, 200, 336, 1, 1, 1)),
    *((2, 256, 128, 200, 336, 1, 2, 1), (2, 128, 128, 100, 168, 3, 1, 1)),
    *((2, 256, 256, 50, 84, 3, 1, 1), (2, 512, 512, 25, 42, 3, 1, 1)),
    *((2, 2048, 256, 25, 42, 1, 1, 1), (2, 256, 256, 200, 336, 3, 1, 1)),
    *((2, 256, 256, 100, 168, 3, 1, 1), (2, 256, 3, 200, 336, 1, 1, 1)),
    *((2, 256, 256, 200, 336, 3, 1, 32), (128, 256, 256, 14, 14, 3, 1, 1)),
    *((128, 256, 80, 28, 28, 1, 1, 1), (2, 1024, 2048, 50, 84, 1, 2, 1)),
    *((8, 64, 64, 200, 336, 3, 1, 1), (8, 256, 256, 200, 336, 3, 1, 1)),
    (8, 512, 512, 25, 42, 3, 1, 1),
]


def convolutions() -> Iterator[Record]:
    """Workspace of each convolution, and the bytes that the planner's model "layout" predicts."""
    runs = [(c, kind, False) for c in CONVOLUTIONS for kind in ("float32", "tf32", "float16")]
    runs += [(CONVOLUTIONS[i], kind, True) for i in (2, 9) for kind in ("tf32", "float16")]
    for shape, kind, benchmark in full_size(runs, runs[:2]):
        row: Record = {"convolution": shape, "kind": kind, "benchmark": benchmark}
        options = {"enabled": True, "benchmark": benchmark, "allow_tf32": kind == "tf32"}
        try:
            with torch.backends.cudnn.flags(**options):
                row.update(workspaces(shape, torch.float16 if kind == "float16" else torch.float32))
        except RuntimeError as e:
            row.update(error_record(e))
        yield row
        torch.cuda.empty_cache()


def workspaces(shape: tuple[int, ...], dtype: torch.dtype) -> Record:
    """MB that a convolution takes in addition to its result: forward, and both backwards."""
    number, channels, channels_out, height, width, kernel, stride, groups = shape
    height, width = full_size((height, width), (height // 8, width // 8))
    x = torch.randn(number, channels, height, width, device=CARD, dtype=dtype)
    weight = torch.randn(channels_out, channels // groups, kernel, kernel, device=CARD, dtype=dtype)
    padding = kernel // 2
    gradient = torch.randn_like(conv2d(x, weight, None, stride, padding, 1, groups))
    sizes: Any = (None, [stride] * 2, [padding] * 2, [1, 1], False, [0, 0], groups)
    backward = partial(torch.ops.aten.convolution_backward, gradient, x, weight, *sizes)
    calls: dict[str, Callable[[], Any]] = {
        "forward": partial(conv2d, x, weight, None, stride, padding, 1, groups),
        "data": partial(backward, [True, False, False]),
        "filter": partial(backward, [False, True, False]),
    }
    row: Record = {"layout_mb": (x.nbytes + weight.nbytes + gradient.nbytes) / MB}
    for name, call in calls.items():
        call()  # the first time loads kernels and chooses
        torch.cuda.synchronize(CARD)
        torch.cuda.reset_peak_memory_stats(CARD)
        before = torch.cuda.memory_allocated(CARD)
        made = call()
        torch.cuda.synchronize(CARD)
        results = made if isinstance(made, (tuple, list)) else [made]
        taken = torch.cuda.max_memory_allocated(CARD) - before
        row[f"{name}_mb"] = (taken - sum(r.nbytes for r in results if r is not None)) / MB
        del made, results
    return row


def offload() -> Iterator[Record]:
    """Seconds of a step with activations on the host, and of their copies alone."""
    kinds: dict[str, dict[str, Any]] = {
        "none": {},
        "offload res2": {"MEMFIT.OFFLOAD.MODULES": ["backbone.bottom_up.res2"]},
        "offload backbone": {"MEMFIT.OFFLOAD.MODULES": ["backbone"]},
        "offload all": {"MEMFIT.OFFLOAD.MODULES": ["*"]},
        "checkpoint all": {"MEMFIT.CHECKPOINT.MODULES": ["all"]},
    }
    on_device: dict[bool, float] = {}
    for amp in full_size((False, True), (False,)):
        for kind, settings in kinds.items():
            job = job_of(full_size(8, 2), **settings, **{"SOLVER.AMP.ENABLED": amp})
            with peaks_of(CARD) as peak:
                steps = Steps(job, CARD)
                steps.step()
                peak.take()
                seconds = median_seconds(steps.step, CARD, 2.0, 1, full_size(3, 1))
                row = {"kind": kind, "amp": amp, "seconds": seconds, **peak.take()}
            saved_gb = on_device.setdefault(amp, row["allocated_gb"]) - row["allocated_gb"]
            yield {**row, "saved_gb": saved_gb}
            del steps
            release_memory(CARD)
    block = torch.empty(full_size(256, 1) * MB, dtype=torch.uint8, device=CARD)
    host = torch.empty(block.nbytes, dtype=torch.uint8, pin_memory=True)
    for way, target, source in (("to the host", host, block), ("to the card", block, host)):
        copy = partial(target.copy_, source, non_blocking=True)
        copy()
        yield {"copy": way, "gb_per_s": block.nbytes / GB / median_seconds(copy, CARD, 0.5)}


ITEMS_OF_ORDINARY = (
    "zoo/COCO-InstanceSegmentation/mask_rcnn_R_50_FPN_3x",
    "zoo/COCO-Detection/retinanet_R_50_FPN_3x",
    "zoo amp/COCO-InstanceSegmentation/mask_rcnn_R_50_FPN_3x",
    "zoo/COCO-PanopticSegmentation/panoptic_fpn_R_50_3x",
    "fragments/24GB",
    "fragments/6GB",
)


def ordinary() -> Iterator[Record]:
    """Some of measure-gpu's items with ordinary segments of the allocator."""
    for key in full_size(ITEMS_OF_ORDINARY, ITEMS_OF_ORDINARY[:1]):
        try:
            row = measured(key)
        except Exception as e:
            row = error_record(e)
        yield {"of": key, **row}
        release_memory(CARD)


def one_rank() -> Iterator[Record]:
    """Memory that NCCL takes with one rank."""
    x = torch.ones(2**20, device=CARD)
    before = outside()
    with tempfile.TemporaryDirectory() as folder:
        backend = full_size("nccl", "gloo")
        dist.init_process_group(backend, f"file://{folder}/store", world_size=1, rank=0)
        dist.all_reduce(x)
        torch.cuda.synchronize(CARD)
        yield {"before": before, **outside()}
        dist.destroy_process_group()


def snapshot() -> Iterator[Record]:
    """Cost of recording the allocator's events, as MEMFIT.MONITOR.SNAPSHOT_ON_OOM does."""
    steps = Steps(job_of(2), CARD)
    steps.step()
    plain = median_seconds(steps.step, CARD, 2.0, 1, full_size(7, 1))
    record_memory_history(100_000)
    recording = median_seconds(steps.step, CARD, 2.0, 1, full_size(7, 1))
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "snapshot")
        start = time.monotonic()
        dump_memory_snapshot(str(file))
        seconds, size_mb = time.monotonic() - start, file.stat().st_size / MB
    record_memory_history(None)
    yield {"seconds": plain, "recording": recording, "dump_seconds": seconds, "dump_mb": size_mb}


def probe() -> Iterator[Record]:
    """An estimate by a real step beside one by a dry run."""
    job = job_of(2)
    for is_real in (False, True):
        start = time.monotonic()
        estimate = estimate_memory(job, probe=is_real)
        yield {
            "probe": is_real,
            "took": time.monotonic() - start,
            "allocated_gb": estimate.peak_allocated_gb,
            "device_gb": estimate.device_total_gb,
            "evaluation_gb": estimate.evaluation_gb,
            "seconds": estimate.seconds_per_iteration,
        }


@dataclass(frozen=True)
class Measurement:
    """One of this file's functions, with its limit in seconds and the allocator's options.

    The options are the package's own if None.
    """

    run: Callable[[], Iterator[Record]]
    seconds: float
    allocator: Optional[str] = EXPANDS


def full_ones(*names: str) -> dict[str, Measurement]:
    calls = {name: partial(full_card.full, getattr(full_card, name)) for name in names}
    return {f"full_{name}": Measurement(call, 45) for name, call in calls.items()}


# What tells most comes first.
MEASUREMENTS = {
    "defaults": Measurement(defaults, 25, None),
    "train": Measurement(train, 90, None),
    "crowded": Measurement(crowded, 60),
    **full_ones("allocator", "convolution", "cublas", "cudnn", "kernels", "step"),
    "convolutions": Measurement(convolutions, 60),
    "fraction": Measurement(fraction, 20),
    "fraction_ordinary": Measurement(fraction, 20, ORDINARY),
    "offload": Measurement(offload, 60),
    "ordinary_segments": Measurement(ordinary, 75, ORDINARY),
    **full_ones("context", "nccl", "fft", "solver", "host"),
    "one_rank": Measurement(one_rank, 20),
    "snapshot": Measurement(snapshot, 30),
    "probe": Measurement(probe, 40),
}
