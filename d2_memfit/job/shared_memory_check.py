# Copyright (c) the d2_memfit developers.
"""A check that /dev/shm has room for the images of the loader's workers."""

import logging
import os

from detectron2.config import CfgNode

from ..compat import local_world_size
from ..data import AnnotationFacts, shorter_sides
from ..iteration import BatchGeometry

__all__ = ["shm_bytes", "warn_of_small_shm"]

logger = logging.getLogger(__name__)

_SHM = "/dev/shm"
_PREFETCH = 2  # PyTorch's DataLoader: batches ready per worker
_MB = 2**20


def warn_of_small_shm(cfg: CfgNode, facts: AnnotationFacts, num_ranks: int) -> None:
    """Warn before training if /dev/shm may become full; a worker would end with a bus error.

    Args:
        facts: facts about the dataset's annotations.
        num_ranks: ranks of the whole job.
    """
    workers = cfg.DATALOADER.NUM_WORKERS
    if workers <= 0 or not os.path.isdir(_SHM):
        return
    status = os.statvfs(_SHM)
    free = status.f_bavail * status.f_frsize
    here = local_world_size()
    needs = [shm_bytes(cfg, facts, num_ranks, n) * here for n in range(workers + 1)]
    if needs[workers] <= free:
        return
    fitting = max((n for n in range(1, workers) if needs[n] <= free), default=0)
    logger.warning(
        "%s has %.0f MB free, and the loader's workers may hold %.0f MB of images in it "
        "(DATALOADER.NUM_WORKERS %d, on %d ranks here). Where it is full, a worker ends with a bus "
        "error. In a container give it more (docker run --shm-size=%dm, or --ipc=host; in "
        "Kubernetes an emptyDir of medium Memory at /dev/shm), or set DATALOADER.NUM_WORKERS %d",
        _SHM,
        free / _MB,
        needs[workers] / _MB,
        workers,
        here,
        2 * needs[workers] / _MB,
        fitting,
    )


def shm_bytes(cfg: CfgNode, facts: AnnotationFacts, num_ranks: int, workers: int) -> float:
    """Largest number of bytes that one rank's images take in shared memory.

    Images count at the largest size: those that workers have ready, and those that the trainer
    still holds. Bit masks count with their mean number per image, plus those of the most crowded
    image once. Polygons are not in shared memory. Without workers the result is 0.
    """
    if workers == 0:
        return 0
    geometry = BatchGeometry.from_cfg(cfg, num_ranks)
    grouped = cfg.DATALOADER.ASPECT_RATIO_GROUPING
    ahead = workers * (cfg.MEMFIT.HOST.PREFETCH or _PREFETCH)
    ahead *= 1 if grouped else geometry.images_per_batch
    # Two groups by aspect ratio fill up while the window is trained on.
    images = ahead + geometry.window + (2 * geometry.images_per_batch if grouped else 0)
    pixels = max(shorter_sides(cfg.INPUT.MIN_SIZE_TRAIN)) * cfg.INPUT.MAX_SIZE_TRAIN
    masks = 0.0
    if cfg.MODEL.MASK_ON and cfg.INPUT.MASK_FORMAT == "bitmask" and facts.num_images:
        masks = images * facts.num_objects / facts.num_images + facts.most_objects
    return pixels * (3 * images + masks)
