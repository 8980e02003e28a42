# Copyright (c) the d2_memfit developers.
"""Models of the transformers library, built from a config of this project."""

import json
import logging
import re
from pathlib import Path
from typing import Any, Optional

from detectron2.config import CfgNode
from torch import nn

from d2_memfit.common.checks import did_you_mean
from d2_memfit.errors import ConfigError

from .families import FAMILIES

__all__ = ["build_transformers_model", "load_pretrained"]

logger = logging.getLogger("d2_memfit.transformers")

_OF_BACKBONE = re.compile(r"(^|\.)(backbone|embeddings|pixel_level_module\.encoder)\.")


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
            f"nor could it be fetched from huggingface.co ({_first_line(e)}). Without a network, "
            "fetch it elsewhere with `hf download`, and name the folder"
        ) from e
    if source.model_type != target.config.model_type:
        raise ConfigError(
            f"TRANSFORMERS.WEIGHTS {weights!r} is a {source.model_type}, and TRANSFORMERS.TYPE is "
            f"{target.config.model_type}"
        )
    problems = {key: "is not among the weights" for key in info["missing_keys"]}
    for key, there, here in info["mismatched_keys"]:
        problems[key] = f"is {_shape(there)} in the weights, and {_shape(here)} in the model"
    _check_backbone(target, weights, source, problems)
    target.load_state_dict(loaded.state_dict())
    fresh = sorted(problems)
    logger.info(
        "Weights of %s are loaded. %d of %d tensors are not among them, and stay random: %s",
        weights,
        len(fresh),
        len(target.state_dict()),
        ", ".join(fresh[:8]) + (", ..." if len(fresh) > 8 else "") or "none",
    )


def _check_backbone(model: Any, weights: str, source: Any, problems: dict[str, str]) -> None:
    """Raise :class:`ConfigError` if trained layers of the backbone have no weights.

    Args:
        source: transformers' config of the weights.
        problems: reasons why parameters stay random, by name.
    """
    fresh = [
        f"{name} {problems[name]}"
        for name, _ in model.named_parameters()
        if name in problems and _OF_BACKBONE.search(name) and not name.endswith(".mask_token")
    ]
    if fresh:
        size = _size_of(source)
        raise ConfigError(
            f"TRANSFORMERS.WEIGHTS {weights!r} would leave {len(fresh)} layers of the backbone "
            f"random, with which the others are of no use: {'; '.join(fresh[:4])}"
            f"{'; ...' if len(fresh) > 4 else ''}. Set TRANSFORMERS.SIZE to "
            + (f"{size}, the size of these weights" if size else "the config.json of these weights")
        )


def _size_of(source: Any) -> Optional[str]:
    """Name of the size of a transformers config; None if no size has its values."""
    values = source.to_dict()
    sizes = FAMILIES[source.model_type].sizes
    return next((name for name, size in sizes.items() if size and _has(values, size)), None)


def _has(values: Any, expected: Any) -> bool:
    if isinstance(expected, dict):
        return all(_has(values.get(name), value) for name, value in expected.items())
    return bool(values == expected)


def _shape(sizes: Any) -> str:
    return "x".join(map(str, sizes))


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
