# Copyright (c) the d2_memfit developers.
"""Estimates against published training memory: docs/HOW_ACCURATE.md.

Detectron2's model zoo was trained on V100, mostly 8 (zoo_train_memory.csv in this folder, from
upstream's MODEL_ZOO.md). --unseen takes the rows of unseen_train_memory.csv in their place, which
were listed before any of them was estimated. --projects names a folder with other projects, by the
names that begin the lines of other_train_memory.csv: ViTDet and Panoptic-DeepLab of Detectron2's
main branch, MaskFormer, Mask2Former, SparseInst, AdelaiDet, detrex. Rows of projects that are not
there are left out. The datasets may be missing. ViTDet and detrex need Detectron2's main branch and
fairscale, MaskFormer needs timm and panopticapi.

Detectron2 logs MiB, and dev/parse_results.sh reads them from the log. Published GB are thousands of
MiB. This is inferred: the rows of ViTDet then agree to 1%, and with 1024 all are 2.4% lower.
"""

import argparse
import csv
import importlib
import math
import re
import statistics
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Optional

from compatibility_checks.project import Project
from pages import markdown_table

from d2_memfit.common.errors import one_line
from d2_memfit.config.load import load_cfg
from d2_memfit.job import Job, load_lazy_config
from d2_memfit.planner.device import DeviceModel
from d2_memfit.planner.estimate import DryJob, MemoryEstimate

from .common import in_own_processes, write_csv
from .old_software import OldDevice, as_in_cudnn_7, as_in_pytorch

PUBLISHED = Path(__file__).with_name("zoo_train_memory.csv")
UNSEEN = Path(__file__).with_name("unseen_train_memory.csv")
OTHERS = Path(__file__).with_name("other_train_memory.csv")
HEADER = ["config", "used for", "published GB", "typical", "worst", "range", "error", "inside"]

# Number of GPUs for configs not trained on 8 x 2 images. It is not published: 2 images per GPU is a
# guess.
_NUM_GPUS = {
    "Misc/panoptic_fpn_R_101_dconv_cascade_gn_3x.yaml": 16,
    "Misc/cascade_mask_rcnn_X_152_32x8d_FPN_IN5k_gn_dconv.yaml": 64,
}
# Modules that projects import, and that neither their models nor their mappers need in a dry run.
_NOT_NEEDED = (
    "MultiScaleDeformableAttention",
    "adet._C",
    "cityscapesscripts",
    "detrex._C",
    "editdistance",
    "h5py",
    "lvis",
    "rapidfuzz",
    "wandb",
)
_GB = 1024 / 1000  # published GB are thousands of MiB


@dataclass(frozen=True)
class Row:
    """A published figure and its job.

    Attributes:
        config: a config of Detectron2's zoo, or a file below the folder of projects.
        gb: published memory in thousands of MiB.
        options: KEY VALUE pairs.
        device: the card's file.
        pytorch: the release whose memory is simulated, such as "1.9".
        used: what was chosen on this row; "" if nothing was.
    """

    config: str
    gb: float
    options: str = ""
    num_gpus: int = 8
    device: str = "v100"
    pytorch: str = "1.9"
    used: str = "software"


@dataclass(frozen=True)
class Result:
    """A row with its estimate, or with the reason why there is none."""

    row: Row
    estimate: Optional[MemoryEstimate] = None
    why: str = ""

    @property
    def error(self) -> float:
        """Relative error of the worst case."""
        assert self.estimate is not None
        return self.estimate.peak_allocated_gb * _GB / self.row.gb - 1

    @property
    def is_inside(self) -> bool:
        assert self.estimate is not None
        low, high = self.estimate.range_gb
        return low * _GB <= self.row.gb <= high * _GB

    def cells(self) -> list[str]:
        row = self.row
        e = self.estimate
        cells = [f"{row.config} {row.options}".strip(), row.used or "nothing", f"{row.gb:g}"]
        if e is None:
            return [*cells, "", "", "", "", self.why]
        typical_gb = e.peak_allocated_gb if e.typical_gb is None else e.typical_gb
        low, high = e.range_gb
        return [
            *cells,
            f"{typical_gb * _GB:.2f}",
            f"{e.peak_allocated_gb * _GB:.2f}",
            f"{low * _GB:.2f} to {high * _GB:.2f}",
            f"{self.error:+.1%}",
            "yes" if self.is_inside else "no",
        ]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--projects", type=Path, help="a folder with some of the projects")
    parser.add_argument("--unseen", action="store_true", help="rows that nothing was chosen on")
    parser.add_argument("--only", default="", help="rows whose config contains this text")
    parser.add_argument("--csv", type=Path, help="write the rows into this file")


