# Copyright (c) the d2_memfit developers.
"""The technique interface, its registry, and the techniques that a config turns on."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from typing import Any, ClassVar

from detectron2.config import CfgNode
from fvcore.common.registry import Registry
from torch import nn

from ..common.checks import (
    check_bool,
    check_positive_int,
    check_strings,
    did_you_mean,
    value_of,
)
from ..errors import ConfigError

__all__ = [
    "ORDER",
    "PARTS",
    "TECHNIQUES",
    "TIERS",
    "BooleanTechnique",
    "KeyTechnique",
    "ModulesTechnique",
    "PositiveIntTechnique",
    "Technique",
    "apply_techniques",
    "get_technique",
    "ready_to_evaluate",
    "techniques_in_plans",
    "techniques_on",
]

logger = logging.getLogger(__name__)

TIERS = ("exact", "precision", "recipe")
# The order in which plans try techniques of each tier, the least costly or harmful first. Those of
# users come last.
ORDER = (
    *("PackedMasks", "ChunkedMatching", "EvaluationOnHost"),
    *("ShardedOptimizerStates", "ActivationCheckpointing", "ChunkedHeads", "ActivationOffload"),
    *("MixedPrecision", "EightBitOptimizerStates"),
    *("PolygonMasks", "DenoisingQueries", "FewerDetections", "SmallerRoiBatch", "OneImageSize"),
    *("MoreFrozenStages", "LowRankAdapters", "SmallerImages", "FrozenModules"),
)
PARTS = ("config", "model", "optimizer", "loader", "evaluation")


class Technique:
    """One way to use less memory: config keys that turn it on, and what it does to a part of a job.

    A subclass says in its docstring what it saves, what it costs, and where that is from. It is
    registered in ``TECHNIQUES`` under its own name. A new technique needs one file in this folder.

    Attributes:
        tier: "exact" (the same gradients up to float rounding), "precision" (other number formats)
            or "recipe" (something else is trained).
        part: what :meth:`apply` is given.

            - "config": the config, before anything is made from it
            - "model": the model, before DDP is around it
            - "optimizer": the optimizer, with its model's parameters
            - "loader": the function that makes the training loader of a config
            - "evaluation": the model, before it is evaluated; its forward is put back afterwards
        order: techniques with a higher one are applied later, around the others.
        in_plans: whether plans may use it.
        gpu_only: whether it saves memory on GPUs only.
        min_ranks: the number of ranks from which on it saves memory.
        uses_float16: whether a GPU computes in float16 with it.
        in_evaluation: whether an evaluation needs other memory with it.
        changes: what it changes in training, after "changes"; for the tiers precision and recipe.
    """

    tier: str
    part: str = "config"
    order: int = 0
    in_plans: bool = True
    gpu_only: bool = False
    min_ranks: int = 1
    uses_float16: bool = False
    in_evaluation: bool = False
    changes: str = ""

    @classmethod
    def add_config(cls, cfg: CfgNode) -> None:
        """Add the technique's keys to a config. Their defaults turn it off."""

    @classmethod
    def enabling_settings(cls, cfg: CfgNode) -> dict[str, Any]:
        """The keys, and their values, that turn it on in this config.

        Empty if it can do nothing, or if plans must not use it.
        """
        return {}

    @classmethod
    def is_on(cls, cfg: CfgNode) -> bool:
        """Whether :meth:`apply` has an effect.

        Raises:
            ConfigError: one of its keys has a value that cannot work.
        """
        return False  # Detectron2's own keys do all of it

    @classmethod
    def check(cls, cfg: CfgNode, num_ranks: int) -> None:
        """Raise :class:`ConfigError` if it is on and cannot work on this many ranks."""

    @classmethod
    def apply(cls, part: Any, cfg: CfgNode) -> Any:
        """Apply the technique, and return the part to use: the same one, changed, or another.

        Raises:
            ConfigError: it cannot work on this part.
        """
        return part


class KeyTechnique(Technique):
    """A technique that one config key turns on.

    Attributes:
        key: the key's whole name. The paragraph "Key:" of the docstring says what its values do.
        off: the key's default, which turns the technique off.
        check_value: called with the key and another value; raises :class:`ConfigError` if that
            cannot work.
    """

    key: str
    off: ClassVar[Any] = None
    check_value: ClassVar[Any]

    @classmethod
    def add_config(cls, cfg: CfgNode) -> None:
        *parents, name = cls.key.split(".")
        for parent in parents:
            cfg = cfg.setdefault(parent, CfgNode())
        cfg[name] = copy(cls.off)

    @classmethod
    def is_on(cls, cfg: CfgNode) -> bool:
        value = value_of(cfg, cls.key)
        if value is None and cls.off is None:
            return False
        cls.check_value(cls.key, value)
        return bool(value) and value != cls.off


class BooleanTechnique(KeyTechnique):
    """A technique that one boolean config key turns on."""

    off = False
    check_value = staticmethod(check_bool)

    @classmethod
    def enabling_settings(cls, cfg: CfgNode) -> dict[str, Any]:
        return {cls.key: True}


class PositiveIntTechnique(KeyTechnique):
    """A technique that one config key turns on, by a positive integer; None turns it off."""

    check_value = staticmethod(check_positive_int)


class ModulesTechnique(KeyTechnique):
    """A technique for the modules whose name patterns one config key lists."""

    off: ClassVar[list[str]] = []
    check_value = staticmethod(check_strings)


TECHNIQUES: Registry = Registry("TECHNIQUE")  # of subclasses of Technique


def get_technique(name: str) -> type[Technique]:
    """Get a technique by name.

    Raises:
        ConfigError: there is no such technique.
    """
    known = dict(TECHNIQUES)
    if name not in known:
        raise ConfigError(
            f"there is no technique {name!r}{did_you_mean(name, known)}. There are: "
            f"{', '.join(sorted(known))}"
        )
    return known[name]


def techniques_in_plans(tier: str) -> tuple[str, ...]:
    """Names of a tier's techniques that plans may use, in their order."""
    names = [name for name, t in TECHNIQUES if t.tier == tier and t.in_plans]
    return tuple(sorted(names, key=lambda n: ORDER.index(n) if n in ORDER else len(ORDER)))


def techniques_on(part_name: str, cfg: CfgNode) -> dict[str, type[Technique]]:
    """The techniques of one part of a job that a config turns on, in the order of application."""
    known = sorted(TECHNIQUES, key=lambda item: (item[1].order, item[0]))
    return {name: t for name, t in known if t.part == part_name and t.is_on(cfg)}


def apply_techniques(part_name: str, part: Any, cfg: CfgNode, announce: bool = True) -> Any:
    """Apply the techniques that a config turns on to one part of a job.

    Args:
        part_name: one of ``PARTS``.
        announce: whether to log them; False for a trial of a plan.

    Returns:
        The part to use.
    """
    for name, technique in techniques_on(part_name, cfg).items():
        part = technique.apply(part, cfg)
        if announce:
            logger.info("Technique %s (%s) is on", name, technique.tier)
    return part


@contextmanager
def ready_to_evaluate(model: nn.Module, cfg: CfgNode, announce: bool = True) -> Iterator[None]:
    """While open, the model is set up for evaluation as the config says.

    Args:
        model: without DDP around it.
        announce: as for :func:`apply_techniques`.
    """
    original = vars(model).get("forward")
    apply_techniques("evaluation", model, cfg, announce)
    try:
        yield
    finally:
        vars(model).pop("forward", None)
        if original is not None:
            model.forward = original
