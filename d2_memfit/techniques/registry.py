# Copyright (c) the d2_memfit developers.
"""The list of techniques, and those that a config turns on."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from detectron2.config import CfgNode
from detectron2.utils import comm
from torch import nn

from ..common.checks import value_of
from . import recipes
from .checkpointing import ActivationCheckpointing
from .crowds import ChunkedMatching, DenoisingQueries
from .evaluation_on_host import EvaluationOnHost
from .heads import ChunkedHeads
from .host import HostBudget, SharedDataset
from .masks import PackedMasks
from .offload import ActivationOffload
from .optimizer import EightBitOptimizerStates, ShardedOptimizerStates
from .technique import Technique

__all__ = ["TECHNIQUES", "TIERS", "apply_techniques", "get_technique", "ready_to_evaluate"]
__all__ += ["techniques_on"]

logger = logging.getLogger(__name__)

TIERS = ("exact", "precision", "recipe")

# Plans try the techniques of a tier in this order, the least costly or harmful first. A project
# adds its own before it makes a config.
# fmt: off
TECHNIQUES: list[Technique] = [
    PackedMasks(), ChunkedMatching(), EvaluationOnHost(), ShardedOptimizerStates(),
    ActivationCheckpointing(), ChunkedHeads(), ActivationOffload(), SharedDataset(), HostBudget(),
    recipes.MixedPrecision(), EightBitOptimizerStates(),
    recipes.PolygonMasks(), DenoisingQueries(), recipes.FewerDetections(),
    recipes.SmallerRoiBatch(), recipes.OneImageSize(), recipes.MoreFrozenStages(),
    recipes.SmallerImages(), recipes.FrozenModules(),
]
# fmt: on


def get_technique(name: str) -> Technique:
    return next(technique for technique in TECHNIQUES if technique.name == name)


def techniques_on(part: str, cfg: CfgNode) -> list[Technique]:
    """The techniques of one part of a job that a config turns on, in the order of application.

    What is trained is decided first: a frozen module is another one, for example.
    """
    found = [t for t in TECHNIQUES if t.part == part and t.is_on(cfg)]
    return sorted(found, key=lambda t: TIERS.index(t.tier), reverse=True)


def apply_techniques(part: str, made: Any, cfg: CfgNode, announce: bool = True) -> Any:
    """Apply the techniques that a config turns on to one part of a job; return the part to use.

    Args:
        part: its name, as :attr:`Technique.part`.
        announce: whether to log them; False for a trial of a plan.
    """
    for technique in techniques_on(part, cfg):
        made = technique.apply(made, value_of(cfg, technique.key))
        if announce:
            logger.info("Technique %s (%s) is on", technique.name, technique.tier)
        if announce and "gpu" in technique.needs and cfg.MODEL.DEVICE == "cpu":
            logger.warning("%s saves nothing with MODEL.DEVICE cpu", technique.key)
        if announce and "ranks" in technique.needs and comm.get_world_size() == 1:
            logger.warning("%s saves nothing on one rank", technique.key)
    return made


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
