# Copyright (c) the d2_memfit developers.
"""Checks of whole runs with the job's own loader: resuming, and training on two ranks."""

import gc
import inspect
import logging
import os
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta
from hashlib import sha256
from pathlib import Path
from typing import Any, Optional

import torch
import torch.multiprocessing as mp
from detectron2.config import CfgNode
from detectron2.engine import HookBase, SimpleTrainer
from detectron2.engine.hooks import PeriodicCheckpointer
from detectron2.utils import comm
from detectron2.utils.env import seed_all_rng
from torch import nn

from ..common import compat
from ..common.errors import ConfigError, MemfitError
from ..common.side_work import no_information
from ..config.load import with_settings
from ..engine.build import build_trainer
from ..engine.checkpoint import MemfitCheckpointer
from ..engine.defaults import MemfitMixin
from ..engine.launch import run_rank
from ..engine.train_loop import AccumulatingTrainer
from ..job import Job
from ..planner.errors import one_line_errors
from ..planner.stand_ins import cuda_as_cpu
from .patient import Untested, Unwell, smaller

__all__ = ["Remake", "agrees_on_two_ranks", "is_plain_by_default", "resumes"]

# Makes a job and its trainer's class, if there is one, in another process. It is picklable.
Remake = Callable[[], tuple[Job, Optional[type]]]

_ITERATIONS = 2
_SMALL = 2.0**-12
_ALWAYS: dict[str, Any] = {
    "MODEL.DEVICE": "cpu",
    "SOLVER.IMS_PER_BATCH": 2,
    "SOLVER.ACCUMULATION_STEPS": 2,
    "SOLVER.AMP.ENABLED": False,
    "MEMFIT.BUDGET_GB": None,
    "MEMFIT.MICRO_BATCH": None,
    "MEMFIT.OPTIMIZER.ZERO": False,
}
_OF_TRAINERS: dict[str, Any] = {
    "MODEL.WEIGHTS": "",
    "SOLVER.MAX_ITER": _ITERATIONS + 1,  # which is not reached: nothing is evaluated at the end
    "SOLVER.CHECKPOINT_PERIOD": _ITERATIONS // 2,
    "SOLVER.REFERENCE_WORLD_SIZE": 0,
    "SOLVER.STEPS": (),
    "TEST.EVAL_PERIOD": 0,
    "TEST.PRECISE_BN.ENABLED": False,
    "MEMFIT.PRESET": "",
    "MEMFIT.PLAN.ENABLED": False,
    "MEMFIT.HOST.BUDGET_GB": None,
}


def is_plain_by_default(job: Job, trainer: type) -> str:
    """Compare a run with ``MemfitMixin`` and default keys with a run of the trainer itself."""
    settings = {"SOLVER.ACCUMULATION_STEPS": 1}
    with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as other:
        plain = _train(job, trainer, one, settings, mixin=False)
        ours = _train(job, trainer, other, settings)
    _compare(plain, ours, f"{trainer.__name__} itself")
    return f"with default keys, MemfitMixin trains like {trainer.__name__} itself, bit by bit"


