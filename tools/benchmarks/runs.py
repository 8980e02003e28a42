# Copyright (c) the d2_memfit developers.
"""Runs of others against what is predicted for them: docs/HOW_ACCURATE.md.

The folder runs/ has the facts of each run, one file a run. They were read from logs and notebooks
in public repositories, which each file names. They are numbers, versions, and names of keys and
values; no text of a log is among them.

Models that Detectron2 does not have need the public code of their projects: PROJECTS names it. Its
trees lie in one folder, named like their repositories; nothing is fetched. The code is today's, or
that of the run's day if it is the run's own repository. CAT-Seg and FC-CLIP need einops, ftfy, timm
and open_clip_torch 2.24; DFormer and MaskFormer need timm; detrex needs Detectron2's main branch.
"""

import argparse
import hashlib
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Optional

import yaml
from compatibility_checks.project import PROJECTS as COMPATIBLE
from compatibility_checks.project import Project, load
from pages import markdown_table

from d2_memfit.common.errors import one_line
from d2_memfit.explain import Help
from d2_memfit.explain.rebuild import card_of
from d2_memfit.explain.records import LoggedRun, Oom
from d2_memfit.explain.verdict import ExplainedRun, explain_run, predict_run
from d2_memfit.job import Job, load_lazy_config

from .common import in_own_processes, write_csv

FOLDER = Path(__file__).with_name("runs")

DOUBTS = {
    "batch not certain": "the images of a card are not known for sure",
    "config not certain": "the config file next to the log belongs to a later run, or has changed",
    "fork": "it ran in a fork of the public code; nothing shows that the fork differs",
    "kernel-wide peak": "max_mem never changes: an earlier cell of the notebook may have set it",
    "own code": "the model, its mapper or its trainer differs from the public code",
    "resumed": "the log begins in the middle",
    "shared card": "others held much of the card's memory when it ran out",
    "suspect": "the peak is not plausible for the config",
}

# With these, a run is not the one that is predicted.
_UNCERTAIN = {"batch not certain", "config not certain", "own code", "suspect"}

_DEEPLAB = "detectron2.projects.deeplab:add_deeplab_config"
_COMPILED = ("MultiScaleDeformableAttention",)
_DETREX = replace(COMPATIBLE["detrex DINO"], name="detrex", names_cuda=False)

