# Copyright (c) the d2_memfit developers.
"""Plans at the edge: budgets of 90 to 100% of what a job needs, run under the kernel's limit.

Each plan is made and trained in a process of its own, on the CPU, with the largest batch in each
iteration. RLIMIT_DATA enforces the budget. A budget is a share of what the job needs with one image
in a micro-batch, with the plan's margin, so that under 100% only techniques can save memory. What
does not fit with them is counted, and not run.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from d2_memfit import Job, MemfitTrainer
from d2_memfit.common.units import GB
from d2_memfit.config import load_cfg
from d2_memfit.job import WorstCase
from d2_memfit.planner.device import DeviceModel
from d2_memfit.planner.estimates import DryJob, margin_of
from d2_memfit.planner.search import plan_memory
from d2_memfit.planner.writing import planned_config

from .common import machine, markdown_table

_CASE = WorstCase((480, 640), 4)
_FEW_PIXELS = WorstCase((128, 192), 4)
_IMAGES = 2
_ITERATIONS = 2
_MOST_CPU_S = 600

_MODELS = {
    "Faster R-CNN": "COCO-Detection/faster_rcnn_R_50_FPN_1x",
    "RetinaNet": "COCO-Detection/retinanet_R_50_FPN_1x",
    "RPN": "COCO-Detection/rpn_R_50_FPN_1x",
    "Mask R-CNN": "COCO-InstanceSegmentation/mask_rcnn_R_50_FPN_1x",
    "Keypoint R-CNN": "COCO-Keypoints/keypoint_rcnn_R_50_FPN_1x",
    "Panoptic FPN": "COCO-PanopticSegmentation/panoptic_fpn_R_50_1x",
    "Cascade Mask R-CNN": "Misc/cascade_mask_rcnn_R_50_FPN_1x",
    "Semantic FPN": "Misc/semantic_R_50_FPN_1x",
}
_R18 = ["MODEL.RESNETS.DEPTH", 18, "MODEL.RESNETS.RES2_OUT_CHANNELS", 64]
_WAYS: dict[str, tuple[tuple[float, ...], list[Any]]] = {
    "": ((0.9, 0.95, 0.97, 1.0), []),
    "moving average": ((0.97, 1.0), ["MEMFIT.EMA_DECAY", 0.999]),
    "8-bit states": ((0.97, 1.0), ["MEMFIT.OPTIMIZER.STATES_8BIT", True]),
    "bfloat16": ((1.0,), ["SOLVER.AMP.ENABLED", True, "MEMFIT.AMP_DTYPE", "bfloat16"]),
    "checkpointing": ((0.95, 0.97, 1.0), ["MEMFIT.CHECKPOINT.MODULES", ["backbone.bottom_up"]]),
    "offload": ((1.0,), ["MEMFIT.OFFLOAD.MODULES", ["backbone.bottom_up"]]),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--output", type=Path, help="file for a line of JSON per plan")
    parser.add_argument("--case", nargs=3, help=argparse.SUPPRESS)  # of the process of a plan


def run(args: argparse.Namespace) -> None:
    if args.case is not None:
        model, way, share = args.case
        print(json.dumps(train_at_edge(model, way, float(share))))
        return
    lines = []
    for model in _MODELS:
        for way, (shares, _) in _WAYS.items():
            for share in shares:
                lines.append(_in_its_process(model, way, share))
                if args.output is not None:
                    with args.output.open("a") as file:
                        file.write(json.dumps(lines[-1]) + "\n")
    print(_report(lines))
    print(f"\n{machine()}")


def _report(lines: Sequence[dict[str, Any]]) -> str:
    """A table with a row for each way and share, of all models."""
    rows = []
    for way, (shares, _) in _WAYS.items():
        for share in shares:
            alike = [x for x in lines if (x["way"], x["share"]) == (way, share)]
            run = [x for x in alike if x["fits"]]
            spans = [
                f"{min(values):.2f} to {max(values):.2f}" if values else ""
                for values in ([x[key] for x in run if key in x] for key in ("chance", "used"))
            ]
            failed = sum(x["errors"] > 0 for x in run), sum(not x["finished"] for x in run)
            rows.append([way or "nothing", f"{share:.0%}", f"{len(run)} of {len(alike)}"])
            rows[-1] += [*spans, *map(str, failed)]
    header = ["with", "budget / need", "plans run", "chance", "most used / budget"]
    return markdown_table([*header, "out of memory", "not finished"], rows)


def _in_its_process(model: str, way: str, share: float) -> dict[str, Any]:
    command = [sys.executable, *sys.argv[:1], "edges", "--case", model, way, str(share)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    line = {"model": model, "way": way, "share": share, "fits": True, "errors": 0}
    if done.returncode:
        return {**line, "finished": False, "why": done.stderr[-500:]}
    return {**line, **json.loads(done.stdout.splitlines()[-1])}


class _Trainer(MemfitTrainer):
    """Trains with the job's largest batch."""

    @classmethod
    def build_train_loader(cls, cfg: Any) -> Any:
        batch = Job.from_cfg(cfg, batch=_case_of(cfg)).training_batch(cfg.SOLVER.IMS_PER_BATCH)
        return [batch] * (cfg.SOLVER.MAX_ITER + 1)