def resumes(job: Job, trainer: Optional[type]) -> str:
    """Compare a run that is ended after a checkpoint and resumed with an uninterrupted run."""
    # Another check has tested the losses.
    settings = {"MEMFIT.OOM.POLICY": "split", "MEMFIT.NORMALIZERS.POLICY": "off"}
    with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as other:
        whole = _train(job, trainer, one, settings)
        _train(job, trainer, other, settings, last=_ITERATIONS // 2)
        resumed = _train(job, trainer, other, settings, resume=True)
    _compare(whole, resumed, "an uninterrupted run")
    bases = ", ".join(cls.__name__ for cls in _bases(trainer)) if trainer else ""
    how = f"class Trainer({bases})" if trainer else "build_trainer"
    return f"{how}: a resumed run equals an uninterrupted one, bit by bit, on the dataset's images"


def _compare(expected: Mapping[str, str], found: Mapping[str, str], whose: str) -> None:
    changed = [name for name in expected if expected[name] != found.get(name)]
    if changed or len(expected) != len(found):
        raise Unwell(
            f"{len(changed)} of {len(expected)} tensors of model and optimizer differ from those "
            f"of {whose}, such as {', '.join(changed[:2])}"
        )


def agrees_on_two_ranks(remake: Remake, trainer: Optional[type] = None) -> str:
    """Train on two ranks: with the default policy, and with split and an error on rank 1."""
    if trainer is not None:
        _check_arguments(trainer)
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(_rank, (remake, folder), nprocs=2, start_method="spawn")
        text = (Path(folder) / "result").read_text()
    if text:
        raise Unwell(text)
    return (
        "both have the same weights, bit by bit, with MEMFIT.OOM.POLICY raise, and with split "
        "after an error on one"
    )


def _rank(rank: int, remake: Remake, folder: str) -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    url, timeout = f"file://{folder}/rendezvous", timedelta(minutes=5)  # of a collective
    run_rank(rank, url, 2, 2, 0, timeout, _compare_ranks, (remake, folder))


def _compare_ranks(remake: Remake, folder: str) -> None:
    torch.set_num_threads(1)
    job, trainer = remake()
    settings = {"SOLVER.IMS_PER_BATCH": 4, "DATALOADER.NUM_WORKERS": 0}
    found = []
    for policy, steps, fails in (("raise", 1, False), ("split", 2, True)):
        keys = {"MEMFIT.OOM.POLICY": policy, "SOLVER.ACCUMULATION_STEPS": steps, **settings}
        try:
            with one_line_errors(), tempfile.TemporaryDirectory() as output:
                state = _train(job, trainer, output, keys, last=1, fails=fails)
            weights = {k: v for k, v in state.items() if not k.startswith("buffer ")}  # as DDP has
            if comm.all_gather(weights)[0] != weights:
                raise Unwell("weights differ between the ranks")
        except MemfitError as e:  # of a run: raised on both
            after = ", after an error on one" if fails else ""
            found.append(f"MEMFIT.OOM.POLICY {policy}{after}: {e}")
    of_ranks = comm.gather(found)
    if comm.is_main_process():
        texts = dict.fromkeys(text for found in of_ranks for text in found)
        (Path(folder) / "result").write_text("; ".join(texts))


def _train(
    job: Job,
    trainer: Optional[type],
    folder: str,
    settings: Mapping[str, Any],
    last: int = _ITERATIONS,
    resume: bool = False,
    fails: bool = False,
    mixin: bool = True,
) -> dict[str, str]:
    """Train small images of the job's loader; return a digest of each tensor.

    Args:
        settings: config keys.
        last: number of iterations after which the run ends as if it was killed.
        resume: whether it continues from the checkpoint in the folder.
        fails: whether memory runs out on rank 1, once.
        mixin: whether ``MemfitMixin`` is a base class of the trainer.
    """
    settings, end = {**_ALWAYS, "OUTPUT_DIR": folder, **settings}, _End(last)

    def prepared(model: nn.Module) -> nn.Module:
        model.register_forward_pre_hook(lambda _, args: (smaller(args[0]), *args[1:]))
        model.register_forward_hook(_with_small_losses)
        if fails and comm.get_rank() == 1:
            model.register_forward_hook(_FailsOnce())
        return model

    with no_information(logging.ERROR), cuda_as_cpu():  # _Ended is not an error
        seed_all_rng(2 if resume else 1)
        with suppress(_Ended):
            if trainer is None:
                made, run = _of_job(job.with_settings(settings), prepared, resume)
            else:
                bases = _bases(trainer) if mixin else (trainer,)
                cfg = with_settings(job.cfg, {**_OF_TRAINERS, **settings}).clone()  # theirs
                made, run = _of_class(trainer, bases, cfg, prepared, resume)
            made.register_hooks([end])
            run()
        missing = [f"self.{name}()" for name in _End.METHODS if name not in end.called]
        if missing and mixin and trainer is not None:
            raise ConfigError(
                f"{trainer.__name__}.train does not call {', '.join(missing)}, so hooks do not "
                "run: nothing is saved when a signal or an error ends the run. Call them, as "
                "detectron2.engine.TrainerBase.train does"
            )
        model = compat.without_ddp(made.model)
        buffers = dict(model.named_buffers())
        tensors = {f"buffer {k}" if k in buffers else k: t for k, t in model.state_dict().items()}
        for i, values in made.optimizer.state_dict()["state"].items():
            tensors.update({f"optimizer.{i}.{k}": torch.as_tensor(v) for k, v in values.items()})
        digests = {name: _digest(tensor) for name, tensor in tensors.items()}
        del made, run, model, buffers, tensors
        gc.collect()  # ends the loader's workers: a trainer and its hooks refer to each other
    return digests


def _bases(trainer: type) -> tuple[type, ...]:
    """The base classes of a user's class that trains as a project's trainer does."""
    if issubclass(trainer, MemfitMixin):
        return (trainer,)
    more = (AccumulatingTrainer,) if issubclass(trainer, SimpleTrainer) else ()
    return (MemfitMixin, trainer, *more)


def _of_class(
    trainer: type, bases: Any, cfg: CfgNode, prepared: Callable[..., Any], resume: bool
) -> Any:
    _check_arguments(trainer)

    def build_model(cls: Any, cfg: CfgNode) -> Any:
        return prepared(super(kind, cls).build_model(cfg))

    members = {"build_model": classmethod(build_model), "build_writers": lambda self: []}
    kind: Any = type(trainer.__name__, bases, members)
    made = kind(cfg)
    made.resume_or_load(resume=resume)
    return made, made.train


def _check_arguments(trainer: type) -> None:
    """Raise :class:`Untested` if a trainer's ``__init__`` does not take the config alone."""
    for cls in (cls for cls in trainer.__mro__ if "__init__" in vars(cls)):
        signature = inspect.signature(vars(cls)["__init__"])
        if any(p.kind == p.VAR_POSITIONAL for p in signature.parameters.values()):
            continue  # it passes its arguments on
        try:
            signature.bind(None, None)
        except TypeError as e:
            raise Untested(
                f"not tested: {cls.__name__}(cfg): {e}. Name a class that takes the config alone, "
                "with def __init__(self, cfg): super().__init__(cfg, ...)"
            ) from e
        return


def _of_job(job: Job, prepared: Callable[..., Any], resume: bool) -> Any:
    made = build_trainer(job, prepared(job.parts.build_model("cpu").train()))
    checkpointer = MemfitCheckpointer(made.model, job.cfg.OUTPUT_DIR, trainer=made)
    start = checkpointer.resume_or_load("", resume=resume).get("iteration", -1) + 1
    saves = [PeriodicCheckpointer(checkpointer, _ITERATIONS // 2)] if comm.get_rank() == 0 else []
    made.register_hooks(saves)
    return made, lambda: made.train(start, _ITERATIONS)


class _Ended(Exception):
    """Ends a run, as if its process was killed."""


class _End(HookBase):
    """Ends a run early, after a checkpoint, and notes its calls."""

    METHODS = ("before_train", "before_step", "after_step")  # what a train() calls

    def __init__(self, last: int) -> None:
        self._last = last
        self.called: set[str] = set()

    def before_train(self) -> None:
        self.called.add("before_train")

    def before_step(self) -> None:
        self.called.add("before_step")

    def after_step(self) -> None:
        self.called.add("after_step")
        if self.trainer.iter + 1 == self._last < self.trainer.max_iter:
            raise _Ended


class _FailsOnce:
    """A forward hook. Memory runs out at the end of the first forward of several images."""

    has_failed = False

    def __call__(self, model: nn.Module, args: Any, result: Any) -> None:
        if torch.is_grad_enabled() and len(args[0]) > 1 and not self.has_failed:
            self.has_failed = True
            raise torch.OutOfMemoryError("injected at the end of a forward")


def _with_small_losses(model: nn.Module, args: Any, result: Any) -> Any:
    """A forward hook for random weights, which would diverge. Momentum still tells all changes."""
    if not isinstance(result, dict):
        return result
    return {k: _SMALL * v if isinstance(v, torch.Tensor) else v for k, v in result.items()}


def _digest(tensor: torch.Tensor) -> str:
    values = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    return sha256(values.numpy().tobytes()).hexdigest()
