# Copyright (c) the d2_memfit developers.
"""The memory of a GPU, measured and compared with estimates: ``d2-memfit measure-gpu``.

Each item runs in its own process, so that a crash or an error of CUDA ends one item, and memory
outside the allocator is that of the item. ``python -m d2_memfit.measure ITEM DEVICE SMALL`` is such
a process. It imports everything, and begins when it reads a line.
"""

import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from itertools import repeat
from pathlib import Path
from typing import Any

import torch
from detectron2.utils.events import EventStorage

from .common import GB
from .common.compat import clear_cublas_workspaces
from .common.errors import ConfigError
from .common.files import check_outputs
from .config.load import load_cfg, with_settings
from .config.settings import RecoveryOptions
from .engine.train_loop import AccumulatingTrainer
from .job import Job
from .memory import device_and_software, enforce_budget, use_expandable_segments
from .planner.estimate import estimate_memory
from .planner.plan import plan_memory
from .planner.steps import build_with_values, infer
from .planner.worst_outputs import worst_case

__all__ = ["ITEMS", "measure_gpu", "measure_item"]

_MOST_SECONDS = 120  # of one item
_MASK_RCNN = "COCO-InstanceSegmentation/mask_rcnn_R_50_FPN_3x"
_OTHERS = (
    "COCO-Detection/retinanet_R_50_FPN_3x",
    "COCO-Detection/faster_rcnn_R_50_C4_3x",
    "COCO-Keypoints/keypoint_rcnn_R_50_FPN_3x",
    "COCO-PanopticSegmentation/panoptic_fpn_R_50_3x",
    "COCO-Detection/faster_rcnn_X_101_32x8d_FPN_3x",
)
_CHANGES: dict[str, dict[str, Any]] = {
    "2 images": {"SOLVER.IMS_PER_BATCH": 2},
    "recovery": {"SOLVER.IMS_PER_BATCH": 8},
    **{f"{n}GB": {"SOLVER.IMS_PER_BATCH": 16, "MEMFIT.PRESET": f"{n}GB"} for n in (6, 4, 8, 12)},
    "AMP": {"SOLVER.AMP.ENABLED": True},
    "checkpointing": {"MEMFIT.CHECKPOINT.MODULES": ["all"]},
    "offload": {"MEMFIT.OFFLOAD.MODULES": ["*"]},
    "heads in chunks": {"MEMFIT.HEADS.CHUNK_SIZE": 32},
    "8-bit states": {"MEMFIT.OPTIMIZER.STATES_8BIT": True},
    "1 image": {"SOLVER.IMS_PER_BATCH": 1},
}
_NARROW = (  # keys of MODEL that are 16 in a rehearsal
    *("RESNETS.STEM_OUT_CHANNELS", "RESNETS.WIDTH_PER_GROUP", "RESNETS.RES2_OUT_CHANNELS"),
    *("FPN.OUT_CHANNELS", "ROI_BOX_HEAD.FC_DIM", "ROI_MASK_HEAD.CONV_DIM"),
    "ROI_HEADS.BATCH_SIZE_PER_IMAGE",
)
# A config and what is changed in it. The first ones tell the most.
ITEMS = (
    *("device", *(f"{_MASK_RCNN}, {change}" for change in _CHANGES)),
    *(f"{config}, {change}" for change in ("2 images", "AMP") for config in _OTHERS),
)


