# Copyright (c) the d2_memfit developers.
"""The configs of d2_memfit, found as Detectron2's model zoo finds its own."""

from .model_zoo import get_config, get_config_file, list_configs

__all__ = ["get_config", "get_config_file", "list_configs"]
