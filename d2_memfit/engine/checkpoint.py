"""Checkpoints that say what is wrong with them."""

import logging
import os
import pickle
import zipfile
from typing import Any, Optional

import torch
from detectron2.checkpoint import DetectionCheckpointer

from ..errors import CheckpointError

__all__ = ["MemfitCheckpointer"]

logger = logging.getLogger(__name__)


class MemfitCheckpointer(DetectionCheckpointer):
    """A ``DetectionCheckpointer`` that names a file that cannot be read, and what to do about it.

    Raises:
        CheckpointError: in all that loads, instead of the many errors of the many formats.
    """

    def resume_or_load(self, path: str, *, resume: bool = True) -> dict[str, Any]:
        if resume and not self.has_checkpoint():
            logger.warning(
                "There is no checkpoint in %s to resume: starting afresh, from the weights %r",
                self.save_dir,
                path,
            )
        return super().resume_or_load(path, resume=resume)

    def load(
        self, path: str, checkpointables: Optional[list[str]] = None, **kwargs: Any
    ) -> dict[str, Any]:
        self._check_exists(path)
        return super().load(path, checkpointables, **kwargs)

    def check(self, path: str, *, resume: bool) -> None:
        """Read the file that :meth:`resume_or_load` would load, before anything is written.

        Only local files in PyTorch's format are read; of others it is seen whether they exist.
        """
        if resume and self.has_checkpoint():
            path = self.get_checkpoint_file()
        self._check_exists(path)
        if path.endswith(".pth") and "://" not in path:
            filename = self.path_manager.get_local_path(path)
            try:
                torch.load(
                    filename,
                    map_location="cpu",
                    weights_only=True,
                    mmap=zipfile.is_zipfile(filename),  # then no tensor is read
                )
            except Exception as e:
                raise self._unreadable(filename, e) from e

    def _check_exists(self, path: str) -> None:
        # A URL may still have to be downloaded. Main takes options after a question mark.
        if path and "://" not in path and not self.path_manager.isfile(path.partition("?")[0]):
            raise CheckpointError(f"the checkpoint {path} does not exist")

    def _load_file(self, filename: str) -> dict[str, Any]:
        try:
            return super()._load_file(filename)
        except Exception as e:
            raise self._unreadable(filename, e) from e

    def _unreadable(self, filename: str, error: Exception) -> CheckpointError:
        if isinstance(error, pickle.UnpicklingError) and "Unsupported global" in str(error):
            return CheckpointError(
                f"the checkpoint {filename} has Python objects in it beside tensors. If "
                "you trust its origin, keep the weights alone: "
                "torch.save({'model': torch.load(f, weights_only=False)['model']}, f)"
            )
        message = f"cannot read the checkpoint {filename}, it is damaged or not a checkpoint"
        if self.has_checkpoint() and filename == self.get_checkpoint_file():
            folder, name = os.path.split(filename)
            others = sorted(f for f in os.listdir(folder) if f.endswith(".pth") and f != name)
            message += (
                f". To resume from an earlier one ({', '.join(others) or 'there is none'}), write "
                f"its name into {os.path.join(folder, 'last_checkpoint')}"
            )
        return CheckpointError(message)