# By repository and architecture of the run: the public code of its model.
PROJECTS = {
    ("AsrarH/detectron", "GeneralizedRCNN"): Project(
        "MoCo",
        "moco/detection",
        "https://github.com/facebookresearch/moco/tree/34020351",
        "configs/pascal_voc_R_50_C4_24k_moco.yaml",
    ),
    ("IDEA-Research/detrex", "DABDETR"): _DETREX,
    ("IDEA-Research/detrex", "DETR"): _DETREX,
    ("Project-X-UBC/ImageClassification.detectron2", "ClsNet"): Project(
        "ClsNet",
        "ImageClassification.detectron2",
        "https://github.com/Project-X-UBC/ImageClassification.detectron2/tree/ab212764",
        "configs/Base_image_cls.yaml",
        trainer="train_net_builtin:Trainer",
        add=("imgcls.config:get_cfg",),
        patches={  # its name since Detectron2 v0.3
            "detectron2.evaluation:CityscapesEvaluator": (
                "detectron2.evaluation:CityscapesInstanceEvaluator"
            )
        },
    ),
    ("HaowenGuan/NYU-Semi-Supervise-Object-Detection", "TwoStagePseudoLabGeneralizedRCNN"): Project(
        "Unbiased Teacher v2",
        "unbiased-teacher-v2",
        "https://github.com/facebookresearch/unbiased-teacher-v2",
        "configs/Faster-RCNN/coco-standard/faster_rcnn_R_50_FPN_ut2_sup10_run0.yaml",
        trainer="benchmarks.unbiased_teacher:Trainer",
        add=("ubteacher:add_ubteacher_config",),
    ),
    ("ViktorUngur002/OperatingOnCAT-Seg", "CATSeg"): Project(
        "CAT-Seg",
        "CAT-Seg",
        "https://github.com/cvlab-kaist/CAT-Seg",
        "configs/vitb_384.yaml",
        add=(_DEEPLAB, "cat_seg:add_cat_seg_config"),
        patches={"cat_seg.third_party.clip:load": "benchmarks.random_clip:load"},
    ),
    ("Yu-zhengbo/DiffRoad", "DFormer"): Project(
        "DFormer",
        "DFormer",
        "https://github.com/cp3wan/DFormer",
        "configs/ade20k/semantic-segmentation/swin/dformer_swin_base_384_bs16_160k_res640.yaml",
        add=(_DEEPLAB, "dformer:add_DFormer_config"),
        stubs=(*_COMPILED, "detectron2._C"),
    ),
    ("facebookresearch/MaskFormer", "MaskFormer"): COMPATIBLE["MaskFormer"],
    ("facebookresearch/detr", "Detr"): COMPATIBLE["DETR"],
    ("facebookresearch/unbiased-teacher", "TwoStagePseudoLabGeneralizedRCNN"): replace(
        COMPATIBLE["Unbiased Teacher"],
        trainer="benchmarks.unbiased_teacher:Trainer",
        opts={"MODEL.ROI_HEADS.LOSS": "CrossEntropy"},  # its focal loss needs Detectron2 v0.4
    ),
    ("yecy749/fc-clip-LandDiscover", "FCCLIP"): Project(
        "FC-CLIP",
        "fc-clip",
        "https://github.com/bytedance/fc-clip",
        "configs/coco/panoptic-segmentation/fcclip/fcclip_convnext_large_eval_ade20k.yaml",
        add=(_DEEPLAB, "fcclip:add_maskformer2_config", "fcclip:add_fcclip_config"),
        opts={"MODEL.FC_CLIP.CLIP_PRETRAINED_WEIGHTS": ""},  # nothing is downloaded
        stubs=(*_COMPILED, "detectron2._C"),
    ),
}


