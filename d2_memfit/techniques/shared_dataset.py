# Copyright (c) the d2_memfit developers.
"""One copy of the dataset's annotations in RAM for all ranks and workers of a machine."""

import os
import pickle
import tempfile
from collections.abc import Sequence
from typing import Any

import numpy as np
from detectron2.utils import comm
from numpy.typing import NDArray
from torch.utils.data import Dataset

from ..errors import HostMemoryError
from .registry import TECHNIQUES, BooleanTechnique

__all__ = ["SharedDataset", "SharedList"]


@TECHNIQUES.register()
class SharedDataset(BooleanTechnique):
    """Serializes the dataset's dicts once per machine, into a file that all ranks map.

    Saves the copies of the dataset of all ranks but one, in training and evaluation. COCO's
    training annotations take 0.5 GB, those of a large dataset tens of GB. Costs nothing: the file
    is removed from its folder once all ranks have mapped it. Its pages stay in RAM while there is
    room.

    Source: github.com/facebookresearch/detectron2/issues/4626 and d2go/issues/405. The loaders of
    ``job/loader.py`` make a :class:`SharedList` if it is on.

    Key: Whether the ranks of a machine share one copy of the dataset's annotations.
    """

    tier = "exact"
    part = "loader"
    in_plans = False
    key = "MEMFIT.HOST.SHARED_DATASET"


class SharedList(Dataset[Any]):
    """A replacement of Detectron2's ``DatasetFromList``. All ranks must make it together.

    Args:
        items: objects that can be pickled; those of each machine's first rank are used.

    Raises:
        HostMemoryError: there is no room for the file, or an item cannot be pickled.
    """

    def __init__(self, items: Sequence[Any], *args: Any, **kwargs: Any) -> None:
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
