# Copyright (c) the d2_memfit developers.
"""The order in which a plan tries techniques."""

from ..techniques import TIERS, get_technique

__all__ = ["preference"]

# In each tier, the least costly or harmful comes first; users' techniques come last.
_ORDER = {
    "exact": (
        *("SharedBitMaskTargets", "ChunkedMatching", "ChunkedCriterion", "EvaluationOnHost"),
        *("ShardedOptimizerStates", "OptimizerImplementation", "ChunkedHeads"),
        *("ActivationCheckpointing", "ActivationOffload"),
    ),
    "precision": ("MixedPrecision", "EightBitOptimizerStates"),
    "recipe": (
        *("PolygonMasks", "FewerDetections", "FewerProposals", "SmallerRpnBatch"),
        *("SmallerRoiBatch", "OneImageSize", "MoreFrozenStages", "SmallerImages"),
        *("FewerQueries", "LighterBackbone"),
    ),
}


def preference(name: str) -> tuple[int, int]:
    """Smaller for a technique that should be tried first."""
    tier = get_technique(name).tier
    known = _ORDER[tier]
    return TIERS.index(tier), known.index(name) if name in known else len(known)
