# Copyright (c) the d2_memfit developers.
"""A checkpointer that writes whole files and verifies them before loading."""

import glob
import itertools
import logging
import os
import re
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, Optional

import torch
from detectron2.checkpoint import DetectionCheckpointer
from detectron2.engine import TrainerBase

from .. import compat
from ..common.files import LEFTOVERS, FolderLock, is_local, whole_file
from ..common.reading import checked, verify_checksums
from ..errors import CheckpointError

__all__ = ["MemfitCheckpointer", "checkpointers_of"]

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

    Raises:
        CheckpointError: a file cannot be loaded, whatever its format, or the last save failed.
    """

    path_manager: Any
    _has_started = _is_resumed = _loads_all = False
    _lock: Optional[FolderLock] = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.path_manager = _WholeFiles(self.path_manager)

    @classmethod
    def like(cls, made: DetectionCheckpointer) -> "MemfitCheckpointer":
        """Another checkpointer with the parts of a project's. What its class overrides is kept."""
        original = type(made)
        bases = (cls,) if original is DetectionCheckpointer else (cls, original)
        checkpointer: MemfitCheckpointer = object.__new__(type(original.__name__, bases, {}))
        checkpointer.__dict__.update(vars(made), path_manager=_WholeFiles(made.path_manager))
        return checkpointer

    def save(self, name: str, **kwargs: Any) -> None:
        try:
            self.save_or_raise(name, **kwargs)
        except CheckpointError as e:
            if name.endswith("_final"):  # PeriodicCheckpointer's, after the last iteration
                raise
            last = self.get_checkpoint_file() or "none"
            logger.error("%s. Training continues; the last checkpoint is %s", e, last)

    def save_or_raise(self, name: str, **kwargs: Any) -> None:
        """Save a checkpoint like :meth:`save`; raise :class:`CheckpointError` on any failure."""
        self.path_manager.keeps_all = True  # a failed save must not remove an older file
        try:
            self.start_run()
            super().save(name, **kwargs)
        except (OSError, RuntimeError) as e:
            error = e.__context__ if isinstance(e, RuntimeError) else e  # torch.save's own follows
            if not isinstance(error, OSError):
                raise
            file = os.path.join(self.save_dir, f"{name}.pth")
            raise CheckpointError(f"cannot save the checkpoint {file} ({error})") from e
        self.path_manager.keeps_all = False

    def end_run(self) -> None:
        """Free the folder for another process. This also happens when this process ends."""
        if self._lock is not None:
            self._lock.release()
        self._lock = None

    def start_run(self, is_new: bool = True) -> None:
        """Lock the folder, and move the checkpoints of an earlier run aside unless it is resumed.

        The first save also does this. Call it when no rank reads weights from that folder any more.

        Args:
            is_new: False if the run continues an earlier one in another way.

        Raises:
            ConfigError: another process trains in this folder.
        """
        if not (self.save_dir and self.save_to_disk):
            return
        if is_local(self.save_dir) and not (self._lock and os.path.isdir(self.save_dir)):
            if self._lock:
                logger.error("The folder %s was removed, and is created again", self.save_dir)
            os.makedirs(self.save_dir, exist_ok=True)
            self._lock = FolderLock(self.save_dir)
            for leftover in glob.glob(os.path.join(glob.escape(self.save_dir), LEFTOVERS)):
                with suppress(OSError):
                    os.remove(leftover)
        if is_new and not (self._has_started or self._is_resumed):
            self._move_earlier_run()
        self._has_started = True

    def _move_earlier_run(self) -> None:
        own = re.compile(r"model_(\d{7,}|final|best)\.pth")
        files = [file for file in self._checkpoints() if own.fullmatch(os.path.basename(file))]
        if not files:
            return
        tag = os.path.join(self.save_dir, "last_checkpoint")
        folders = (os.path.join(self.save_dir, f"earlier_{i}") for i in itertools.count(1))
        folder = next(folder for folder in folders if not self.path_manager.exists(folder))
        self.path_manager.mkdirs(folder)
        for file in filter(self.path_manager.exists, [tag, *files]):
            if not self.path_manager.mv(file, os.path.join(folder, os.path.basename(file))):
                raise CheckpointError(f"cannot move {file}, of an earlier run, to {folder}")
        text = "Checkpoints of an earlier run are moved to %s. To continue that run: --resume"
        logger.warning(text, folder)

    def resume_or_load(self, path: str, *, resume: bool = True) -> dict[str, Any]:
        """Resume or load as ``Checkpointer`` does. Each rank looks for the file itself."""
        file, problems = self._newest_good() if resume else ("", [])
        if file:
            if problems:
                logger.warning("%s. Resuming from %s instead", problems[0], file)
            return self.load(file)
        if resume:
            text = "There is no checkpoint in %s to resume: a new run starts from the weights %r"
            logger.warning(text, self.save_dir, path)
        return super().resume_or_load(path, resume=False)

    def load(
        self, path: str, checkpointables: Optional[list[str]] = None, **kwargs: Any
    ) -> dict[str, Any]:
        if path:  # main takes options after a question mark
            checked(path.partition("?")[0], "the checkpoint ")
        self._loads_all = checkpointables is None and bool(self.checkpointables)
        if self._loads_all and self.save_dir:
            self._is_resumed |= os.path.dirname(path) == self.save_dir.rstrip("/")
        return super().load(path, checkpointables, **kwargs)

    def check(self, path: str, *, resume: bool) -> None:
        """Verify the file that :meth:`resume_or_load` would load, before anything is written.

        Only local files in PyTorch's format are read. Other local files must exist. A URL is
        downloaded to the cache, where the ranks find it.
        """
        if resume and self._newest_good()[0]:
            return
        if path.endswith(".pth") and is_local(path):
            self._verified(checked(path, "the checkpoint "))
        elif path:
            file = checked(path.partition("?")[0], "the checkpoint ")
            try:
                os.stat(self.path_manager.get_local_path(file))
            except Exception as e:  # each handler has its own
                raise CheckpointError(
                    f"the weights {file} cannot be downloaded ({type(e).__name__}: {e}). Download "
                    "them where there is a network, and name the file in MODEL.WEIGHTS"
                ) from e

    def has(self, name: str, iteration: int) -> bool:
        """Whether there is a checkpoint of this name and this iteration."""
        return self._iteration(os.path.join(self.save_dir, f"{name}.pth")) == iteration

    def has_checkpoint(self) -> bool:
        """Whether there is a checkpoint, even if ``last_checkpoint`` was lost."""
        return super().has_checkpoint() or any("/model_" in file for file in self._checkpoints())

    def get_checkpoint_file(self) -> str:
        """The file that ``last_checkpoint`` names; "" if it is missing or damaged."""
        with suppress(ValueError):  # it is binary
            file = super().get_checkpoint_file()
            return file if self.path_manager.isfile(file) else ""
        return ""

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

    def _newest_good(self) -> tuple[str, list[str]]:
        """The file to resume from, or "", and the faults of the files tried before it.

        Raises:
            CheckpointError: there are files, and none is good.
        """
        if not self.has_checkpoint():
            return "", []
        files, last, problems = self._checkpoints(), self.get_checkpoint_file(), []
        tag = os.path.join(self.save_dir, "last_checkpoint")
        if not last:
            problems.append(f"{tag} is missing or damaged, or names a file that does not exist")
        elif 0 <= self._iteration(last) < self._iteration(files[0]):  # -1 if it is damaged
            problems.append(f"{files[0]} is from a later iteration than {tag} names")
            if is_local(tag) and os.path.getmtime(tag) <= os.path.getmtime(files[0]):
                last = ""  # otherwise a person named it, to go back
        for file in dict.fromkeys([*filter(None, [last]), *files]):
            try:
                if {"iteration", "trainer"} & set(self._verified(file)):
                    return file, problems
                problems.append(f"{file} has no iteration to continue from")
            except CheckpointError as e:
                problems.append(str(e))
        raise CheckpointError(
            f"nothing in {self.save_dir} can be resumed: {'; '.join(problems[:3])}. "
            "Without --resume a new run starts there, and these files are kept"
        )

    def _verified(self, file: str) -> Any:
        """Verify a ``torch.save`` file and return its content. Tensors are read at their first use,
        but for files from before PyTorch 1.6.
        """
        file = self.path_manager.get_local_path(file)
        with _readable(file):
            return torch.load(
                file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file)
            )

    def _load_file(self, filename: str) -> dict[str, Any]:
        with _readable(filename):
            checkpoint = super()._load_file(filename)
            weights = checkpoint["model"]
            for place in ("model", "state_dict", "model_state_dict"):  # of other programs
                weights = weights[place] if isinstance(weights.get(place), dict) else weights
            checkpoint["model"] = {name: torch.as_tensor(v) for name, v in weights.items()}
            trained = {name for name, _ in self.model.named_parameters()}
            for name, value in checkpoint["model"].items():  # a mask of attention may be infinite
                is_trained = name.removeprefix("module.") in trained
                if value.isnan().any() or (is_trained and value.isinf().any()):
                    raise CheckpointError(f"{filename} has NaN or infinite values in {name}")
        return checkpoint

    def _load_model(self, checkpoint: Any) -> Any:
        incompatible = super()._load_model(checkpoint)  # None in some projects
        if self._loads_all and incompatible is not None:
            wrong = [f"{n} is {a} there and {b} here" for n, a, b in incompatible.incorrect_shapes]
            parameters = dict(self.model.named_parameters())
            wrong += [f"it has no {n}" for n in incompatible.missing_keys if n in parameters]
            if wrong:
                raise CheckpointError(f"the checkpoint is not one of this job: {wrong[0]}")
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
    except CheckpointError:
        raise
    except Exception as e:
        why = "it is damaged or not a checkpoint"
        if "Unsupported global" in str(e):
            why = (
                "it has Python objects in addition to tensors. If you trust it, keep its weights: "
                "torch.save({'model': torch.load(f, weights_only=False)['model']}, f)"
            )
        raise CheckpointError(f"cannot read the checkpoint {file}, {why}") from e