def measure_item(name: str, device_name: str, small: bool) -> dict[str, Any]:
    """Estimate and measure an item in this process; memory is in bytes.

    Args:
        name: one of :data:`ITEMS`.
        small: whether images and models are small, for a rehearsal.
    """
    here = device_and_software(device := torch.device(device_name))
    record = {"device": here.pop("device"), "versions": here}
    if name == "device":
        return {**record, **_outside_of_jobs(device)}
    config, _, change = name.partition(", ")
    settings = {"MODEL.DEVICE": device_name, "SOLVER.IMS_PER_BATCH": 2, "SOLVER.BASE_LR": 1e-9}
    settings["MODEL.PIXEL_STD"] = [300.0] * 3  # activations of random weights stay small
    settings |= {**_CHANGES[change], **{f"MODEL.{key}": 16 for key in _NARROW if small}}
    sizes: dict[str, Any] = {"image_size": (128, 160), "num_instances": 5} if small else {}
    settings |= {"INPUT.MIN_SIZE_TRAIN": (0,), "INPUT.MIN_SIZE_TEST": 0} if small else {}
    job = Job.from_cfg(with_settings(load_cfg(config), settings), 1, **sizes)
    if change == "recovery":
        return {**record, **_recovered(job, device)}
    if job.budget_gb is None:
        estimate = estimate_memory(job)
    else:
        plan = plan_memory(job, job.budget_gb, allow=["exact"])
        estimate, job = plan.estimate, job.with_settings(plan.settings)
    record["estimated_bytes"] = estimate.peak_allocated_gb * GB
    record["device_estimated_bytes"] = estimate.device_total_gb * GB
    record["evaluation_estimated_bytes"] = (estimate.evaluation_gb or 0) * GB
    return {**record, "micro_batch": estimate.micro_batch_size, **_measured(job, device)}


def _measured(job: Job, device: torch.device) -> dict[str, Any]:
    """Memory and time of training steps and of an evaluation, under the job's budget if any."""
    enforce_budget(job.budget_gb, str(device))
    step, trainer = _steps(job, micro_batch_size=job.largest_micro_batch)
    step()  # it makes the optimizer's states, and loads kernels
    _peaks(device)
    start = time.perf_counter()
    for _ in range(3):
        step()
    training, of_training = _peaks(device)
    seconds = (time.perf_counter() - start) / 3
    for p in trainer.model.parameters():
        if p.dim() > 1:
            p.data.zero_()  # then there are the most detections
    with EventStorage():
        infer(trainer.model, job, job.batches.evaluation())
    evaluation, of_evaluation = _peaks(device)
    return {
        "seconds": seconds,
        "measured_bytes": training,
        "device_measured_bytes": max(of_training, of_evaluation),
        "evaluation_measured_bytes": evaluation,
        "outside_bytes": _outside_bytes(device),
    }


def _recovered(job: Job, device: torch.device) -> dict[str, Any]:
    """The loss of a batch that does not fit, and of its halves with enough memory."""
    step, trainer = _steps(job, micro_batch_size=4)
    loss = step()  # and the check of the losses, which has a forward over the whole batch
    _peaks(device)
    step()
    limit = _outside_bytes(device) + 1.3 * _peaks(device)[0]
    del step, trainer
    gc.collect()
    enforce_budget(limit / GB, str(device))
    step, trainer = _steps(job, recovery=RecoveryOptions())
    return {"loss": loss, "loss_under_limit": step(), "ooms": trainer.recovery.totals.oom_events}


def _steps(job: Job, **options: Any) -> tuple[Callable[[], float], Any]:
    """A function that makes a step with random pixels and returns the loss, and its trainer."""
    device = job.cfg.MODEL.DEVICE
    torch.manual_seed(0)
    model, optimizer = build_with_values(job, device)
    precision = job.precision(device)
    if precision.scaler.is_enabled():  # the first steps must not be left out
        precision.scaler = torch.amp.GradScaler(precision.device_type, init_scale=1.0)
    batch = job.training_batch(job.window)
    for d in batch:
        d["image"] = torch.randint(0, 256, d["image"].shape, dtype=torch.uint8)
    trainer = AccumulatingTrainer(model, repeat(batch), optimizer, precision=precision, **options)
    trainer.iter = 0

    def step() -> float:
        torch.manual_seed(1)
        with EventStorage() as storage, worst_case(model, lambda line: None):
            trainer.run_step()
            return storage.latest()["total_loss"][0]

    return step, trainer


def _outside_of_jobs(device: torch.device) -> dict[str, Any]:
    """Memory of an empty context, and of cuBLAS."""
    rows = torch.zeros(512, 512, device=device, requires_grad=True)
    rows.grad = torch.zeros_like(rows)
    context = _outside_bytes(device)
    clear_cublas_workspaces()
    before = torch.cuda.memory_allocated(device)
    (rows @ rows.detach()).sum().backward()  # in a thread that has its own workspace
    workspaces = torch.cuda.memory_allocated(device) - before
    return {"context_bytes": context, "cublas_workspace_bytes": workspaces}