def run(args: argparse.Namespace) -> None:
    rows = zoo_rows()
    if args.unseen:
        rows = [Row(config, gb, used="") for config, gb in published_memory(UNSEEN).items()]
    elif args.projects is not None:
        rows += [row for row in project_rows() if (args.projects / row.config).is_file()]
    results = []
    chosen = [row for row in rows if args.only in row.config]
    for result in in_own_processes(partial(compare, folder=args.projects), chosen):
        results.append(result)
        print(f"{result.row.config}: {result.cells()[3:]}", file=sys.stderr)
    print(markdown_table(HEADER, [result.cells() for result in results]))
    if args.csv is not None:
        write_csv(args.csv, HEADER, [result.cells() for result in results])
    print(f"\nUsed for a choice: {summary([r for r in results if r.row.used])}")
    print(f"\nUsed for nothing: {summary([r for r in results if not r.row.used])}")


def zoo_rows() -> list[Row]:
    published = published_memory().items()
    return [Row(config, gb, num_gpus=_NUM_GPUS.get(config, 8)) for config, gb in published]


def published_memory(file: Path = PUBLISHED) -> dict[str, float]:
    """Published memory of Detectron2's zoo in thousands of MiB, by config."""
    with open(file, newline="") as f:
        return {row["config"]: float(row["train_mem_gb"]) for row in csv.DictReader(f)}


def project_rows() -> list[Row]:
    """Rows of other projects."""
    with open(OTHERS, newline="") as f:
        return [_row(line) for line in csv.DictReader(f)]


def _row(line: dict[str, Any]) -> Row:
    numbers = {"gb": float(line["gb"]), "num_gpus": int(line["num_gpus"])}
    return Row(**{**line, **numbers})


def estimate(config: str) -> float:
    """Worst case of a config of Detectron2's zoo, in thousands of MiB."""
    row = Row(config, 0, num_gpus=_NUM_GPUS.get(config, 8))
    return estimate_row(row).peak_allocated_gb * _GB


def compare(row: Row, folder: Optional[Path]) -> Result:
    try:
        return Result(row, estimate_row(row, folder))
    except Exception as e:
        return Result(row, why=f"fails: {one_line(e)}")


def estimate_row(row: Row, folder: Optional[Path] = None) -> MemoryEstimate:
    major, minor = row.pytorch.split(".")
    version = int(major), int(minor)
    device = OldDevice.like(DeviceModel.load(row.device), version)
    with as_in_pytorch(version), as_in_cudnn_7() if row.device == "v100" else nullcontext():
        return DryJob(_job(row, folder), device, evaluates=False).estimate(with_range=True)


def _job(row: Row, folder: Optional[Path]) -> Job:
    options = row.options.split()
    if folder is None or not (folder / row.config).is_file():
        return Job.from_cfg(load_cfg(row.config, options), row.num_gpus)
    file = str((folder / row.config).absolute())
    tree = row.config.partition("/")[0]
    project = Project(tree, tree, "", file, paths=("tools", "."), stubs=_NOT_NEEDED)
    project.prepare(folder / tree)
    if file.endswith(".py"):
        return Job.from_lazy(load_lazy_config(file, options), row.num_gpus)
    script = vars(importlib.import_module("train_net"))
    add_keys = [script[n] for n in script if re.fullmatch(r"add_\w+_config|get_cfg", n)]
    return Job.from_trainer(script["Trainer"], load_cfg(file, options, add_keys), row.num_gpus)


def summary(results: Sequence[Result]) -> str:
    """Coverage of the ranges and errors of the worst cases."""
    done = [result for result in results if result.estimate is not None]
    if not done:
        return "no row"
    errors = sorted(abs(result.error) for result in done)
    p90 = errors[math.ceil(0.9 * len(errors)) - 1]
    inside = sum(result.is_inside for result in done)
    return (
        f"{inside} of {len(done)} rows in their range ({inside / len(done):.0%}); the worst case "
        f"is {statistics.median(errors):.1%} away in the median, {p90:.1%} for nine of ten, "
        f"{errors[-1]:.1%} at most; "
        f"{len(results) - len(done)} fail"
    )
