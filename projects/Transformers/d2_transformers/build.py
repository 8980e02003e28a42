# Copyright (c) the d2_memfit developers.
"""Models of the transformers library, built from a config of this project."""

import json
import logging
from pathlib import Path
from typing import Any

from detectron2.config import CfgNode
from torch import nn

from d2_memfit.common.checks import did_you_mean
from d2_memfit.errors import ConfigError

from .families import FAMILIES

__all__ = ["build_transformers_model", "load_pretrained"]

logger = logging.getLogger("d2_memfit.transformers")


def build_transformers_model(cfg: CfgNode) -> nn.Module:
    """Build the model of TRANSFORMERS.TYPE and SIZE, with random weights.

    Raises:
        ConfigError: transformers is not installed, or there is no such size, file or option.
    """
    transformers = _import_transformers()
    family = FAMILIES[cfg.TRANSFORMERS.TYPE]
    name = family.mask_class if cfg.MODEL.MASK_ON else family.box_class
    model_class = getattr(transformers, str(name))
    options = _options(cfg)
    config_class = model_class.config_class
    unknown = sorted(set(options) - set(dir(config_class())) - {"model_type"})
    if unknown:
        raise ConfigError(
            f"TRANSFORMERS.OPTIONS: {config_class.__name__} has no {unknown[0]}"
            f"{did_you_mean(unknown[0], dir(config_class()))}"
        )
    try:
        return model_class(config_class(**options))
    except (TypeError, ValueError) as e:  # raised by its checks
        raise ConfigError(f"TRANSFORMERS: {config_class.__name__} refuses its values ({e})") from e


def _import_transformers() -> Any:
    try:
        import transformers
    except ImportError as e:
        raise ConfigError(
            f"projects/Transformers needs the transformers library ({e}): "
            "pip install 'd2_memfit[transformers]'"
        ) from e
    return transformers


def _options(cfg: CfgNode) -> dict[str, Any]:
    """Options for the transformers config."""
    keys = cfg.TRANSFORMERS
    options = dict(_size(keys.TYPE, keys.SIZE))
    if keys.RESOLUTION and keys.TYPE == "eomt":  # its position embeddings are not interpolated
        options["image_size"] = keys.RESOLUTION
    if keys.NUM_QUERIES:
        options["num_queries"] = keys.NUM_QUERIES
    options.update((name, value) for name, value in keys.OPTIONS)
    options["num_labels"] = cfg.MODEL.ROI_HEADS.NUM_CLASSES
    return options


def _size(kind: str, size: str) -> dict[str, Any]:
    sizes = FAMILIES[kind].sizes
    if size in sizes:
        return dict(sizes[size])
    file = Path(size) / "config.json" if Path(size).is_dir() else Path(size)
    if not file.is_file():
        raise ConfigError(
            f"TRANSFORMERS.SIZE must be {', '.join(sizes)}, or a config.json of transformers, got "
            f"{size!r}"
        )
    try:
        options = json.loads(file.read_text())
        found = options.get("model_type")
    except (ValueError, AttributeError) as e:
        raise ConfigError(f"TRANSFORMERS.SIZE {size}: {file} is not a config ({e})") from e
    if found != kind:
        raise ConfigError(f"TRANSFORMERS.SIZE {size} is a {found}, and TRANSFORMERS.TYPE is {kind}")
    names_of_classes = ("id2label", "label2id", "architectures", "transformers_version")
    return {name: value for name, value in options.items() if name not in names_of_classes}


def load_pretrained(model: nn.Module, weights: str) -> None:
    """Copy weights of a folder, or of a name on huggingface.co, into a transformers model.

    Parameters that the weights lack, or that have another shape, such as the classes, do not
    change, and are logged. A segmentation model also takes the weights of its detector.

    Raises:
        ConfigError: there are no such weights, or they belong to another model.
    """
    target: Any = model
    try:
        source = _import_transformers().AutoConfig.from_pretrained(weights)
        part = getattr(model, "model", None)
        if part is not None and type(part).__name__ in (source.architectures or ()):
            target = part  # of RfDetrForInstanceSegmentation, RfDetrForObjectDetection
        loaded, info = type(target).from_pretrained(
            weights, config=target.config, ignore_mismatched_sizes=True, output_loading_info=True
        )
    except (OSError, ValueError, RuntimeError) as e:
        raise ConfigError(
            f"TRANSFORMERS.WEIGHTS {weights!r} is neither a folder with a model of transformers, "
            f"nor could it be fetched from huggingface.co ({_first_line(e)}). Without a network, "
            "fetch it elsewhere with `hf download`, and name the folder"
        ) from e
    if source.model_type != target.config.model_type:
        raise ConfigError(
            f"TRANSFORMERS.WEIGHTS {weights!r} is a {source.model_type}, and TRANSFORMERS.TYPE is "
            f"{target.config.model_type}"
        )
    target.load_state_dict(loaded.state_dict())
    fresh = sorted({*info["missing_keys"], *(key for key, *_ in info["mismatched_keys"])})
    logger.info(
        "Weights of %s are loaded. %d of %d tensors are not among them, and stay random: %s",
        weights,
        len(fresh),
        len(target.state_dict()),
        ", ".join(fresh[:8]) + (", ..." if len(fresh) > 8 else "") or "none",
    )


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