def _peaks(device: torch.device) -> tuple[int, int]:
    """Peaks since the last call: of tensors, and of the device with its other processes."""
    torch.cuda.synchronize(device)
    stats = torch.cuda.memory_stats(device)
    torch.cuda.reset_peak_memory_stats(device)
    of_device = stats["reserved_bytes.all.peak"] + _outside_bytes(device)
    return stats["allocated_bytes.all.peak"], of_device


def _outside_bytes(device: torch.device) -> int:
    free, total = torch.cuda.mem_get_info(device)
    return total - free - torch.cuda.memory_reserved(device)


def measure_gpu(
    device: str, seconds: float, output: Path, items: str = "", small: bool = False
) -> Iterator[str]:
    """Measure the items that a file has no records of. Yield a line for each, then a table of all.

    Args:
        device: such as "cuda:0".
        seconds: time limit, at which a running item is ended. It then has no record.
        output: file of the records, a line of JSON each.
        items: a part of the names of the items to measure.
        small: as for :func:`measure_item`.

    Raises:
        ConfigError: the device does not answer, or the file has records of another one.
    """
    end = time.monotonic() + seconds
    check_outputs([output], is_ours=lambda path: not os.path.getsize(path) or bool(_read(output)))
    records = _read(output)
    todo = [name for name in ITEMS if name not in records and items in name]
    ahead: list[Any] = []
    output.parent.mkdir(parents=True, exist_ok=True)
    for i, name in enumerate(todo):
        ahead += [_start(n, device, small) for n in todo[i : i + 2][len(ahead) :]]
        record = _record_of(ahead.pop(0), min(_MOST_SECONDS, end - time.monotonic()))
        if time.monotonic() >= end:
            break
        known = {r["device"] for r in [*records.values(), record] if "device" in r}
        if len(known) > 1 or (name == "device" and not known):
            raise ConfigError(f"--device {device} cannot be used: {record.get('error', known)}")
        with output.open("a") as file:
            file.write(json.dumps({"item": name, **record}) + "\n")
        records[name] = record
        yield f"{name}: {record.get('error', 'measured')}"
    yield _table(records)


def _start(*arguments: object) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "d2_memfit.measure", *map(str, arguments)]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True)


def _record_of(process: "subprocess.Popen[str]", seconds: float) -> dict[str, Any]:
    """The record of a started process, or its error."""
    try:
        output, errors = process.communicate("start\n", max(seconds, 0))
        return json.loads(output.splitlines()[-1])
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return {"error": f"it was ended after {seconds:.0f} s"}
    except (ValueError, IndexError):
        return {"error": f"status {process.returncode}: {' '.join(errors.split())[-500:]}"}


def _read(file: Path) -> dict[str, dict[str, Any]]:
    """Records by item; lines that are not complete are left out."""
    lines = file.read_text().splitlines() if file.is_file() else []
    found = [json.loads(line) for line in lines if line.startswith('{"item": ') and line[-1] == "}"]
    return {record.pop("item"): record for record in found}


def _table(records: dict[str, dict[str, Any]]) -> str:
    rows = ["measured GB  estimated GB  estimated / measured  item"]
    for name, record in records.items():
        for of in ("", "device_", "evaluation_"):
            measured, estimated = (record.get(f"{of}{k}_bytes") for k in ("measured", "estimated"))
            if measured and estimated:
                sizes = f"{measured / GB:11.2f} {estimated / GB:13.2f} {estimated / measured:21.2f}"
                rows.append(f"{sizes}  {name} {of.strip('_')}")
    return "\n".join(rows)


if __name__ == "__main__":
    use_expandable_segments()  # as in training under a budget
    if sys.stdin.readline():
        print(json.dumps(measure_item(sys.argv[1], sys.argv[2], sys.argv[3] == "True")))
