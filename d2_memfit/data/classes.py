# Copyright (c) the d2_memfit developers.
"""Config keys about classes and sizes of images."""

from collections.abc import Iterable, Sequence
from textwrap import shorten
from typing import Optional, Union

from detectron2.config import CfgNode
from detectron2.config import get_cfg as get_detectron2_cfg
from detectron2.modeling import META_ARCH_REGISTRY

__all__ = ["class_keys", "names_in", "shorter_sides"]

# By meta architecture; "" if there is none. Classes of projects have an attribute instead.
_CLASS_KEYS = {
    "GeneralizedRCNN": "MODEL.ROI_HEADS.NUM_CLASSES",
    "PanopticFPN": "MODEL.ROI_HEADS.NUM_CLASSES",
    "RetinaNet": "MODEL.RETINANET.NUM_CLASSES",
    "ProposalNetwork": "",
    "SemanticSegmentor": "",
    "PanopticDeepLab": "",
}


def class_keys(cfg: CfgNode) -> Optional[list[str]]:
    """The keys with the number of classes.

    They are the key of the meta architecture, which a project's class names in an attribute
    ``num_classes_key``, and the keys MODEL.<...>.NUM_CLASSES that a project has added.

    Returns:
        None if unknown; an empty list if the model does not predict classes.
    """
    name = cfg.MODEL.META_ARCHITECTURE
    key: Optional[str] = _CLASS_KEYS.get(name)
    if key is None and name in META_ARCH_REGISTRY:
        key = getattr(META_ARCH_REGISTRY.get(name), "num_classes_key", None)
    if key == "":
        return []
    own = cfg.MODEL.keys() - get_detectron2_cfg().MODEL.keys()
    nodes = [node for node in cfg.MODEL if node in own and isinstance(cfg.MODEL[node], CfgNode)]
    added = [f"MODEL.{node}.NUM_CLASSES" for node in nodes if "NUM_CLASSES" in cfg.MODEL[node]]
    return [key, *added] if key else added or None


def names_in(names: Iterable[str]) -> str:
    """Names for a message, which may be cut."""
    return shorten(", ".join(names), 60, placeholder=" ...")


def shorter_sides(value: Union[int, Sequence[int]]) -> tuple[int, ...]:
    """INPUT.MIN_SIZE_TRAIN or INPUT.MIN_SIZE_TEST, a number or several, as a tuple."""
    return (value,) if isinstance(value, int) else tuple(value)
