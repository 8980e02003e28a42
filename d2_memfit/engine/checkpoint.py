"""Checkpoints that say what is wrong with them."""

import logging
import os
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
                "There is no checkpoint in %s to resume: training starts at iteration 0",
                self.save_dir,
            )
        return super().resume_or_load(path, resume=resume)

    def load(
        self, path: str, checkpointables: Optional[list[str]] = None, **kwargs: Any
    ) -> dict[str, Any]:
        # A URL may still have to be downloaded. Main takes options after a question mark.
        if path and "://" not in path and not self.path_manager.isfile(path.partition("?")[0]):
            raise CheckpointError(f"the checkpoint {path} does not exist")
        return super().load(path, checkpointables, **kwargs)

    def check_last(self) -> None:
        """Read the last checkpoint, if there is one, and forget it: before anything is written."""
        if self.has_checkpoint():
            filename = self.get_checkpoint_file()
            try:
                torch.load(filename, map_location="cpu", weights_only=True)
            except Exception as e:
                raise self._unreadable(filename, e) from e

    def _load_file(self, filename: str) -> dict[str, Any]:
        try:
            return super()._load_file(filename)
        except Exception as e:
            raise self._unreadable(filename, e) from e

    def _unreadable(self, filename: str, error: Exception) -> CheckpointError:
        message = (
            f"cannot read the checkpoint {filename}, it is damaged or not a checkpoint "
            f"({type(error).__name__}: {str(error).partition(chr(10))[0]})"
        )
        folder, name = os.path.split(filename)
        others = sorted(f for f in os.listdir(folder) if f.endswith(".pth") and f != name)
        if self.has_checkpoint() and filename == self.get_checkpoint_file() and others:
            message += (
                f". To resume from an earlier one ({', '.join(others)}), write its name into "
                f"{os.path.join(folder, 'last_checkpoint')}"
            )
        return CheckpointError(message)
