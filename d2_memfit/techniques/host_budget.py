"""As many workers of the data loader as the host's RAM has room for."""

import logging
from typing import Any, Callable

import psutil
from detectron2.config import CfgNode
from detectron2.utils import comm
from torch.utils.data import DataLoader

from ..checks import check_positive_int, check_positive_number
from ..compat import inner_dataset
from ..data import shorter_sides
from ..geometry import BatchGeometry
from ..memory import available_host_bytes
from .registry import TECHNIQUES, Technique

__all__ = ["HostBudget", "LoaderPrefetch"]

logger = logging.getLogger(__name__)

_GB = 2**30
# What a worker has for itself beside images: the pages that it has written to, those of its parent
# included. It was 75 MB after 20 images, with 80,000 dataset dicts (v0.6, Linux); reference counts
# let it grow, so four times that is assumed.
_WORKER_BYTES = 0.3 * _GB
_TRAINER_BYTES = 1.5 * _GB  # PyTorch, Detectron2 and a CUDA context; without the dataset
_DEFAULT_PREFETCH = 2  # PyTorch's


@TECHNIQUES.register()
class HostBudget(Technique):
    """DATALOADER.NUM_WORKERS is lowered to what the host's RAM has room for.

    Saves the memory of the workers that are left out, and of what they would have loaded ahead.
    Costs time where the rest cannot keep up with the model (``data_time``).

    Source: github.com/facebookresearch/detectron2/issues/410, whose answer is fewer workers.
    """

    tier = "exact"
    part = "config"

    @classmethod
    def add_config(cls, cfg: CfgNode) -> None:
        cfg.MEMFIT.setdefault("HOST", CfgNode())
        # RAM of this machine that training may use, in GB (2^30 bytes), all ranks and their workers
        # together. It lowers DATALOADER.NUM_WORKERS and MEMFIT.HOST.PREFETCH, if it must. None is
        # no limit.
        cfg.MEMFIT.HOST.BUDGET_GB = None

    @classmethod
    def settings(cls, cfg: CfgNode) -> dict[str, Any]:
        return {"MEMFIT.HOST.BUDGET_GB": round(available_host_bytes() / _GB, 1)}

    @classmethod
    def is_on(cls, cfg: CfgNode) -> bool:
        if cfg.MEMFIT.HOST.BUDGET_GB is not None:
            check_positive_number("MEMFIT.HOST.BUDGET_GB", cfg.MEMFIT.HOST.BUDGET_GB)
        return cfg.MEMFIT.HOST.BUDGET_GB is not None

    @classmethod
    def apply(cls, part: CfgNode, cfg: CfgNode) -> CfgNode:
        own_bytes = psutil.Process().memory_info().rss
        budget = min(cfg.MEMFIT.HOST.BUDGET_GB * _GB, available_host_bytes() + own_bytes)
        left = budget / comm.get_local_size() - own_bytes
        num_ranks = comm.get_world_size()
        wanted = cfg.DATALOADER.NUM_WORKERS
        prefetch = cfg.MEMFIT.HOST.PREFETCH or _DEFAULT_PREFETCH
        # Fewer images ahead first: that costs less than a worker.
        if wanted * worker_bytes(cfg, prefetch, num_ranks) > left:
            prefetch = 1
        workers = max(0, min(wanted, int(left // worker_bytes(cfg, prefetch, num_ranks))))
        logger.log(
            logging.WARNING if workers == 0 < wanted else logging.INFO,
            "MEMFIT.HOST.BUDGET_GB %g: DATALOADER.NUM_WORKERS %d of %d, each loads %d ahead and "
            "takes about %.2f GB; %.1f GB are left for them on each rank",
            cfg.MEMFIT.HOST.BUDGET_GB,
            workers,
            wanted,
            prefetch,
            worker_bytes(cfg, prefetch, num_ranks) / _GB,
            left / _GB,
        )
        part = part.clone()
        part.defrost()
        part.DATALOADER.NUM_WORKERS = workers
        part.MEMFIT.HOST.PREFETCH = prefetch
        if cfg.is_frozen():
            part.freeze()
        return part


@TECHNIQUES.register()
class LoaderPrefetch(Technique):
    """Each worker of the loader holds fewer images ready.

    Saves their memory. Costs time where loading is uneven.

    Source: ``prefetch_factor`` of https://docs.pytorch.org/docs/stable/data.html
    """

    tier = "exact"
    part = "loader"

    @classmethod
    def add_config(cls, cfg: CfgNode) -> None:
        cfg.MEMFIT.setdefault("HOST", CfgNode())
        # Images, or batches without DATALOADER.ASPECT_RATIO_GROUPING, that each worker of the
        # loader has ready ahead. None is PyTorch's 2.
        cfg.MEMFIT.HOST.PREFETCH = None

    @classmethod
    def settings(cls, cfg: CfgNode) -> dict[str, Any]:
        return {"MEMFIT.HOST.PREFETCH": 1} if cfg.DATALOADER.NUM_WORKERS else {}

    @classmethod
    def is_on(cls, cfg: CfgNode) -> bool:
        if cfg.MEMFIT.HOST.PREFETCH is not None:
            check_positive_int("MEMFIT.HOST.PREFETCH", cfg.MEMFIT.HOST.PREFETCH)
        return cfg.MEMFIT.HOST.PREFETCH is not None

    @classmethod
    def apply(cls, build_loader: Callable[..., Any], cfg: CfgNode) -> Callable[..., Any]:
        def build_loader_with_prefetch(*args: Any, **kwargs: Any) -> Any:
            loader = build_loader(*args, **kwargs)
            inner = loader
            while inner is not None and not isinstance(inner, DataLoader):
                # Detectron2's groups and maps are around it.
                inner = inner_dataset(inner)
            if inner is None:
                logger.warning(
                    "MEMFIT.HOST.PREFETCH: the loader is a %s without a DataLoader in it, and "
                    "stays as it is",
                    type(loader).__name__,
                )
            elif inner.num_workers:
                inner.prefetch_factor = cfg.MEMFIT.HOST.PREFETCH
            return loader

        return build_loader_with_prefetch


def loader_bytes(cfg: CfgNode, num_ranks: int) -> float:
    """RAM that a rank takes, in bytes: itself, its window of images, and the loader's workers."""
    window = BatchGeometry.from_cfg(cfg, num_ranks).window
    own = _TRAINER_BYTES + window * _image_bytes(cfg)
    return own + workers_bytes(cfg, num_ranks)


def workers_bytes(cfg: CfgNode, num_ranks: int) -> float:
    """RAM that the workers of a rank's loader take, in bytes."""
    prefetch = cfg.MEMFIT.HOST.PREFETCH or _DEFAULT_PREFETCH
    return cfg.DATALOADER.NUM_WORKERS * worker_bytes(cfg, prefetch, num_ranks)


def worker_bytes(cfg: CfgNode, prefetch: int, num_ranks: int) -> float:
    """RAM that a worker of the loader takes, in bytes: itself, the image that it works on, as read
    and as resized, and those that it has ready; without masks.
    """
    batch = BatchGeometry.from_cfg(cfg, num_ranks).images_per_batch
    images = 1 if cfg.DATALOADER.ASPECT_RATIO_GROUPING else batch
    return _WORKER_BYTES + (2 + prefetch) * images * _image_bytes(cfg)


def _image_bytes(cfg: CfgNode) -> int:
    return 3 * max(shorter_sides(cfg.INPUT.MIN_SIZE_TRAIN)) * cfg.INPUT.MAX_SIZE_TRAIN
