# Copyright (c) the d2_memfit developers.
"""A checkpointer that writes whole files and verifies them before loading."""

import glob
import itertools
import logging
import os
import re
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any, Optional

import torch
from detectron2.checkpoint import DetectionCheckpointer
from detectron2.engine import TrainerBase

from ..common import compat
from ..common.errors import CheckpointError
from ..common.files import LEFTOVERS, checked, is_local, lock_folder, verify_checksums, whole_file

logger = logging.getLogger(__name__)


def checkpointers_of(trainer: TrainerBase, kind: type) -> list[Any]:
    """The checkpointers of a trainer and of its hooks, its own first."""
    values = [getattr(trainer, "checkpointer", None)]
    for holder in (trainer, *compat.hooks_of(trainer)):
        values += vars(holder).values()
    return list({id(value): value for value in values if isinstance(value, kind)}.values())


class MemfitCheckpointer(DetectionCheckpointer):
    """A ``DetectionCheckpointer`` that neither loses a checkpoint nor loads a damaged one.

    A file replaces an older one only when it is completely on disk. A failed save is logged and the
    run continues, unless it is the last save, ``*_final``. Files are verified before loading.
    :meth:`resume_or_load` uses the newest good checkpoint. A run that does not resume moves an
    earlier run's checkpoints aside before its first save.

    Attributes:
        needs_all: whether weights that are missing, or have other shapes, are an error in every
            load, and not only where a run is resumed.

    Raises:
        CheckpointError: a file cannot be loaded, whatever its format, or the last save failed.
    """

    needs_all = _goes_on = _loads_all = False
    _lock: Optional[IO[str]] = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.path_manager: Any = _WholeFiles(self.path_manager)

    @classmethod
    def like(cls, made: DetectionCheckpointer) -> "MemfitCheckpointer":
        """Another checkpointer with the parts of a project's. What its class overrides is kept."""
        bases = (cls,) if type(made) is DetectionCheckpointer else (cls, type(made))
        checkpointer: MemfitCheckpointer = object.__new__(type(type(made).__name__, bases, {}))
        checkpointer.__dict__.update(vars(made), path_manager=_WholeFiles(made.path_manager))
        return checkpointer

    def save(self, name: str, **kwargs: Any) -> None:
        self.path_manager.keeps_all = True  # a failed save must not remove an older file
        try:
            self.start_run()
            super().save(name, **kwargs)
            self.path_manager.keeps_all = False
        except (OSError, RuntimeError) as e:
            error = e.__context__ if isinstance(e, RuntimeError) else e  # torch.save's own follows
            if not isinstance(error, OSError):
                raise
            text = f"cannot save the checkpoint {os.path.join(self.save_dir, name)}.pth ({error})"
            if name.endswith("_final"):  # PeriodicCheckpointer's, after the last iteration
                raise CheckpointError(text) from e
            logger.error("%s. Training continues", text)

    def start_run(self, is_new: bool = True) -> None:
        """Lock the folder, and move the checkpoints of an earlier run aside unless it is resumed.

        The first save also does this. Call it when no rank reads weights from that folder any more.
        The lock is held until this process ends.

        Args:
            is_new: False if the run continues an earlier one in another way.

        Raises:
            ConfigError: another process trains in this folder.
        """
        if not (self.save_dir and self.save_to_disk):
            return
        if is_local(self.save_dir) and self._lock is None:
            os.makedirs(self.save_dir, exist_ok=True)
            self._lock = lock_folder(self.save_dir)
            for leftover in glob.glob(os.path.join(glob.escape(self.save_dir), LEFTOVERS)):
                os.remove(leftover)
        if is_new and not self._goes_on:
            self._move_earlier_run()
        self._goes_on = True

    def _move_earlier_run(self) -> None:
        files = [f for f in self._checkpoints() if re.search(r"/model_(\d{7,}|final|best).pth$", f)]
        if not files:
            return
        tag = os.path.join(self.save_dir, "last_checkpoint")
        folders = (os.path.join(self.save_dir, f"earlier_{i}") for i in itertools.count(1))
        folder = next(folder for folder in folders if not self.path_manager.exists(folder))
        self.path_manager.mkdirs(folder)
        for file in filter(self.path_manager.exists, [tag, *files]):
            if not self.path_manager.mv(file, os.path.join(folder, os.path.basename(file))):
                raise CheckpointError(f"cannot move {file}, of an earlier run, to {folder}")
        logger.warning("Checkpoints of an earlier run are moved to %s. Or use --resume", folder)

    def resume_or_load(self, path: str, *, resume: bool = True) -> dict[str, Any]:
        """Resume or load as ``Checkpointer`` does. Each rank looks for the file itself."""
        if resume and (file := self._newest_good()):
            self._goes_on = True
            return self.load(file)
        if resume:
            logger.warning("No checkpoint in %s to resume: a new run starts", self.save_dir)
        return super().resume_or_load(path, resume=False)

    def load(self, path: str, checkpointables: Any = None, **kwargs: Any) -> dict[str, Any]:
        if path:  # main takes options after a question mark
            checked(path.partition("?")[0], "the checkpoint ")
        self._loads_all = self.needs_all or (checkpointables is None and bool(self.checkpointables))
        self._path = path
        return super().load(path, checkpointables, **kwargs)

    def check(self, path: str, *, resume: bool) -> None:
        """Verify the file that :meth:`resume_or_load` would load, before anything is written.

        Files that are not in PyTorch's format must exist. A URL is downloaded to the cache, where
        the ranks find it.
        """
        is_resumed = resume and self._newest_good()
        if path and not is_resumed:
            file = checked(path.partition("?")[0], "the checkpoint ")
            try:
                os.stat(self.path_manager.get_local_path(file))
            except Exception as e:  # each handler has its own
                text = f"the weights {file} cannot be downloaded ({type(e).__name__}: {e})"
                raise CheckpointError(f"{text}. Name a file in MODEL.WEIGHTS") from e
            if file.endswith(".pth"):
                self._verified(file)

    def has_checkpoint(self) -> bool:
        """Whether there is a checkpoint, even if ``last_checkpoint`` was lost."""
        return super().has_checkpoint() or any("/model_" in file for file in self._checkpoints())

    def _checkpoints(self) -> list[str]:
        """All checkpoints in the folder, the one of the latest iteration first."""
        is_there = self.path_manager.isdir(self.save_dir)
        files = self.get_all_checkpoint_files() if is_there else []
        return sorted(files, key=lambda file: (self._iteration(file), file), reverse=True)

    def _iteration(self, file: str) -> int:
        """The iteration of a checkpoint, by its name or its content; -1 if it has none."""
        if number := re.search(r"/\w+_(\d{7,})\.pth$", file):
            return int(number[1])
        try:  # it may be damaged, and is verified before it is resumed
            return int(self._verified(file)["iteration"])
        except Exception:
            return -1

    def _newest_good(self) -> str:
        """The checkpoint of the latest iteration that can be resumed; "" if there is none.

        Raises:
            CheckpointError: there are files, and none is good.
        """
        problems: list[str] = []
        for file in self._checkpoints() if self.has_checkpoint() else []:
            try:
                if {"iteration", "trainer"} & set(self._verified(file)):
                    if problems:
                        logger.warning("%s. Resuming from %s instead", problems[0], file)
                    return file
                problems.append(f"{file} has no iteration to continue from")
            except CheckpointError as e:
                problems.append(str(e))
        if problems:
            text = f"nothing in {self.save_dir} can be resumed: {'; '.join(problems[:3])}"
            raise CheckpointError(f"{text}. Without --resume a new run starts, and these are kept")
        return ""

    def _verified(self, file: str) -> Any:
        """Verify a ``torch.save`` file and return its content. Tensors are read at their first use,
        but for files from before PyTorch 1.6.
        """
        file = self.path_manager.get_local_path(file)
        with _readable(file):
            is_zip = zipfile.is_zipfile(file)
            return torch.load(file, map_location="cpu", weights_only=True, mmap=is_zip)

    def _load_file(self, filename: str) -> dict[str, Any]:
        with _readable(filename):
            checkpoint = super()._load_file(filename)
            weights = checkpoint["model"]
            for place in ("model", "state_dict", "model_state_dict"):  # of other programs
                weights = weights[place] if isinstance(weights.get(place), dict) else weights
            # In place: it has the versions of modules.
            weights.update({name: torch.as_tensor(value) for name, value in weights.items()})
            checkpoint["model"] = weights
        for name, value in checkpoint["model"].items():
            if not (value.to_dense() < float("inf")).all():  # a mask of attention may be -inf
                raise CheckpointError(f"{filename} has NaN or infinite values in {name}")
        return checkpoint

    def _load_model(self, checkpoint: Any) -> Any:
        incompatible = super()._load_model(checkpoint)  # None in some projects
        if self._loads_all and incompatible is not None:
            wrong = [f"{n} is {a} there and {b} here" for n, a, b in incompatible.incorrect_shapes]
            parameters = dict(self.model.named_parameters())
            wrong += [f"it has no {n}" for n in incompatible.missing_keys if n in parameters]
            if wrong:
                text = f"{self._path} does not fit the config: {wrong[0]}, one of {len(wrong)} such"
                raise CheckpointError(f"{text}. Use weights that were trained with this config")
        return incompatible


class _WholeFiles:
    """A path manager that writes local files as a whole, and can keep all files.

    ``PeriodicCheckpointer`` removes the oldest file after each save, even after a failed one.
    """

    def __init__(self, path_manager: Any) -> None:
        self._path_manager = path_manager
        self.keeps_all = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._path_manager, name)

    def open(self, path: str, mode: str = "r", **kwargs: Any) -> Any:
        if "w" in mode and is_local(path):
            return whole_file(path, mode)
        return self._path_manager.open(path, mode, **kwargs)

    def rm(self, path: str) -> None:
        if not self.keeps_all:
            self._path_manager.rm(path)


@contextmanager
def _readable(file: str) -> Iterator[None]:
    """Verify a file's checksums, and raise :class:`CheckpointError` if it cannot be read here."""
    try:
        verify_checksums(file)
        yield
    except Exception as e:
        why = "it is damaged or not a checkpoint"
        if "Unsupported global" in str(e):
            how = "torch.save({'model': torch.load(f, weights_only=False)['model']}, f)"
            why = f"it has Python objects in addition to tensors. If you trust it: {how}"
        raise CheckpointError(f"cannot read the checkpoint {file}, {why}") from e