@dataclass(frozen=True)
class Run:
    """Facts of a run. None, or nothing, where its source does not say.

    Attributes:
        name: the file's name.
        repo, path, commit, blob, run_in_file: the source; the run is the run_in_file-th of its log.
        date: of the commit.
        architecture: name of the model's class.
        zoo_config: of the configs of Detectron2's zoo with this architecture, the one that differs
            in the fewest keys; None for models of other projects, and for LazyConfigs.
        config_file: name of the config file in its repository; of a LazyConfig, its path in the
            project's tree.
        settings: keys that differ from zoo_config and their values. Without one, those that differ
            from the defaults of Detectron2 and of the project; of a LazyConfig, from config_file.
            Keys that cannot change memory or time are left out, such as learning rates. Datasets
            that are not public are "own".
        gpus: names of the cards, each once.
        gpu_count: cards that the process saw; ``ranks`` of them trained.
        software: versions of torch, cuda, cudnn, driver, detectron2 and python.
        images, objects, classes: of the training set.
        augmentations: those that the log shows, if they are not what the config says.
        series: pairs of an iteration and max_mem in MiB: every rise, and the last.
        seconds, data_seconds: medians of an iteration, without the first tenth.
        ended: "finished", "running", "out of memory" or "error". "running": the log just ends.
        oom: numbers of an out-of-memory error, in MiB. ``held_by_others``: no, some or much.
        doubts: words of DOUBTS.
    """

    name: str
    repo: str
    path: str
    commit: str
    blob: str
    run_in_file: int
    date: str
    architecture: str
    zoo_config: Optional[str]
    config_file: Optional[str]
    settings: Mapping[str, Any]
    gpus: Sequence[str]
    gpu_count: Optional[int]
    ranks: int
    software: Mapping[str, str]
    images: Optional[int]
    objects: Optional[int]
    classes: Optional[int]
    series: Sequence[tuple[int, int]]
    seconds: Optional[float]
    data_seconds: Optional[float]
    start_iter: Optional[int]
    max_iter: Optional[int]
    ended: str
    doubts: Sequence[str]
    is_lazy: bool = False
    augmentations: Optional[Sequence[Mapping[str, Any]]] = None
    oom: Mapping[str, Any] = field(default_factory=dict)

    @property
    def project(self) -> Optional[Project]:
        """The public code of its model; None if Detectron2 has it."""
        return PROJECTS.get((self.repo, self.architecture))

    @property
    def is_fitted_to(self) -> bool:
        """Whether constants may be chosen on this run's repository.

        The other half of the repositories is only looked at. The rule is older than any constant.
        """
        return int(hashlib.sha256(self.repo.lower().encode()).hexdigest(), 16) % 2 == 0

    def logged(self) -> LoggedRun:
        """What a log with these facts says."""
        project = self.project
        settings = {**self.settings, **(project.opts if project and not self.is_lazy else {})}
        if self.series:  # the peak of what ran is compared
            settings["SOLVER.MAX_ITER"] = self.series[-1][0] + 1
        if "SOLVER.IMG_PER_BATCH_LABEL" in settings:  # each image is augmented in two ways
            names = ("SOLVER.IMG_PER_BATCH_LABEL", "SOLVER.IMG_PER_BATCH_UNLABEL")
            settings["SOLVER.IMS_PER_BATCH"] = 2 * sum(settings[name] for name in names)
        oom = {key: self.oom[key] for key in ("case", "iteration") if key in self.oom}
        for key in ("tried", "total", "free", "allocated", "reserved"):
            oom[f"{key}_mib"] = self.oom.get(key)
        return LoggedRun(
            gpus=list(self.gpus),
            torch=self.software.get("torch", ""),
            ranks=self.ranks,
            config_file=self.config_file or "",
            config_text="" if self.zoo_config else yaml.safe_dump(settings),
            zoo_config=self.zoo_config or "",
            overrides=settings if self.zoo_config else {},
            augmentations=_printed(self.augmentations),
            images=self.images,
            objects=self.objects,
            start_iter=self.start_iter,
            max_iter=self.max_iter,
            iteration=self.series[-1][0] if self.series else None,
            seconds=[] if self.seconds is None else [self.seconds],
            peak_mib=self.peak_mib,
            oom=Oom(**oom) if self.oom else None,
            error="not among the facts" if self.ended == "error" else "",
            is_finished=self.ended == "finished",
            notes=[DOUBTS[word] for word in self.doubts],
        )

    @property
    def peak_mib(self) -> Optional[int]:
        return max((peak for _, peak in self.series), default=None)


def runs() -> list[Run]:
    """All runs, by name."""
    files = sorted(FOLDER.glob("*.json"))
    return [Run(name=file.stem, **json.loads(file.read_text())) for file in files]


def _printed(augmentations: Optional[Sequence[Mapping[str, Any]]]) -> str:
    """Augmentations as Detectron2 prints them; "" without any."""
    calls = [
        f"{name}({', '.join(f'{k}={_tuple(v)!r}' for k, v in arguments.items())})"
        for augmentation in augmentations or ()
        for name, arguments in augmentation.items()
    ]
    return f"[{', '.join(calls)}]" if calls else ""


def _tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def prepared(run: Run, folder: Path) -> tuple[list[Callable[..., Any]], Any]:
    """Make the public code of a run's model importable.

    It changes this process: a run of another project needs another one.

    Args:
        folder: folder of the projects' trees.

    Returns:
        (add_keys, trainer): the functions that add the project's keys, and the class that trains.
        There are none for LazyConfigs, and for runs that need no project.
    """
    project = run.project
    if project is None:
        return [], None
    project.prepare(folder / project.tree)
    if run.is_lazy:
        return [], None
    return [load(name) for name in project.add], load(project.trainer)


