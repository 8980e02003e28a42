# Copyright (c) the d2_memfit developers.
"""Predicted times of iterations against published ones.

published_times.csv, in this folder, has times of whole trainings, with cards and images of each.
--projects names a folder with ViTDet, SparseR-CNN, SparseInst and AdelaiDet; rows of projects that
are not there are left out. ViTDet needs Detectron2 main and timm.

Images have the mean size of the training's: the mean of its short sides, and 4/3 of that. Each has
7 objects, COCO's mean. A row that counts for its "ratio" has other software than Detectron2's, so
only the ratio of its two number formats is compared.

Which rows were fitted was decided by a rule, before the first fit. In Detectron2's zoo and in
ViTDet's README, every second family of models is held out, in alphabetical order. Of the other
sources, every second one is.
"""

import argparse
import csv
import math
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from itertools import combinations
from pathlib import Path
from types import ModuleType
from typing import Any, Optional

import torchvision
from detectron2.config import LazyConfig

from d2_memfit.config import load_cfg
from d2_memfit.job import Job, WorstCase
from d2_memfit.planner.device import DeviceModel, device_model
from d2_memfit.planner.estimates import DryJob, Range, factor_range, in_words
from d2_memfit.planner.estimates.times import seconds_range

from .common import markdown_table

PUBLISHED = Path(__file__).with_name("published_times.csv")
FITTED, HELD_OUT = "fitted", "held out"

_OBJECTS = 7
# Folders, files and functions of the projects: what is imported from them.
_PROJECTS = {
    "SparseR-CNN": ("projects/SparseRCNN", ".", "sparsercnn", "add_sparsercnn_config"),
    "SparseInst": (".", "tools", "sparseinst", "add_sparse_inst_config"),
    "AdelaiDet": (".", "tools", "adet.config", ""),
}
# Constants of the model of time: where the fit begins, and how far it may go, as a standard
# deviation of the logarithm.
_CONSTANTS = {
    "_FLOAT32_UNITS": (0.8, 0.3),
    "_TENSOR_CORES": (0.3, 0.5),
    "_MEMORY": (0.75, 0.3),
    "_GROUPED": (0.2, math.inf),
    "seconds_per_operator": (15e-6, 0.5),
    "seconds_per_micro_batch": (10e-3, 1.0),
}
_WEIGHT_OF_BEGIN = 0.05


@dataclass(frozen=True)
class Row:
    """A published time, and the dry run that predicts it."""

    source: str
    family: str
    config: str
    device: str
    gpus: int
    images_per_gpu: int
    size: tuple[int, int]
    number_format: str
    seconds: float
    counts_for_ratio_only: bool
    use: str
    dry_job: Optional[DryJob] = None

    @property
    def predicted(self) -> float:
        assert self.dry_job is not None
        return self.dry_job.seconds()

    @property
    def range(self) -> Range:
        return seconds_range(self.predicted)


@dataclass(frozen=True)
class Ratio:
    """The ratio of the times of two rows."""

    row: Row
    published: float
    predicted: float
    changes_number_format: bool

    @property
    def range(self) -> Range:
        return factor_range(self.predicted, self.changes_number_format)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--projects", type=Path, help="a folder with the projects of other rows")
    parser.add_argument("--fit", action="store_true", help="fit the constants again, minutes")


def run(args: argparse.Namespace) -> None:
    rows = predicted_rows(args.projects)
    if args.fit:
        fit(rows)
    for use in (FITTED, HELD_OUT):
        show(use, [row for row in rows if row.use == use])


def published_rows() -> list[Row]:
    with PUBLISHED.open(newline="") as f:
        return [
            Row(
                source=d["source"],
                family=d["family"],
                config=d["config"],
                device=d["device"],
                gpus=int(d["gpus"]),
                images_per_gpu=int(d["images_per_gpu"]),
                size=(int(d["height"]), int(d["width"])),
                number_format=d["format"],
                seconds=float(d["seconds"]),
                counts_for_ratio_only=d["counts"] == "ratio",
                use=d["use"],
            )
            for d in csv.DictReader(f)
        ]


