# Copyright (c) the d2_memfit developers.
"""Configs by name, from the installed package or from a checkout."""

from detectron2.config import CfgNode

from .files import OUR_ZOO
from .files import find_config_file as get_config_file
from .load import load_cfg

__all__ = ["get_config", "get_config_file", "list_configs"]


def list_configs() -> list[str]:
    """Names of all configs, such as "COCO-Detection/faster_rcnn_R_50_FPN_1x_1gpu.yaml"."""
    files = sorted(OUR_ZOO.glob("*/**/*.yaml"))
    # Bases are parts of others.
    return [f.relative_to(OUR_ZOO).as_posix() for f in files if not f.name.startswith("Base-")]


def get_config(config_path: str) -> CfgNode:
    """The config of a name, complete with Detectron2's defaults."""
    return load_cfg(get_config_file(config_path))
