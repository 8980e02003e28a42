# Copyright (c) the d2_memfit developers.
"""Predictions of an evaluation in a file, instead of a list that grows in RAM."""

import pickle
import sys
import tempfile
from array import array
from collections.abc import Iterator
from typing import Any, BinaryIO, Optional

import torch
from detectron2.utils import comm

__all__ = ["SpilledPredictions", "save_as_list"]

# With this pickle protocol, pickles of items can be joined to the pickle of a list.
_PROTOCOL = 2
_BEFORE = b"\x80\x02"
_AFTER = b"."
_SENT = 16  # predictions that a rank sends to rank 0 at a time


class SpilledPredictions:
    """A temporary file that replaces the list of ``COCOEvaluator``'s predictions.

    It can be iterated more than once. Its pickle is the pickle of a list.

    Args:
        folder: folder of the file; None for TMPDIR. The file has no name, and disappears with this
            object.
    """

    def __init__(self, folder: Optional[str]) -> None:
        self._folder = folder
        self._file = tempfile.TemporaryFile(prefix="d2_memfit_predictions_", dir=folder)  # noqa: SIM115
        self._ends = array("q", [0])
        self.image_ids: list[Any] = []
        self.keys: set[str] = set()  # keys of predictions and of the objects in their "instances"

    def append(self, prediction: dict[str, Any]) -> None:
        self.image_ids.append(prediction["image_id"])
        self.keys.update(prediction)
        for instance in prediction.get("instances", ()):
            self.keys.update(instance)
        pickled = pickle.dumps(prediction, _PROTOCOL)
        self._file.seek(self._ends[-1])
        self._file.write(pickled)
        self._ends.append(self._ends[-1] + len(pickled))

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __getitem__(self, index: int) -> dict[str, Any]:
        prediction: dict[str, Any] = pickle.loads(self.pickle_of(index))
        return prediction

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (self[index] for index in range(len(self)))

    def __reduce__(self) -> tuple[Any, ...]:
        return list, (), None, iter(self)

    def pickle_of(self, index: int) -> bytes:
        """The pickle of one prediction."""
        self._file.seek(self._ends[index])
        return self._file.read(self._ends[index + 1] - self._ends[index])

    def gathered(self) -> "SpilledPredictions":
        """Collect the predictions of all ranks on rank 0, in rank order.

        All ranks must call this. Only a few predictions are sent at a time.
        """
        if comm.get_world_size() == 1:
            return self
        whole = SpilledPredictions(self._folder)
        for rank, number in enumerate(comm.all_gather(len(self))):
            for begin in range(0, number, _SENT):
                mine = range(begin, min(begin + _SENT, number)) if comm.get_rank() == rank else ()
                received = comm.gather([self[index] for index in mine])
                if comm.is_main_process():
                    for prediction in received[rank]:
                        whole.append(prediction)
        return whole


def save_as_list(predictions: SpilledPredictions, file: BinaryIO) -> None:
    """Write the same as ``torch.save(list(predictions), file)``, one prediction at a time.

    It uses PyTorch's older format, which ``torch.load`` can read. Source: ``_legacy_save`` in
    torch/serialization.py.
    """
    sizes = {"short": 2, "int": 4, "long": 4}
    system = {
        "protocol_version": torch.serialization.PROTOCOL_VERSION,
        "little_endian": sys.byteorder == "little",
        "type_sizes": sizes,
    }
    for header in (
        torch.serialization.MAGIC_NUMBER,
        torch.serialization.PROTOCOL_VERSION,
        system,
    ):
        pickle.dump(header, file, protocol=_PROTOCOL)
    file.write(_BEFORE + pickle.EMPTY_LIST)
    for index in range(len(predictions)):
        pickled = predictions.pickle_of(index)
        file.write(pickled[len(_BEFORE) : -len(_AFTER)] + pickle.APPEND)
    file.write(_AFTER)
    pickle.dump([], file, protocol=_PROTOCOL)  # keys of storages: there are no tensors
