# Copyright (c) the d2_memfit developers.
"""Models of the transformers library, built from a config of this project."""

import json
import logging
import re
from pathlib import Path
from typing import Any

from detectron2.config import CfgNode
from torch import nn

from d2_memfit.common.checks import did_you_mean
from d2_memfit.errors import ConfigError, one_line

from .families import FAMILIES

__all__ = ["build_transformers_model", "load_pretrained"]

logger = logging.getLogger("d2_memfit.transformers")

_OF_BACKBONE = re.compile(r"(^|\.)(backbone|embeddings|pixel_level_module\.encoder)\.")
_OF_CLASSES = ("id2label", "label2id", "architectures", "transformers_version")


def build_transformers_model(cfg: CfgNode) -> nn.Module:
    """Build the model of TRANSFORMERS.TYPE and SIZE, with random weights.

    Raises:
        ConfigError: transformers is not installed, or there is no such size, file or option.
    """
    keys, family = cfg.TRANSFORMERS, FAMILIES[cfg.TRANSFORMERS.TYPE]
    name = family.mask_class if cfg.MODEL.MASK_ON else family.box_class
    model_class = getattr(_import_transformers(), str(name))
    config_class = model_class.config_class
    options = {**_size(keys.TYPE, keys.SIZE), **dict(keys.OPTIONS)}
    if keys.NUM_QUERIES:
        options["num_queries"] = keys.NUM_QUERIES
    options["num_labels"] = cfg.MODEL.ROI_HEADS.NUM_CLASSES
    for name in options.keys() - {*dir(config_class()), "model_type"}:
        raise ConfigError(
            f"TRANSFORMERS.OPTIONS: {config_class.__name__} has no {name}"
            f"{did_you_mean(name, dir(config_class()))}"
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


def _size(kind: str, size: str) -> dict[str, Any]:
    """Options of a size: of the table, or of a config.json of transformers."""
    sizes = FAMILIES[kind].sizes
    if size in sizes:
        return dict(sizes[size])
    file = Path(size) / "config.json" if Path(size).is_dir() else Path(size)
    try:
        options = json.loads(file.read_text())
        found = options.get("model_type")
    except (OSError, ValueError, AttributeError) as e:
        raise ConfigError(
            f"TRANSFORMERS.SIZE must be {', '.join(sizes)}, or a config.json of transformers, got "
            f"{size!r} ({one_line(e)})"
        ) from e
    if found != kind:
        raise ConfigError(f"TRANSFORMERS.SIZE {size} is a {found}, and TRANSFORMERS.TYPE is {kind}")
    return {name: value for name, value in options.items() if name not in _OF_CLASSES}


def load_pretrained(model: nn.Module, weights: str) -> None:
    """Copy weights of a folder, or of a name on huggingface.co, into a transformers model.

    Parameters that the weights lack, or that have another shape, such as the classes, do not
    change, and are logged. A segmentation model also takes the weights of its detector.

    Raises:
        ConfigError: there are no such weights, they belong to another model, or they would leave
            layers of the backbone random.
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
            f"nor could it be fetched from huggingface.co ({one_line(e)}). Without a network, "
            "fetch it elsewhere with `hf download`, and name the folder"
        ) from e
    if source.model_type != target.config.model_type:
        raise ConfigError(
            f"TRANSFORMERS.WEIGHTS {weights!r} is a {source.model_type}, and TRANSFORMERS.TYPE is "
            f"{target.config.model_type}"
        )
    fresh = {key: "is not among the weights" for key in info["missing_keys"]}
    for key, *shapes in info["mismatched_keys"]:
        there, here = ("x".join(map(str, shape)) for shape in shapes)
        fresh[key] = f"is {there} in the weights, and {here} in the model"
    trained = [name for name, _ in target.named_parameters() if name in fresh]
    lost = [n for n in trained if _OF_BACKBONE.search(n) and not n.endswith(".mask_token")]
    if lost:
        examples = "; ".join(f"{name} {fresh[name]}" for name in lost[:2])
        raise ConfigError(
            f"TRANSFORMERS.WEIGHTS {weights!r} would leave {len(lost)} layers of the backbone "
            f"random, with which the others are of no use: {examples}. Set TRANSFORMERS.SIZE to "
            f"{_size_of(source)}"
        )
    target.load_state_dict(loaded.state_dict())
    num = len(target.state_dict())
    text = "Weights of %s are loaded. %d of %d tensors are not among them, and stay random: %s"
    logger.info(text, weights, len(fresh), num, ", ".join(sorted(fresh)[:8]) or "none")


def _size_of(source: Any) -> str:
    """Name of the size of a transformers config."""
    values, sizes = source.to_dict(), FAMILIES[source.model_type].sizes
    found = (f"{name}, the size of these weights" for name in sizes if _has(values, sizes[name]))
    return next(found, "the config.json of these weights")


def _has(values: Any, expected: Any) -> bool:
    if isinstance(expected, dict):
        return all(_has(values.get(name), value) for name, value in expected.items())
    return bool(values == expected)
