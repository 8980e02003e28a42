# Copyright (c) the d2_memfit developers.
"""Estimates against published training memory.

Detectron2's model zoo was trained on V100, mostly 8 (zoo_train_memory.csv in this folder, from
upstream's MODEL_ZOO.md). --projects names a folder with Detectron2's projects/ViTDet and
Mask2Former. It adds ViTDet, Swin and MViTv2 on A100 (from ViTDet's README), and Mask2Former as
trained by mmdetection (other_train_memory.csv). The datasets may be missing.

Detectron2 logs MiB, and dev/parse_results.sh reads them from the log. Published GB are thousands of
MiB. This is inferred: the rows of ViTDet then agree to 1%, and with 1024 all are 2.4% lower.
"""

import argparse
import csv
import statistics
import sys
from collections.abc import Iterable
from importlib import import_module
from pathlib import Path
from types import ModuleType

import torch
from detectron2.config import LazyConfig

from d2_memfit.config import load_cfg
from d2_memfit.job import Job
from d2_memfit.planner.device import DeviceModel
from d2_memfit.planner.estimates import DryJob

from .common import markdown_table
from .old_software import V100, OldDevice, pytorch_before_1_11

PUBLISHED = Path(__file__).with_name("zoo_train_memory.csv")
OTHERS = Path(__file__).with_name("other_train_memory.csv")

# Number of GPUs for configs not trained on 8 x 2 images. It is not published: 2 images per GPU is a
# guess.
_NUM_GPUS = {
    "Misc/panoptic_fpn_R_101_dconv_cascade_gn_3x.yaml": 16,
    "Misc/cascade_mask_rcnn_X_152_32x8d_FPN_IN5k_gn_dconv.yaml": 64,
}

Row = tuple[str, float, float]  # config, published memory, estimated memory


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--csv", default=PUBLISHED, help="with columns config, train_mem_gb")
    parser.add_argument("--projects", type=Path, help="a folder with ViTDet, Mask2Former, or both")


def run(args: argparse.Namespace) -> None:
    _show((config, gb, estimate(config)) for config, gb in published_memory(args.csv).items())
    if args.projects is not None:
        others = published_memory(OTHERS).items()
        there = [(config, gb) for config, gb in others if (args.projects / config).is_file()]
        print()
        _show((config, gb, estimate_project(args.projects, config)) for config, gb in there)


def _show(rows: Iterable[Row]) -> None:
    rows = list(rows)
    table = [(c, p, f"{e:.2f}", f"{e / p - 1:+.1%}") for c, p, e in rows]
    print(markdown_table(["config", "published GB", "estimated GB", "error"], table))
    errors = [e / p - 1 for _, p, e in rows]
    print(f"\nMedian of the absolute errors {statistics.median(map(abs, errors)):.1%};", end=" ")
    print(f"{sum(abs(e) <= 0.12 for e in errors)} of {len(errors)} rows within 12%;", end=" ")
    print(f"{sum(e < -0.1 for e in errors)} more than 10% too low;", end=" ")
    print(f"Spearman's correlation {rank_correlation([r[1:] for r in rows]):.3f}.")


def published_memory(path: Path = PUBLISHED) -> dict[str, float]:
    with open(path, newline="") as f:
        return {row["config"]: float(row["train_mem_gb"]) for row in csv.DictReader(f)}


def estimate(config: str) -> float:
    """Estimate for the V100s of the zoo, with PyTorch 1.3 to 1.5."""
    job = Job.from_cfg(load_cfg(config), _NUM_GPUS.get(config, 8))
    with pytorch_before_1_11():
        return _published_gb(job, V100.of("v100"))


def estimate_project(folder: Path, config: str) -> float:
    """Estimate for an A100 with the software of 2022."""
    device = OldDevice.of("a100")
    if config.endswith(".py"):
        return _published_gb(Job.from_lazy(LazyConfig.load(str(folder / config)), 64), device)
    # mmdetection's PyTorch is older than 1.11, and its backbone has BatchNorm, which keeps its
    # input, where Detectron2 has FrozenBN.
    job = _mask2former(folder / "Mask2Former", folder / config)
    with pytorch_before_1_11():
        return _published_gb(job, device)


def _mask2former(folder: Path, config: Path) -> Job:
    sys.path.insert(0, str(folder))
    operators = ModuleType("MultiScaleDeformableAttention")  # dry runs need no compiled ones
    vars(operators).update(ms_deform_attn_forward=None, ms_deform_attn_backward=None)
    sys.modules.setdefault("MultiScaleDeformableAttention", operators)
    trainer = import_module("train_net").Trainer
    add_keys = [
        import_module("detectron2.projects.deeplab").add_deeplab_config,
        import_module("mask2former").add_maskformer2_config,
    ]
    opts = ["MODEL.RESNETS.NORM", "BN", "SOLVER.AMP.ENABLED", False]
    return Job.from_trainer(trainer, load_cfg(str(config), opts, add_keys), 8)


def _published_gb(job: Job, device: DeviceModel) -> float:
    estimate = DryJob(job, device, evaluates=False).estimate()
    return estimate.peak_allocated_gb * 1024 / 1000


def rank_correlation(pairs: list[tuple[float, float]]) -> float:
    """Spearman's correlation: Pearson's of the ranks, with the mean rank for ties."""
    ranks = [[_rank(values, v) for v in values] for values in zip(*pairs)]
    return torch.corrcoef(torch.tensor(ranks))[0, 1].item()


def _rank(values: tuple[float, ...], value: float) -> float:
    return sum(v < value for v in values) + (values.count(value) - 1) / 2
