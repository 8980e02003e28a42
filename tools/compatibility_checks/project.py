"""A public project: where its code is, and how its job becomes small enough for a CPU."""

import importlib
import os
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from detectron2.config import CfgNode

from d2_memfit.planner.cuda_as_cpu import cuda_as_cpu

from .stubs import install_stubs

__all__ = ["DATASET", "Project", "load"]

DATASET = "compatibility_train"
_OPEN = ExitStack()

# What a run on the CPU needs, and checks that repeat it.
_ALWAYS = {
    "MODEL.DEVICE": "cpu",
    "MODEL.WEIGHTS": "",
    "DATASETS.TRAIN": (DATASET,),
    "DATASETS.TEST": (),
    "DATALOADER.NUM_WORKERS": 0,
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
_SMALL = {
    "SOLVER.IMS_PER_BATCH": 2,
    "INPUT.MIN_SIZE_TRAIN": (128,),
    "INPUT.MAX_SIZE_TRAIN": 160,
    "INPUT.MIN_SIZE_TEST": 128,
    "INPUT.MAX_SIZE_TEST": 160,
}


@dataclass(frozen=True)
class Project:
    """What the checks need to know.

    Attributes:
        name: in the table.
        tree: a folder within ``--projects``, as the project's repository has it.
        url: of its repository.
        config_file: in the tree.
        trainer: MODULE:CLASS; that of a loop of its own is in ``loops``.
        kind: "trainer", "loop" or "lazy": a trainer class, a loop of its own, LazyConfigs.
        paths: folders in the tree from which Python imports.
        add: MODULE:FUNCTION that add the project's keys to a config, in turn.
        get_cfg: MODULE:FUNCTION of the config without a file.
        opts: keys and values that it needs here; overrides of a LazyConfig.
        small: those that make the job small.
        data: kind of the dataset, see ``dataset.KINDS``.
        stubs: modules that the project imports and that the small job does not use.
        patches: MODULE:ATTRIBUTE and its value, for packages newer than the project.
        names_cuda: whether its code names CUDA, which must be the CPU then.
        needs_main: whether it needs a Detectron2 newer than v0.6.
        images: of a batch.
        least_images: with which a forward works: BatchNorm needs two values.
        image_keys: of the config, that say how many images a batch has.
        has_plain_step: whether a step is ``model(batch)``, backward, ``optimizer.step()``.
        memfit_trainer: in place of ``class Trainer(MemfitMixin, TheirTrainer)``.
        lines: what a user writes to use d2_memfit there, as Markdown.
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
    opts: tuple[Any, ...] = ()
    small: tuple[Any, ...] = ()
    data: str = "instances"
    stubs: tuple[str, ...] = ()
    patches: tuple[tuple[str, Any], ...] = ()
    names_cuda: bool = False
    needs_main: bool = False
    images: int = 2
    least_images: int = 1
    image_keys: tuple[str, ...] = ("SOLVER.IMS_PER_BATCH",)
    has_plain_step: bool = True
    memfit_trainer: str = ""
    lines: str = ""

    def prepare(self, tree: Path) -> None:
        """Make the project's modules importable, and its tree the current folder."""
        os.chdir(tree)
        for path in reversed(self.paths):
            sys.path.insert(0, str((tree / path).resolve()))
        install_stubs(self.stubs)
        for name, value in self.patches:
            module, _, attribute = name.partition(":")
            setattr(importlib.import_module(module), attribute, value)
        if self.names_cuda:
            _OPEN.enter_context(cuda_as_cpu())

    def make_cfg(self, tree: Path, output_dir: Path, full_size: bool = False) -> CfgNode:
        cfg = load(self.get_cfg)()
        for add in self.add:
            load(add)(cfg)
        cfg.merge_from_file(str(tree / self.config_file))
        if min(cfg.MODEL.PIXEL_STD) == 1:  # random weights would overflow
            cfg.MODEL.PIXEL_STD = [300.0] * 3
        small = {} if full_size else _SMALL
        for key, value in {**_ALWAYS, **small}.items():
            cfg.merge_from_list([key, value])
        cfg.merge_from_list([*self.opts, *(() if full_size else self.small)])
        cfg.OUTPUT_DIR = str(output_dir)
        return cfg


def load(name: str) -> Any:
    """What MODULE:NAME says."""
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)
