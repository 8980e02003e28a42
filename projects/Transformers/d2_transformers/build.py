# Copyright (c) the d2_memfit developers.
"""Models of the transformers library, built from a config of this project."""

import logging
import re
from typing import Any

from detectron2.config import CfgNode
from torch import nn

from d2_memfit.common.checks import did_you_mean
from d2_memfit.common.errors import ConfigError, one_line

from .families import FAMILIES

__all__ = ["build_transformers_model", "load_pretrained"]

logger = logging.getLogger("d2_memfit.transformers")

_OF_BACKBONE = re.compile(r"(^|\.)(backbone|embeddings|pixel_level_module\.encoder)\.")


def build_transformers_model(cfg: CfgNode) -> nn.Module:
    """Build the model of TRANSFORMERS.TYPE and SIZE, with random weights.

    Raises:
        ConfigError: transformers is not installed, or there is no such size, file or option.
    """
    keys, family = cfg.TRANSFORMERS, FAMILIES[cfg.TRANSFORMERS.TYPE]
    name = family.mask_class if cfg.MODEL.MASK_ON else family.box_class
    transformers = _import_transformers()
    model_class = getattr(transformers, str(name))
    config_class = model_class.config_class
    options = dict(keys.OPTIONS)
    if keys.NUM_QUERIES:
        options["num_queries"] = keys.NUM_QUERIES
    options["num_labels"] = cfg.MODEL.ROI_HEADS.NUM_CLASSES
    for name in options.keys() - {*dir(config_class()), "model_type"}:
        raise ConfigError(
            f"TRANSFORMERS.OPTIONS: {config_class.__name__} has no {name}"
            f"{did_you_mean(name, dir(config_class()))}"
        )
    try:
        if keys.SIZE in family.sizes:
            config = config_class(**{**family.sizes[keys.SIZE], **options})
        else:
            config = transformers.AutoConfig.from_pretrained(keys.SIZE, **options)
        if not isinstance(config, config_class):
            raise ValueError(f"{keys.SIZE} is a {config.model_type}")
        return model_class(config)
    except (OSError, TypeError, ValueError) as e:  # raised by its checks
        raise ConfigError(
            f"TRANSFORMERS: {config_class.__name__} refuses its values ({one_line(e)}). SIZE must "
            f"be {', '.join(family.sizes)}, or a folder with a config.json of transformers"
        ) from e


def _import_transformers() -> Any:
    try:
        import transformers
    except ImportError as e:
        raise ConfigError(
            f"projects/Transformers needs the transformers library ({e}): "
            "pip install 'd2_memfit[transformers]'"
        ) from e
    return transformers


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
            "the size of these weights, or to their folder"
        )
    target.load_state_dict(loaded.state_dict())
    num = len(target.state_dict())
    text = "Weights of %s are loaded. %d of %d tensors are not among them, and stay random: %s"
    logger.info(text, weights, len(fresh), num, ", ".join(sorted(fresh)[:8]) or "none")