def lazy_job(run: Run, ranks: int) -> Job:
    """The job of a LazyConfig, in its project's tree."""
    options = [f"{key}={json.dumps(value)}" for key, value in run.settings.items()]
    return Job.from_lazy(load_lazy_config(str(run.config_file), options), ranks)


@dataclass(frozen=True)
class Result:
    """A run, and what `explain` found of it.

    Attributes:
        would_fit: whether its card has the typical memory; None without a card or a prediction.
        has_any_shape: whether nothing tells the shape of its photographs.
    """

    run: Run
    found: ExplainedRun
    would_fit: Optional[bool] = None
    has_any_shape: bool = False

    @property
    def is_rebuilt(self) -> bool:
        return self.found.range_mib is not None

    @property
    def is_measured(self) -> bool:
        """Whether its peak counts: what it is, and what ran, are certain, and it did not die."""
        is_certain = not _UNCERTAIN & {*self.run.doubts}
        return self.is_rebuilt and is_certain and self.found.inside is not None

    @property
    def has_own_card(self) -> bool:
        """Whether nobody else used its card, and its config is certain."""
        doubts = {*_UNCERTAIN, "shared card"}
        return self.would_fit is not None and not doubts & {*self.run.doubts}

    @property
    def width(self) -> float:
        low, high = self.found.range_mib or (1.0, 1.0)
        return high / low

    def cells(self) -> list[str]:
        run, found = self.run, self.found
        half = "fitted to" if run.is_fitted_to else "only looked at"
        release = (run.software.get("torch") or "?").partition("+")[0]
        cells = [
            run.name,
            run.zoo_config or run.architecture,
            ", ".join(run.gpus) or "?",
            f"{release}, {run.software.get('cudnn') or '?'}",
            _number(found.images_per_gpu),
            _number(found.measured_mib),
        ]
        if found.range_mib is None:
            return [*cells, "", "", "", "", found.ended, "", ", ".join(run.doubts), half]
        low, high = found.range_mib
        inside = {True: "yes", False: "no", None: "died before"}[found.inside]
        return [
            *cells,
            _number(found.typical_mib),
            f"{low:.0f} to {high:.0f}",
            f"{self.width:.2f}",
            inside if found.measured_mib is not None else "",
            found.ended,
            {True: "yes", False: "no", None: ""}[self.would_fit],
            ", ".join(run.doubts),
            half,
        ]

    @property
    def why_not(self) -> str:
        """Why nothing is predicted, without a path of this machine."""
        return re.sub(r"'/\S*/([^/]+)'", r"\1", self.found.not_rebuilt)


def _number(value: Optional[float]) -> str:
    return "" if value is None else f"{value:.0f}"


def explain_runs(chosen: Sequence[Run], folder: Optional[Path]) -> list[Result]:
    """Explain runs of one project, in this process."""
    first = chosen[0]
    help = Help()
    if folder is not None and first.project is not None:
        try:
            help = Help(*prepared(first, folder))
        except Exception as e:  # of a project's code, or of a package that it needs
            why = one_line(e)
            return [Result(r, explain_run(r.name, r.logged(), None, why)) for r in chosen]
    results = []
    for run in chosen:
        if run.is_lazy:  # each has a config of its own
            help = Help(lazy_job=partial(lazy_job, run) if folder else None)
        prediction, why_not = predict_run(run.logged(), help)
        found = explain_run(run.name, run.logged(), prediction, why_not)
        if prediction is None:
            results.append(Result(run, found))
            continue
        _, gigabytes = card_of(run.logged())
        total = run.oom.get("total") or (None if gigabytes is None else gigabytes * 1024)
        outside = sum(prediction.dry_job.device.outside_bytes(run.ranks).values()) / 2**20
        fits = None if total is None else (found.typical_mib or 0) + outside <= total
        any_shape = any("shape of the images" in line for line in prediction.estimate.wider)
        results.append(Result(run, found, fits, any_shape))
    return results


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", default="", help="runs whose name contains this text")
    parser.add_argument("--projects", type=Path, help="a folder with trees of the projects")
    parser.add_argument("--csv", type=Path, help="write a row for each run into this file")