def _case_of(cfg: Any) -> WorstCase:
    """Few pixels in bfloat16, which is up to 100 times slower on a CPU without its instructions."""
    return _FEW_PIXELS if cfg.SOLVER.AMP.ENABLED else _CASE


def train_at_edge(model: str, way: str, share: float) -> dict[str, Any]:
    """Plan a job for a share of what it needs, and train it for some iterations.

    Random weights make numbers that are too small or too large. Denormal ones, which take 20 times
    as long, are flushed to zero, and images are scaled down.
    """
    torch.set_flush_denormal(True)
    resource.setrlimit(resource.RLIMIT_CPU, (_MOST_CPU_S, _MOST_CPU_S))
    with tempfile.TemporaryDirectory() as folder:
        opts = [
            *("MODEL.DEVICE", "cpu", "MODEL.WEIGHTS", "", "OUTPUT_DIR", folder, "SEED", 1),
            *("SOLVER.IMS_PER_BATCH", _IMAGES, "SOLVER.MAX_ITER", _ITERATIONS),
            *("MODEL.ROI_HEADS.BATCH_SIZE_PER_IMAGE", 64, "MEMFIT.MICRO_BATCH", 1),
            *("MEMFIT.NORMALIZERS.POLICY", "off", "MODEL.PIXEL_STD", [300.0] * 3),
            *("SOLVER.BASE_LR", 1e-5, "DATASETS.TEST", (), "MEMFIT.MONITOR.PERIOD", 1),
        ]
        cfg = load_cfg(_MODELS[model], [*opts, *_R18, *_WAYS[way][1]])
        job = Job.from_cfg(cfg, batch=_case_of(cfg))
        device = DeviceModel.load("cpu")
        needs_bytes = DryJob(job, device, evaluates=False).total_bytes()
        budget_gb = share * margin_of(job, device).budget_bytes(needs_bytes) / GB
        plan = plan_memory(job, budget_gb, device=device, evaluates=False)
        line = {"budget_gb": budget_gb, "chance": plan.chance, "fits": plan.fits}
        if not plan.fits:
            return {**line, "finished": False, "errors": 0}
        _Trainer(planned_config(cfg, plan)).train()
        output = Path(folder)
        errors = output / "memfit_oom.jsonl"
        reports = [json.loads(text) for text in (output / "metrics.json").open()]
        return {
            **line,
            "settings": {k: v for s in plan.steps for k, v in s.settings.items()},
            "used": max(report.get("memfit/budget_used", 0) for report in reports),
            "errors": len(errors.read_text().splitlines()) if errors.exists() else 0,
            "finished": (output / "model_final.pth").exists(),
        }
