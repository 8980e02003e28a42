# Copyright (c) the d2_memfit developers.
"""A limit on the data loader's workers by the host's RAM."""

import logging
from typing import Any

import psutil
from detectron2.config import CfgNode
from detectron2.utils import comm

from ..common.checks import check_positive_number
from ..common.units import GB
from ..data.sizes import shorter_sides
from ..memory import available_host_bytes, figures_of_plan
from .registry import TECHNIQUES, KeyTechnique

__all__ = ["HostBudget", "loader_bytes", "workers_bytes"]

logger = logging.getLogger(__name__)

# Private memory of a worker without images: the pages that it has written to, including its
# parent's. It was 75 MB after 20 images, with 80,000 dataset dicts (v0.6, Linux). Reference counts
# let it grow, so four times that is assumed.
_WORKER_BYTES = 0.3 * GB
_TRAINER_BYTES = 1.5 * GB  # PyTorch, Detectron2 and a CUDA context; without the dataset
_PREFETCH = 2  # PyTorch's DataLoader: batches ready per worker


@TECHNIQUES.register()
class HostBudget(KeyTechnique):
    """Lowers DATALOADER.NUM_WORKERS to what fits into the host's RAM.

    Saves the memory of the omitted workers, and of their prefetched images. Costs time if the
    others cannot keep up with the model (``data_time``).

    Source: github.com/facebookresearch/detectron2/issues/410, whose answer is fewer workers.

    Key: RAM of this machine that training may use, in GB (2^30 bytes), for all ranks and their
    workers together. If they need more, DATALOADER.NUM_WORKERS is lowered. A plan does not offload
    more than this leaves. None: no limit.
    """

    tier = "exact"
    part = "config"
    in_plans = False
    key = "MEMFIT.HOST.BUDGET_GB"
    check_value = staticmethod(check_positive_number)

    @classmethod
    def enabling_settings(cls, cfg: CfgNode) -> dict[str, Any]:
        return {"MEMFIT.HOST.BUDGET_GB": round(available_host_bytes() / GB, 1)}

    @classmethod
    def apply(cls, part: CfgNode, cfg: CfgNode) -> CfgNode:
        own_bytes = psutil.Process().memory_info().rss
        budget = min(cfg.MEMFIT.HOST.BUDGET_GB * GB, available_host_bytes() + own_bytes)
        offloaded_gb = figures_of_plan(cfg.OUTPUT_DIR).get("offloaded_gb", 0.0)
        left = budget / comm.get_local_size() - own_bytes - offloaded_gb * GB
        num_ranks = comm.get_world_size()
        wanted = cfg.DATALOADER.NUM_WORKERS
        each = worker_bytes(cfg, num_ranks)
        workers = max(0, min(wanted, int(left // each)))
        logger.log(
            logging.WARNING if workers == 0 < wanted else logging.INFO,
            "MEMFIT.HOST.BUDGET_GB %g: DATALOADER.NUM_WORKERS %d of %d, each takes about %.2f GB; "
            "%.1f GB are left for them on each rank",
            cfg.MEMFIT.HOST.BUDGET_GB,
            workers,
            wanted,
            each / GB,
            left / GB,
        )
        part = part.clone()
        part.defrost()
        part.DATALOADER.NUM_WORKERS = workers
        if cfg.is_frozen():
            part.freeze()
        return part


def loader_bytes(cfg: CfgNode, num_ranks: int) -> float:
    """RAM of a rank in bytes: the process, its window of images, and the loader's workers."""
    window = cfg.SOLVER.IMS_PER_BATCH // num_ranks * cfg.SOLVER.ACCUMULATION_STEPS
    own = _TRAINER_BYTES + window * _image_bytes(cfg)
    return own + workers_bytes(cfg, num_ranks)


def workers_bytes(cfg: CfgNode, num_ranks: int) -> float:
    """RAM of the workers of a rank's loader, in bytes."""
    return cfg.DATALOADER.NUM_WORKERS * worker_bytes(cfg, num_ranks)


def worker_bytes(cfg: CfgNode, num_ranks: int) -> float:
    """RAM of a worker of the loader, in bytes, without masks.

    It includes the process, the image in work, as read and as resized, and the images held ready.
    """
    batch = cfg.SOLVER.IMS_PER_BATCH // num_ranks
    images = 1 if cfg.DATALOADER.ASPECT_RATIO_GROUPING else batch
    return _WORKER_BYTES + (2 + _PREFETCH) * images * _image_bytes(cfg)


def _image_bytes(cfg: CfgNode) -> int:
    return 3 * max(shorter_sides(cfg.INPUT.MIN_SIZE_TRAIN)) * cfg.INPUT.MAX_SIZE_TRAIN
