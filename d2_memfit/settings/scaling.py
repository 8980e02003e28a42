# Copyright (c) the d2_memfit developers.
"""Scaling of a recipe for one number of GPUs to another."""

from detectron2.config import CfgNode
from detectron2.engine import DefaultTrainer

from ..errors import ConfigError

__all__ = ["auto_scale_workers"]


def auto_scale_workers(cfg: CfgNode, num_workers: int) -> CfgNode:
    """Scale a config by Detectron2's rule. A rank that accumulates K batches counts as K ranks.

    With SOLVER.REFERENCE_WORLD_SIZE 8, SOLVER.IMS_PER_BATCH 16 is an 8-GPU recipe of 2 images per
    GPU. One GPU with SOLVER.ACCUMULATION_STEPS 8 runs it as IMS_PER_BATCH 2 x 8. The effective
    batch is the same, so learning rate, steps and iterations do not change. With ACCUMULATION_STEPS
    4 the effective batch is halved. Detectron2 then halves the learning rate and doubles the
    iterations. Without REFERENCE_WORLD_SIZE, IMS_PER_BATCH is used unchanged.

    Returns:
        CfgNode: a new config with REFERENCE_WORLD_SIZE 0, so that it is not scaled again; or the
        same config if there is nothing to do.
    """
    steps = cfg.SOLVER.get("ACCUMULATION_STEPS", 1)
    reference = cfg.SOLVER.REFERENCE_WORLD_SIZE
    if reference == 0 or (steps == 1 and reference == num_workers):
        return cfg
    if cfg.SOLVER.IMS_PER_BATCH % reference:
        raise ConfigError(
            f"SOLVER.IMS_PER_BATCH must be divisible by SOLVER.REFERENCE_WORLD_SIZE, "
            f"{reference}, got {cfg.SOLVER.IMS_PER_BATCH}"
        )
    scaled = DefaultTrainer.auto_scale_workers(cfg, num_workers * steps)
    if steps == 1:
        return scaled
    scaled = scaled.clone()
    scaled.defrost()
    scaled.SOLVER.IMS_PER_BATCH //= steps
    scaled.SOLVER.REFERENCE_WORLD_SIZE = 0
    if cfg.is_frozen():
        scaled.freeze()
    return scaled