def predicted_rows(projects: Optional[Path] = None, use: Optional[str] = None) -> list[Row]:
    """The published rows whose configs are there, with their dry runs.

    Args:
        projects: folder of public projects.
        use: what the rows are used for; None takes all.
    """
    found = []
    dry_jobs: dict[Any, DryJob] = {}
    for row in published_rows():
        if use not in (None, row.use):
            continue
        folder = row.config.split("/")[0]
        if folder in ("ViTDet", *_PROJECTS) and not (projects and (projects / folder).is_dir()):
            continue
        device = replace(DeviceModel.load(row.device), foreach=False)  # as before PyTorch 2.0
        key = (row.config, min(row.gpus, 2), row.images_per_gpu, row.size, row.number_format)
        if key not in dry_jobs:
            dry_jobs[key] = DryJob(_job(row, projects), device, evaluates=False)
        dry_job = DryJob.__new__(DryJob)
        vars(dry_job).update(vars(dry_jobs[key]), device=device)
        found.append(replace(row, dry_job=dry_job))
    return found


def _job(row: Row, projects: Optional[Path]) -> Job:
    folder, _, _ = row.config.partition("/")
    ranks = min(row.gpus, 2)
    if folder == "ViTDet":
        assert projects is not None
        cfg = LazyConfig.load(str(projects / row.config))
        return Job.from_lazy(cfg, row.gpus, num_instances=_OBJECTS)
    opts = ["SOLVER.IMS_PER_BATCH", row.images_per_gpu * ranks]
    opts += ["SOLVER.AMP.ENABLED", row.number_format == "float16"]
    batch = WorstCase(row.size, _OBJECTS)
    if folder not in _PROJECTS:
        return Job.from_cfg(load_cfg(row.config, opts), ranks, batch=batch)
    assert projects is not None
    trainer, add_keys = _imported(projects / folder)
    cfg = load_cfg(str(projects / row.config), opts, [add_keys])
    return Job.from_trainer(trainer, cfg, ranks, batch=batch)


def _imported(project: Path) -> tuple[Any, Any]:
    """The trainer of a project, and what adds its keys to a config."""
    *folders, module, function = _PROJECTS[project.name]
    sys.path[:0] = [str(project / folder) for folder in folders]
    for name in ("train_net", "adet._C", "adet.evaluation"):  # dry runs need no compiled ones
        sys.modules.pop(name, None)
    for name, values in (("adet._C", {}), ("adet.evaluation", {"TextEvaluator": None})):
        vars(sys.modules.setdefault(name, ModuleType(name))).update(values)
    for old in (torchvision.ops, torchvision.ops.misc):  # of torchvision 0.5
        vars(old).update(_new_empty_tensor=None, _output_size=None)
    keys = import_module(module)
    trainer = import_module("train_net").Trainer
    return trainer, getattr(keys, function, lambda cfg: _merge(keys.get_cfg(), cfg))


def _merge(more: Any, cfg: Any) -> None:
    """Add the keys of a config that are missing in another."""
    for key, value in more.items():
        if key not in cfg:
            cfg[key] = value
        elif isinstance(value, dict):
            _merge(value, cfg[key])


def show(use: str, rows: Sequence[Row]) -> None:
    print(f"\nRows that are {use}:\n")
    header = ["source", "config", "card", "GPUs x images", "format", "published", "predicted"]
    times = [row for row in rows if not row.counts_for_ratio_only]
    table: list[list[str]] = []
    for row in times:
        error = f"{row.predicted / row.seconds - 1:+.0%}"
        figures = [f"{row.seconds:.3f}", f"{row.predicted:.3f}", in_words(row.range), error]
        table.append([*_names(row), *figures])
    print(markdown_table([*header, "range", "error"], table))
    for name, ratios in (("float16", format_ratios(rows)), ("twice the images", gains(rows))):
        if ratios:
            print(f"\nTime x with {name}:\n")
            table = []
            for r in ratios:
                figures = [f"{r.published:.2f}", f"{r.predicted:.2f}", in_words(r.range)]
                table.append([*_names(r.row), *figures])
            print(markdown_table([*header, "range"], table))
    print(f"\n{summary(rows)}")


def _names(row: Row) -> list[str]:
    images = f"{row.gpus} x {row.images_per_gpu}"
    return [row.source, Path(row.config).stem, row.device, images, row.number_format]


