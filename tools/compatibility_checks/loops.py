# Copyright (c) the d2_memfit developers.
"""The code before the loop in the scripts of projects with their own loop.

Each class has the methods of ``DefaultTrainer`` that differ in the project. A user of the project
writes it in the project's script, and gives it to ``Job.from_trainer``.
"""

from typing import Any

import torch
from detectron2.config import CfgNode, LazyConfig
from detectron2.data import DatasetMapper, build_detection_test_loader, build_detection_train_loader
from detectron2.utils import comm

from .project import load

__all__ = ["d2go", "d2go_cfg", "detic", "detrex_config"]


class detic:
    """Detic's ``train_net.py``."""

    @classmethod
    def build_optimizer(cls, cfg: CfgNode, model: torch.nn.Module) -> torch.optim.Optimizer:
        return load("detic.custom_solver:build_custom_optimizer")(cfg, model)

    @classmethod
    def build_train_loader(cls, cfg: CfgNode) -> Any:
        return cls._loader(build_detection_train_loader, cfg, is_train=True)

    @classmethod
    def build_test_loader(cls, cfg: CfgNode, name: str) -> Any:
        return cls._loader(build_detection_test_loader, cfg, name, is_train=False)

    @classmethod
    def _loader(cls, build: Any, *args: Any, is_train: bool) -> Any:
        cfg = args[0]
        build_augmentation = load("detic.data.custom_build_augmentation:build_custom_augmentation")
        augmentations = build_augmentation(cfg, is_train)
        return build(*args, mapper=DatasetMapper(cfg, is_train, augmentations=augmentations))


class d2go:
    """d2go's ``GeneralizedRCNNRunner``."""

    @classmethod
    def runner(cls) -> Any:
        class Runner(load("d2go.runner:GeneralizedRCNNRunner")):  # type: ignore[misc]
            @staticmethod
            def get_data_loader_vis_wrapper() -> None:
                """Leave the training loader unwrapped, so that its order can be resumed."""

        # d2go's own launcher sets both.
        load("mobile_cv.torch.utils_pytorch:comm")._LOCAL_PROCESS_GROUP = comm._LOCAL_PROCESS_GROUP
        return Runner()

    @classmethod
    def build_model(cls, cfg: CfgNode) -> torch.nn.Module:
        return cls.runner().build_model(cfg)

    @classmethod
    def build_optimizer(cls, cfg: CfgNode, model: torch.nn.Module) -> torch.optim.Optimizer:
        return cls.runner().build_optimizer(cfg, model)

    @classmethod
    def build_lr_scheduler(cls, cfg: CfgNode, optimizer: torch.optim.Optimizer) -> Any:
        return cls.runner().build_lr_scheduler(cfg, optimizer)

    @classmethod
    def build_train_loader(cls, cfg: CfgNode) -> Any:
        return cls.runner().build_detection_train_loader(cfg)

    @classmethod
    def build_test_loader(cls, cfg: CfgNode, name: str) -> Any:
        return cls.runner().build_detection_test_loader(cfg, name)


def d2go_cfg() -> CfgNode:
    """The config of d2go without a file."""
    return load("d2go.runner:GeneralizedRCNNRunner").get_default_cfg()


def detrex_config(path: str) -> Any:
    """A config of detrex's ``configs/``; its setup.py links that folder into the package."""
    return LazyConfig.load(f"configs/{path}")
