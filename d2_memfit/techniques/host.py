# Copyright (c) the d2_memfit developers.
"""The host's RAM: a limit on the loader's workers, and one copy of the dataset for all ranks."""

import logging
import os
import pickle
import tempfile
from collections.abc import Sequence
from typing import Any

import numpy as np
import psutil
from detectron2.config import CfgNode
from detectron2.utils import comm
from numpy.typing import NDArray
from torch.utils.data import Dataset

from ..common import GB
from ..common.checks import check_positive_number, or_none, shorter_sides
from ..common.errors import HostMemoryError
from ..memory import available_host_bytes, figures_of_plan
from .technique import Technique

__all__ = ["HostBudget", "SharedDataset", "SharedList", "loader_bytes", "workers_bytes"]

logger = logging.getLogger(__name__)

# Private memory of a worker without images: the pages that it has written to, including its
# parent's. It was 75 MB after 20 images, with 80,000 dataset dicts (v0.6, Linux). Reference counts
# let it grow, so four times that is assumed.
_WORKER_BYTES = 0.3 * GB
_TRAINER_BYTES = 1.5 * GB  # PyTorch, Detectron2 and a CUDA context; without the dataset
_PREFETCH = 2  # PyTorch's DataLoader: batches ready per worker


class HostBudget(Technique):
    """Lowers DATALOADER.NUM_WORKERS to what fits into the host's RAM.

    Saves the memory of the omitted workers, and of their prefetched images. Costs time if the
    others cannot keep up with the model (``data_time``).

    Source: github.com/facebookresearch/detectron2/issues/410, whose answer is fewer workers.

    Key: RAM of this machine that training may use, in GB (2^30 bytes), for all ranks and their
    workers together. If they need more, DATALOADER.NUM_WORKERS is lowered. A plan does not offload
    more than this leaves. None: no limit.
    """

    part, key = "config", "MEMFIT.HOST.BUDGET_GB"
    check = or_none(check_positive_number)

    def apply(self, cfg: CfgNode, budget_gb: float) -> CfgNode:
        own_bytes = psutil.Process().memory_info().rss
        budget = min(budget_gb * GB, available_host_bytes() + own_bytes)
        offloaded_gb = figures_of_plan(cfg.OUTPUT_DIR).get("offloaded_gb", 0.0)
        left = budget / comm.get_local_size() - own_bytes - offloaded_gb * GB
        wanted, each = cfg.DATALOADER.NUM_WORKERS, worker_bytes(cfg, comm.get_world_size())
        workers = max(0, min(wanted, int(left // each)))
        text = (
            f"{self.key} {budget_gb:g}: DATALOADER.NUM_WORKERS {workers} of {wanted}, each takes "
            f"about {each / GB:.2f} GB; {left / GB:.1f} GB are left for them on each rank"
        )
        logger.log(logging.WARNING if workers == 0 < wanted else logging.INFO, text)
        changed = cfg.clone()
        changed.DATALOADER["NUM_WORKERS"] = workers  # an item is set in a frozen config, too
        return changed


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


class SharedDataset(Technique):
    """Serializes the dataset's dicts once per machine, into a file that all ranks map.

    Saves the copies of the dataset of all ranks but one, in training and evaluation. COCO's
    training annotations take 0.5 GB, those of a large dataset tens of GB. Costs nothing: the file
    is removed from its folder once all ranks have mapped it. Its pages stay in RAM while there is
    room.

    Source: github.com/facebookresearch/detectron2/issues/4626 and d2go/issues/405. The loaders of
    ``job/loader.py`` make a :class:`SharedList` if it is on.

    Key: Whether the ranks of a machine share one copy of the dataset's annotations.
    """

    part, key, off = "loader", "MEMFIT.HOST.SHARED_DATASET", False


class SharedList(Dataset[Any]):
    """A list for Detectron2's ``DatasetFromList``. All ranks must make it together.

    Args:
        items: objects that can be pickled; those of each machine's first rank are used.

    Raises:
        HostMemoryError: there is no room for the file, or an item cannot be pickled.
    """

    def __init__(self, items: Sequence[Any]) -> None:
        path = ""
        error = ""
        ends = None
        if comm.get_local_rank() == 0:
            try:
                path, ends = _write(items)
            except Exception as e:  # the other ranks wait for the result
                error = f"{type(e).__name__}: {e}"
        written = comm.all_gather((path, error, ends))
        errors = [error for _, error, _ in written if error]
        if errors:
            raise HostMemoryError(
                f"MEMFIT.HOST.SHARED_DATASET: cannot write the dataset's dicts to a temporary file "
                f"({errors[0]}). Set TMPDIR to a folder with more space, or set it False"
            )
        path, _, self._ends = written[comm.get_rank() - comm.get_local_rank()]
        self._bytes = np.memmap(path, dtype=np.uint8, mode="r")
        comm.synchronize()
        if comm.get_local_rank() == 0:
            os.remove(path)  # mapped data stays until the last process ends

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __getitem__(self, index: int) -> Any:
        return pickle.loads(self._bytes[self._ends[index] : self._ends[index + 1]].data)


def _write(items: Sequence[Any]) -> tuple[str, NDArray[np.int64]]:
    """Write all items to a file; return its path, and where each item ends, with a 0 in front."""
    ends = [0]
    handle, path = tempfile.mkstemp(prefix="d2_memfit_dataset_")
    try:
        with os.fdopen(handle, "wb") as file:
            for item in items:
                ends.append(ends[-1] + file.write(pickle.dumps(item, protocol=-1)))
    except BaseException:
        os.remove(path)
        raise
    return path, np.array(ends)