def summary(rows: Sequence[Row]) -> str:
    """A line for each kind of prediction: its errors, and how often the range is right."""
    times = [row for row in rows if not row.counts_for_ratio_only]
    errors = [row.predicted / row.seconds - 1 for row in times]
    inside = sum(low <= row.seconds <= high for row in times for low, high in [row.range])
    lines = [f"{len(times)} times: median error {_median(errors):.1%}, {inside} inside the range"]
    for name, ratios in (
        ("times x with float16", format_ratios(rows)),
        ("times x with twice the images", gains(rows)),
        ("ratios of models of one family", families(rows)),
    ):
        if ratios:
            error = _median(r.predicted - r.published for r in ratios)
            inside = sum(is_inside(r) for r in ratios)
            lines.append(f"{len(ratios)} {name}: median error {error:.3f}, {inside} inside")
    return "\n".join(lines)


def _median(errors: Iterable[float]) -> float:
    return statistics.median(map(abs, errors))


def is_inside(ratio: Ratio) -> bool:
    low, high = ratio.range
    return low <= ratio.published <= high


def format_ratios(rows: Iterable[Row]) -> list[Ratio]:
    """Times in float16 over those in float32."""
    by_job: defaultdict[Any, dict[str, Row]] = defaultdict(dict)
    for r in rows:
        by_job[r.source, r.config, r.device, r.gpus, r.images_per_gpu][r.number_format] = r
    return [_ratio(of["float16"], of["float32"], 1) for of in by_job.values() if len(of) == 2]


def gains(rows: Iterable[Row]) -> list[Ratio]:
    """Times per image with 4 images in a batch over those with 2."""
    by_job: defaultdict[Any, dict[int, Row]] = defaultdict(dict)
    for r in rows:
        by_job[r.source, r.config, r.device, r.gpus, r.number_format][r.images_per_gpu] = r
    return [_ratio(of[4], of[2], 2) for of in by_job.values() if {2, 4} <= set(of)]


def families(rows: Iterable[Row]) -> list[Ratio]:
    """Times of models over those of other models of their family."""
    by_family = defaultdict(list)
    for r in rows:
        if not r.counts_for_ratio_only:
            key = (r.source, r.family, r.device, r.gpus, r.number_format, r.images_per_gpu)
            by_family[key].append(r)
    pairs = [pair for of in by_family.values() for pair in combinations(of, 2)]
    return [_ratio(a, b, 1) for a, b in pairs if a.config != b.config]


def _ratio(row: Row, base: Row, images: int) -> Ratio:
    return Ratio(
        row,
        row.seconds / base.seconds / images,
        row.predicted / base.predicted / images,
        row.number_format != base.number_format,
    )


def fit(rows: Sequence[Row]) -> None:
    """Fit the constants to the fitted rows, print them, and use them for the tables."""
    from scipy.optimize import minimize

    fitted = [row for row in rows if row.use == FITTED]
    names = list(_CONSTANTS)
    begin = [math.log(value) for value, _ in _CONSTANTS.values()]

    def loss(logarithms: Sequence[float]) -> float:
        _use(dict(zip(names, map(math.exp, logarithms))), rows)
        errors = [math.log(r.predicted / r.seconds) for r in fitted if not r.counts_for_ratio_only]
        errors += [math.log(r.predicted / r.published) for r in format_ratios(fitted)]
        away = [
            (x - x0) / deviation
            for x, x0, (_, deviation) in zip(logarithms, begin, _CONSTANTS.values())
        ]
        return sum(map(abs, errors)) + _WEIGHT_OF_BEGIN * sum(a * a for a in away)

    options = {"xatol": 1e-3, "fatol": 1e-3, "adaptive": True, "maxfev": 1500}
    best = minimize(loss, begin, method="Nelder-Mead", options=options)
    loss(best.x)
    print({name: float(f"{math.exp(x):.3g}") for name, x in zip(names, best.x)}, f"{best.fun:.3f}")


def _use(constants: dict[str, float], rows: Iterable[Row]) -> None:
    of_files: dict[str, Any] = {name: c for name, c in constants.items() if name[0] != "_"}
    for name in constants.keys() - of_files.keys():
        setattr(device_model, name, constants[name])
    for row in rows:
        assert row.dry_job is not None
        row.dry_job.device = replace(row.dry_job.device, **of_files)
