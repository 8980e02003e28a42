# Copyright (c) the d2_memfit developers.
"""A checkpointer that writes whole files and verifies them before loading."""

import contextlib
import glob
import itertools
import logging
import os
import pickle
import re
import zipfile
from collections.abc import Iterator, Mapping
from typing import Any, Optional

import torch
from detectron2.checkpoint import DetectionCheckpointer
from detectron2.utils.file_io import Detectron2Handler
from torch import nn
from torch.nn.parameter import is_lazy

from ...common.files import LEFTOVERS, FolderLock, is_local, whole_file
from ...common.patching import change_class
from ...common.reading import checked, verify_checksums
from ...errors import CheckpointError
from .signals import raising_handlers_held_back

__all__ = ["MemfitCheckpointer"]

logger = logging.getLogger(__name__)

# States of PyTorch's optimizers with the shape of their parameter.
_LIKE_PARAMETER = {"momentum_buffer", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"}


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
    _resumed_file = ""
    _lock: Optional[FolderLock] = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.path_manager = _WholeFiles(self.path_manager)

    @classmethod
    def adopt(cls, checkpointer: DetectionCheckpointer) -> None:
        """Make a project's checkpointer one of this class too. What it overrides is kept."""
        if not isinstance(checkpointer, cls):
            original = type(checkpointer)
            change_class(checkpointer, type(original.__name__, (cls, original), {}))
            checkpointer.path_manager = _WholeFiles(checkpointer.path_manager)

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
            with raising_handlers_held_back():
                super().save(name, **kwargs)
        except (OSError, RuntimeError) as e:
            error = e.__context__ if isinstance(e, RuntimeError) else e  # torch.save's own follows
            if not isinstance(error, OSError):
                raise
            file = os.path.join(self.save_dir, f"{name}.pth")
            raise CheckpointError(f"cannot save the checkpoint {file} ({error})") from e
        self.path_manager.keeps_all = False
        self._resumed_file = ""

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
                with contextlib.suppress(OSError):
                    os.remove(leftover)
        if self._has_started:
            return
        self._has_started = True
        if self._is_resumed or not is_new:
            return
        last = self.get_checkpoint_file()
        pattern = r"model_(\d{7,}|final|best)\.pth"
        files = [f for f in self._files() if f == last or re.fullmatch(pattern, _name(f))]
        if not files:
            return
        tag = os.path.join(self.save_dir, "last_checkpoint")
        folders = (os.path.join(self.save_dir, f"earlier_{i}") for i in itertools.count(1))
        folder = next(folder for folder in folders if not self.path_manager.exists(folder))
        self.path_manager.mkdirs(folder)
        for file in [*([tag] if self.path_manager.exists(tag) else []), *files]:
            if not self.path_manager.mv(file, os.path.join(folder, _name(file))):
                raise CheckpointError(
                    f"cannot move {file}, of an earlier run, to {folder}: name another OUTPUT_DIR, "
                    "or continue that run with --resume"
                )
        logger.warning(
            "%s has checkpoints of an earlier run, but this is a new one: %s are moved to %s. "
            "To continue the earlier run: --resume",
            self.save_dir,
            ", ".join(map(_name, files)),
            folder,
        )

    def resume_or_load(self, path: str, *, resume: bool = True) -> dict[str, Any]:
        """Resume or load as ``Checkpointer`` does. Each rank looks for the file itself."""
        if not resume:
            return super().resume_or_load(path, resume=False)
        self._resumed_file, problems = self._newest_good()
        if self._resumed_file:
            if problems:
                logger.warning("%s. Resuming from %s instead", problems[0], self._resumed_file)
            self._is_resumed = True
        else:
            logger.warning(
                "There is no checkpoint in %s to resume: a new run starts from the weights %r",
                self.save_dir,
                path,
            )
        return super().resume_or_load(path, resume=self._is_resumed)

    def load(
        self, path: str, checkpointables: Optional[list[str]] = None, **kwargs: Any
    ) -> dict[str, Any]:
        self._check_exists(path)
        self._loads_all = checkpointables is None
        if self._loads_all and self.checkpointables and self.save_dir:
            self._is_resumed |= os.path.dirname(path) == self.save_dir.rstrip("/")
        return super().load(path, checkpointables, **kwargs)

    def check(self, path: str, *, resume: bool) -> None:
        """Verify the file that :meth:`resume_or_load` would load, before anything is written.

        Only local files in PyTorch's format are read. Other local files must exist. A URL is
        downloaded to the cache, where the ranks find it.
        """
        if resume and self._newest_good()[0]:
            return
        self._check_exists(path)
        if "://" in path:
            self._download(path.partition("?")[0])  # main takes options there
        if path.endswith(".pth") and is_local(path):
            self._verified(path)

    def has(self, name: str, iteration: int) -> bool:
        """Whether there is a checkpoint of this name and this iteration."""
        return self._iteration(os.path.join(self.save_dir, f"{name}.pth")) == iteration

    def has_checkpoint(self) -> bool:
        """Whether there is a checkpoint, even if ``last_checkpoint`` was lost."""
        return super().has_checkpoint() or any(_name(f).startswith("model_") for f in self._files())

    def get_checkpoint_file(self) -> str:
        """The file that ``last_checkpoint`` names; "" if it is missing or damaged.

        Until the next save, it is the file that was resumed.
        """
        if self._resumed_file:
            return self._resumed_file
        try:
            file = super().get_checkpoint_file()
            return file if self.path_manager.isfile(file) else ""
        except ValueError:  # it is binary
            return ""

    def _files(self) -> list[str]:
        """All checkpoints in the folder, the one of the latest iteration first."""
        if not self.path_manager.isdir(self.save_dir):
            return []
        files = self.get_all_checkpoint_files()
        return sorted(files, key=lambda f: (self._iteration(f), _time(f), f), reverse=True)

    def _iteration(self, file: str) -> int:
        """The iteration of a checkpoint, by its name or its content; -1 if it has none."""
        if number := re.fullmatch(r"\w+_(\d{7,})\.pth", _name(file)):
            return int(number[1])
        try:
            return int(_read_lazily(self.path_manager.get_local_path(file))["iteration"])
        except Exception:  # it may be damaged, and is verified before it is resumed
            return -1

    def _newest_good(self) -> tuple[str, list[str]]:
        """The file to resume from, or "", and the faults of the files tried before it.

        Raises:
            CheckpointError: there are files, and none is good.
        """
        problems: list[str] = []
        if not self.has_checkpoint():
            return "", problems
        last = self.get_checkpoint_file()
        files = self._files()
        tag = os.path.join(self.save_dir, "last_checkpoint")
        if not last:
            problems.append(f"{tag} is missing or damaged, or names a file that does not exist")
        elif 0 <= self._iteration(last) < self._iteration(files[0]):  # -1 if it is damaged
            if _time(tag) <= _time(files[0]):
                problems.append(f"{tag} names {last}, and {files[0]} is from a later iteration")
                last = ""
            else:  # by a person, who wants to go back
                problems.append(f"{files[0]} is from a later iteration than {tag} names")
        for file in dict.fromkeys([*([last] if last else []), *files]):
            try:
                checkpoint = self._verified(file)
                self._check_fits(file, checkpoint)
                return file, problems
            except CheckpointError as e:
                problems.append(str(e))
        raise CheckpointError(
            f"nothing in {self.save_dir} can be resumed: {'; '.join(problems[:3])}"
            f"{'; ...' if problems[3:] else ''}. Without --resume a new run starts there, and "
            "these files are kept"
        )

    def _check_exists(self, path: str) -> None:
        # A URL may still have to be downloaded. Main takes options after a question mark.
        if path and is_local(path):
            checked(path.partition("?")[0], "the checkpoint ")

    def _download(self, url: str) -> None:
        try:
            file = self.path_manager.get_local_path(url)
            problem = None if os.path.isfile(file) else f"{file} is not a file"
        except Exception as e:  # each handler has its own
            problem = f"{type(e).__name__}: {e}"
        if problem is not None:
            of_detectron2 = Detectron2Handler.PREFIX
            address = url.replace(of_detectron2, Detectron2Handler.S3_DETECTRON2_PREFIX)
            raise CheckpointError(
                f"the weights {url} cannot be downloaded ({problem}). Download {address} where "
                "there is a network, copy the file here, and name it in their place: MODEL.WEIGHTS "
                'FILE, --weights FILE in predict, train.init_checkpoint=FILE for .py; or "" for '
                "random weights"
            )

    def _check_fits(self, file: str, checkpoint: Any) -> None:
        try:
            reason = _why_it_does_not_fit_the_run(checkpoint, self.model, self.checkpointables)
        except Exception as e:  # a foreign file may hold anything there
            reason = f"its parts have other types than here ({type(e).__name__}: {e})"
        if reason:
            raise CheckpointError(f"the checkpoint {file} is not one of this job: {reason}")

    def _verified(self, file: str) -> Any:
        """Verify a ``torch.save`` file and return its content, with tensors not yet read."""
        filename = self.path_manager.get_local_path(file)
        try:
            verify_checksums(filename)
            return _read_lazily(filename)
        except Exception as e:
            raise self._unreadable(file, e) from e

    def _load_file(self, filename: str) -> dict[str, Any]:
        try:
            verify_checksums(filename)
            checkpoint = super()._load_file(filename)
        except Exception as e:
            raise self._unreadable(filename, e) from e
        checkpoint["model"] = _own_weights(checkpoint["model"], self.model, filename)
        if self._loads_all and set(self.checkpointables) & set(checkpoint):
            self._check_fits(filename, checkpoint)
        return checkpoint

    def _unreadable(self, filename: str, error: Exception) -> CheckpointError:
        if isinstance(error, pickle.UnpicklingError) and "Unsupported global" in str(error):
            return CheckpointError(
                f"the checkpoint {filename} has Python objects in addition to tensors. If "
                "you trust its origin, keep the weights alone: "
                "torch.save({'model': torch.load(f, weights_only=False)['model']}, f)"
            )
        return CheckpointError(
            f"cannot read the checkpoint {filename}, it is damaged or not a checkpoint"
        )


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
        if os.path.exists(path):
            checked(path)
        return self._path_manager.open(path, mode, **kwargs)

    def rm(self, path: str) -> None:
        if not self.keeps_all:
            self._path_manager.rm(path)


def _name(path: str) -> str:
    return os.path.basename(path)


def _time(file: str) -> float:
    """Time when a file was written; 0 for remote files."""
    return os.path.getmtime(file) if is_local(file) else 0.0


def _read_lazily(filename: str) -> Any:
    """Load a ``torch.save`` file; tensors are read when they are first used.

    Files in the format before PyTorch 1.6 are read at once.
    """
    return torch.load(
        filename, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(filename)
    )


def _own_weights(weights: Any, model: nn.Module, file: str) -> dict[str, torch.Tensor]:
    """Weights by the model's names, from the places in a file that other programs use.

    Raises:
        CheckpointError: there are none, or some are NaN or infinite.
    """
    buffers = dict(model.named_buffers())
    try:
        for place in ("model", "state_dict", "model_state_dict"):
            if isinstance(weights.get(place), dict):
                weights = weights[place]
        weights = {name: torch.as_tensor(value) for name, value in weights.items()}
        for name, value in weights.items():
            may_be_infinite = name.removeprefix("module.") in buffers  # as masks of attention are
            if not value.is_floating_point() or value.isfinite().all():
                continue
            if value.isnan().any() or not may_be_infinite:
                raise ValueError(f"NaN or infinite values in {name}")
    except (AttributeError, RuntimeError, TypeError, ValueError) as e:
        raise CheckpointError(f"the checkpoint {file} has no weights of a model ({e})") from e
    return weights


def _why_it_does_not_fit_the_run(
    checkpoint: Any, model: nn.Module, checkpointables: Mapping[str, Any]
) -> str:
    """Why a run with this model cannot continue from a checkpoint; "" if it can.

    Args:
        checkpointables: other objects to load, as in fvcore's ``Checkpointer``.
    """
    parts = {"iteration", "trainer", *checkpointables}
    if not isinstance(checkpoint, dict) or "model" not in checkpoint or not parts & set(checkpoint):
        return "it has at most weights, and no iteration to continue from"
    there = {name.removeprefix("module."): value for name, value in checkpoint["model"].items()}
    parameters = dict(model.named_parameters())
    for name, here in model.state_dict().items():
        saved = there.get(name.removeprefix("module."))
        if saved is None and name in parameters:
            return f"it has no {name}"
        if saved is not None and not is_lazy(here) and tuple(saved.shape) != tuple(here.shape):
            return f"{name} is {tuple(saved.shape)} there and {tuple(here.shape)} in this model"
    for key, part in checkpointables.items():
        for optimizer, state in _optimizers(part, checkpoint.get(key)):
            if reason := _why_another_optimizers(optimizer, state):
                return reason
    return ""


def _optimizers(part: Any, state: Any) -> Iterator[tuple[torch.optim.Optimizer, dict[str, Any]]]:
    """Optimizers within a checkpointable, such as a trainer, each with its state."""
    if isinstance(part, torch.optim.Optimizer) and isinstance(state, dict):
        yield part, state
    elif isinstance(state, dict):
        for name in {"optimizer", "_trainer"} & set(state):
            yield from _optimizers(getattr(part, name, None), state[name])


def _why_another_optimizers(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> str:
    here = [len(group["params"]) for group in optimizer.param_groups]
    there = [len(group["params"]) for group in state["param_groups"]]
    if here != there:
        return f"its optimizer has groups of {there} parameters, but this run's has {here}"
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    for number, p in zip(numbers, parameters):
        for name, value in state["state"].get(number, {}).items():
            if name in _LIKE_PARAMETER and value is not None and value.shape != p.shape:
                return (
                    f"{name} of the optimizer's parameter {number} is {tuple(value.shape)} there "
                    f"and its parameter {tuple(p.shape)}"
                )
    return ""
