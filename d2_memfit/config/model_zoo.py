# Copyright (c) the d2_memfit developers.
"""Configs by name, from the installed package or from a checkout."""

from detectron2.config import CfgNode

from ..common.checks import did_you_mean
from ..common.errors import ConfigError
from .files import OUR_ZOO
from .load import load_cfg

__all__ = ["get_config", "get_config_file", "list_configs"]


def list_configs() -> list[str]:
    """Names of all configs, such as "COCO-Detection/faster_rcnn_R_50_FPN_1x_1gpu.yaml"."""
    files = sorted(OUR_ZOO.glob("*/**/*.yaml"))
    # Bases are parts of others.
    return [f.relative_to(OUR_ZOO).as_posix() for f in files if not f.name.startswith("Base-")]


def get_config_file(config_path: str) -> str:
    """Path of a config file.

    Args:
        config_path: one of :func:`list_configs`.

    Raises:
        ConfigError: there is none of this name.
    """
    if config_path not in list_configs():
        raise ConfigError(
            f"no config {config_path!r} in d2_memfit{did_you_mean(config_path, list_configs())}"
        )
    return str(OUR_ZOO / config_path)


def get_config(config_path: str) -> CfgNode:
    """The config of this name, complete with Detectron2's defaults."""
    return load_cfg(get_config_file(config_path))
