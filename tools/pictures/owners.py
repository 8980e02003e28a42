# Copyright (c) the d2_memfit developers.
"""The owners of memory in a breakdown, in a few groups with colours."""

from collections import defaultdict
from collections.abc import Iterable

RECIPE = "COCO-InstanceSegmentation/mask_rcnn_R_50_FPN_3x.yaml"

# From the bottom up. Okabe and Ito: told apart by colour-blind people; hatches help where two of
# one lightness meet.
GROUPS = {
    "context, unused blocks": ("#999999", ""),
    "weights, optimizer, gradients": ("#0072B2", ""),
    "activations: backbone, FPN": ("#56B4E9", "//"),
    "activations: proposals": ("#009E73", ""),
    "activations: box and mask heads": ("#E69F00", "\\\\"),
    "backward": ("#D55E00", ""),
    "workspaces, inputs, other": ("#F0E442", ".."),
}
REST, STATES, BACKBONE, PROPOSALS, HEADS, BACKWARD, OTHER = GROUPS


def group_of(owner: str) -> str:
    if owner in ("parameters", "buffers", "optimizer", "gradients"):
        return STATES
    if owner == "backward":
        return BACKWARD
    for part, group in (
        ("activations: backbone", BACKBONE),
        ("activations: proposal_generator", PROPOSALS),
        ("activations: roi_heads", HEADS),
    ):
        if owner.startswith(part):
            return group
    return OTHER


def grouped(owners: Iterable[tuple[str, float]]) -> dict[str, float]:
    sizes: dict[str, float] = defaultdict(float)
    for owner, size in owners:
        sizes[group_of(owner)] += size
    return sizes