def run(args: argparse.Namespace) -> None:
    results: list[Result] = []
    of_project: dict[tuple[str, str], list[Run]] = {}
    for one in runs():
        if args.only in one.name:
            of_project.setdefault((one.repo, one.architecture), []).append(one)
    explain = partial(explain_runs, folder=args.projects)
    for of_one in in_own_processes(explain, of_project.values()):
        results += of_one
        lines = ["; ".join([*r.cells(), r.why_not]) for r in of_one]
        print(*lines, sep="\n", file=sys.stderr, flush=True)
    print(tables(results))
    if args.csv is not None:
        write_csv(args.csv, _ROWS, [[*r.cells(), r.why_not] for r in results])


_ROWS = ["run", "config", "card", "PyTorch, cuDNN", "images", "measured MiB", "typical", "range"]
_ROWS += ["width", "inside", "ended", "would fit", "doubts", "half", "not predicted because"]


def tables(results: Sequence[Result]) -> str:
    """Summaries: docs/HOW_ACCURATE.md. Its rows are in docs/accuracy_runs.csv."""
    looked_at = [r for r in results if not r.run.is_fitted_to]
    fitted_to = [r for r in results if r.run.is_fitted_to]
    parts = [
        _coverage([("only looked at", looked_at), ("fitted to", fitted_to)]),
        "### Fits or not\n\n"
        + _verdicts([("only looked at", looked_at), ("fitted to", fitted_to)]),
    ]
    return "\n\n".join(parts)


def _coverage(halves: Sequence[tuple[str, Sequence[Result]]]) -> str:
    rows = []
    for name, results in halves:
        measured = [r for r in results if r.is_measured]
        for shape in (True, False):
            of_shape = [r for r in measured if r.has_any_shape == shape]
            rows.append([name, "not known" if shape else "fixed or known", *_inside(of_shape)])
        rows.append([name, "all", *_inside(measured)])
    header = ["repositories", "shape of photographs", "inside", "median width", "above by over 5%"]
    return markdown_table([*header, "repositories with one outside"], rows)


def _inside(results: Sequence[Result]) -> list[str]:
    if not results:
        return ["0 of 0", "", "", ""]
    inside = sum(bool(r.found.inside) for r in results)
    above = sum(
        (r.found.measured_mib or 0) > 1.05 * (r.found.range_mib or (0, 0))[1] for r in results
    )
    all_of = {r.run.repo for r in results}
    outside = {r.run.repo for r in results if not r.found.inside}
    return [
        f"{inside} of {len(results)} ({inside / len(results):.0%})",
        f"{median(r.width for r in results):.2f}",
        str(above),
        f"{len(outside)} of {len(all_of)}",
    ]


def _verdicts(halves: Sequence[tuple[str, Sequence[Result]]]) -> str:
    """Whether the planner alone would have said that runs fit their cards."""
    rows = []
    for name, results in halves:
        own = [r for r in results if r.has_own_card]
        died = [r for r in own if r.found.oom is not None and r.found.oom.case != "evaluation"]
        trained = [r for r in own if r.found.oom is None]
        for what, of, is_right in (
            ("died on a card of their own", died, lambda r: not r.would_fit),
            ("trained", trained, lambda r: r.would_fit),
        ):
            right = sum(map(is_right, of))
            rows.append([name, what, f"{right} of {len(of)}"])
    return markdown_table(["repositories", "runs that", "said so"], rows)
