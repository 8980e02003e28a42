# Copyright (c) the d2_memfit developers.
"""The public projects of projects.yaml, and their jobs at a size for a CPU."""

import importlib
import json
import os
import pkgutil
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Optional

import yaml
from detectron2.config import CfgNode, LazyConfig

from d2_memfit import Job
from d2_memfit.planner.stand_ins import cuda_as_cpu

from .dataset import register_dataset
from .stubs import install_stubs

__all__ = ["PROJECTS", "Project", "load", "made"]

_DATASET = "compatibility_train"
_OPEN = ExitStack()

# What a run on the CPU needs, and checks that repeat it.
_ALWAYS: dict[str, Any] = {
    "MODEL.DEVICE": "cpu",
    "MODEL.WEIGHTS": "",
    "DATASETS.TRAIN": (_DATASET,),
    "DATASETS.TEST": (),
    "DATALOADER.NUM_WORKERS": 1,
    "SOLVER.MAX_ITER": 2,
    "SOLVER.REFERENCE_WORLD_SIZE": 0,
    "SOLVER.STEPS": (),
    "SOLVER.BASE_LR": 1e-4,
    "SOLVER.WARMUP_ITERS": 0,
    "SOLVER.AMP.ENABLED": False,
    "SOLVER.CHECKPOINT_PERIOD": 1000,
    "TEST.EVAL_PERIOD": 0,
    "VIS_PERIOD": 0,
    "SEED": 1,
}
_SMALL: dict[str, Any] = {
    "SOLVER.IMS_PER_BATCH": 2,
    "INPUT.MIN_SIZE_TRAIN": (128,),
    "INPUT.MAX_SIZE_TRAIN": 160,
    "INPUT.MIN_SIZE_TEST": 128,
    "INPUT.MAX_SIZE_TEST": 160,
}
_LAZY_ALWAYS: dict[str, Any] = {
    "train.device": "cpu",
    "train.init_checkpoint": "",
    "dataloader.train.num_workers": 1,
    "dataloader.train.dataset.names": _DATASET,
    "dataloader.test.dataset.names": _DATASET,
}


@dataclass(frozen=True)
class Project:
    """What the checks need to know about a project.

    Attributes:
        name: name in the table.
        tree: a folder within ``--projects``, as in the project's repository.
        url: URL of its repository.
        config_file: config file in the tree.
        trainer: MODULE:CLASS; for a project with its own loop, a class with the code before it.
        kind: "trainer", "loop" or "lazy": a trainer class, its own loop, LazyConfigs.
        paths: folders in the tree from which Python imports.
        add: MODULE:FUNCTION names that add the project's keys to a config, in order.
        get_cfg: MODULE:FUNCTION that makes the config without a file.
        opts: keys that it needs here, and their values.
        small: keys that make the job small, and their values.
        data: kind of the dataset, see ``dataset.register_dataset``.
        stubs: modules that the project imports and that the small job does not use.
        patches: MODULE:ATTRIBUTE and a text, or MODULE:NAME of its value, for packages newer than
            the project.
        names_cuda: whether its code names CUDA, which must be the CPU then.
        needs_main: whether it needs a Detectron2 newer than v0.6.
        has_plain_step: whether a step is ``model(batch)``, backward, ``optimizer.step()``.
        memfit_trainer: replaces ``class Trainer(MemfitMixin, TheirTrainer)``.
    """

    name: str
    tree: str
    url: str
    config_file: str
    trainer: str = "train_net:Trainer"
    kind: str = "trainer"
    paths: tuple[str, ...] = (".",)
    add: tuple[str, ...] = ()
    get_cfg: str = "detectron2.config:get_cfg"
    opts: Mapping[str, Any] = field(default_factory=dict)
    small: Mapping[str, Any] = field(default_factory=dict)
    data: str = "instances"
    stubs: tuple[str, ...] = ()
    patches: Mapping[str, str] = field(default_factory=dict)
    names_cuda: bool = False
    needs_main: bool = False
    has_plain_step: bool = True
    memfit_trainer: str = ""

    def prepare(self, tree: Path) -> None:
        """Make the project's modules importable, and its tree the current folder."""
        os.chdir(tree)
        for path in reversed(self.paths):
            sys.path.insert(0, str((tree / path).resolve()))
        install_stubs(self.stubs)
        for name, value in self.patches.items():
            owner, _, attribute = name.replace(":", ".").rpartition(".")
            setattr(pkgutil.resolve_name(owner), attribute, load(value))
        if self.names_cuda:
            _OPEN.enter_context(cuda_as_cpu())

    def trainer_class(self) -> Optional[type]:
        """The class that trains; None for loops and LazyConfigs."""
        if self.kind != "trainer":
            return None
        return load(self.memfit_trainer)() if self.memfit_trainer else load(self.trainer)

    def job(self, tree: Path, ranks: int = 1, full_size: bool = False) -> Job:
        """Make the job as d2_memfit sees it.

        Args:
            full_size: whether it is the project's own recipe, on photographs like COCO's.
        """
        batch = {"image_size": (480, 640)} if full_size else {}
        if self.kind == "lazy":
            return Job.from_lazy(self._lazy_config(tree, full_size), ranks, **batch)
        kind = self.trainer_class() or load(self.trainer)
        return Job.from_trainer(kind, self._cfg(tree, full_size), ranks, **batch)

    def _cfg(self, tree: Path, full_size: bool) -> CfgNode:
        cfg = load(self.get_cfg)()
        for add in self.add:
            load(add)(cfg)
        cfg.merge_from_file(str(tree / self.config_file))
        if min(cfg.MODEL.PIXEL_STD) == 1:  # random weights would overflow
            cfg.MODEL.PIXEL_STD = [300.0] * 3
        small = {} if full_size else {**_SMALL, **self.small}
        for key, value in {**_ALWAYS, **self.opts, **small}.items():
            cfg.merge_from_list([key, value])
        return cfg

    def _lazy_config(self, tree: Path, full_size: bool) -> Any:
        cfg = LazyConfig.load(str(tree / self.config_file))
        small = {} if full_size else {"dataloader.train.total_batch_size": 2, **self.small}
        settings = {**_LAZY_ALWAYS, **self.opts, **small}
        overrides = [f"{key}={json.dumps(value)}" for key, value in settings.items()]
        return LazyConfig.apply_overrides(cfg, overrides)


def load(name: str) -> Any:
    """Import the object that MODULE:NAME names; a text without a colon stays as it is."""
    module, colon, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute) if colon else name


_PROJECTS = yaml.safe_load(Path(__file__).with_name("projects.yaml").read_text())
PROJECTS = {name: Project(name, **fields) for name, fields in _PROJECTS.items()}


def made(name: str, folder: Path, scratch: Path, ranks: int) -> tuple[Job, Optional[type]]:
    """Make the small job of a project of the table, and its trainer's class, in any process.

    Args:
        folder: folder of all trees.
        scratch: folder for the dataset.
    """
    project = PROJECTS[name]
    project.prepare(folder / project.tree)
    register_dataset(_DATASET, project.data, scratch / f"dataset_{os.getpid()}")
    return project.job(folder / project.tree, ranks), project.trainer_class()
