# Copyright (c) the d2_memfit developers.
"""A hook that saves a checkpoint and ends the run when a signal arrives."""

import itertools
import logging
import os
import signal
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

from detectron2.engine import HookBase
from detectron2.utils import comm
from torch import nn

from .. import compat
from ..techniques import ShardedOptimizer
from ..torch_private import default_store
from .checkpoint import MemfitCheckpointer
from .signals import SIGNALS, leave_signals_to_parent

__all__ = ["StopOnSignals"]

logger = logging.getLogger(__name__)

_training_numbers = itertools.count()  # the same on all ranks, which train together


class StopOnSignals(HookBase):
    """Saves a checkpoint and ends the run when any rank gets SIGTERM, SIGINT or SIGUSR2.

    All ranks end with the status that a shell gives to the signal: 143, 130 or 140 (128 + its
    number). They agree by the vote at the end of each iteration. In an evaluation of an
    ``EvalHook`` they agree through the process group's store, and leave before their next batch. If
    a rank has already finished its images, the evaluation runs to its end. A second SIGINT ends the
    process at once, without a checkpoint.

    Register it on all ranks, after all other hooks, in a trainer that is an ``AccumulatingTrainer``
    or has one. Only the main thread of a process receives signals.

    Args:
        checkpointer: writes ``model_<iteration>.pth``.
    """

    def __init__(self, checkpointer: MemfitCheckpointer) -> None:
        self._checkpointer = checkpointer
        self._status = 0
        self._is_interrupted = False
        self._former: dict[int, Any] = {}
        self._training = self._evaluation_key = ""

    def before_train(self) -> None:
        inner: Any = compat.inner_trainer(self.trainer)
        inner.stop_signal = inner.agreed_stop_signal = self._status = 0
        self._inner, self._is_interrupted = inner, False
        self._training = f"d2_memfit/training {next(_training_numbers)}"
        if threading.current_thread() is threading.main_thread():
            self._former = {n: signal.signal(n, self._note) for n in SIGNALS if _is_free(n)}
            _forks.protected = True
        compat.replace_evaluations(self.trainer, partial(_wrapped, self._evaluate))

    def _note(self, number: int, frame: Any) -> None:
        if number == signal.SIGINT:
            if self._is_interrupted:
                self._restore_handlers()
                raise KeyboardInterrupt
            self._is_interrupted = True  # a logger might be in use
            os.write(2, b"\nEnding after this iteration. Ctrl-C again ends at once\n")
        self._inner.stop_signal = self._inner.stop_signal or number

    def after_step(self) -> None:
        number = self._inner.agreed_stop_signal
        if comm.get_world_size() == 1:
            number = self._inner.stop_signal
        if number and self.trainer.iter + 1 < self.trainer.max_iter:
            self._leave(number)

    def _leave(self, number: int) -> None:
        self._status = 128 + number
        name = signal.Signals(number).name
        logger.warning("%s: ending after iteration %d", name, self.trainer.iter)
        raise SystemExit(self._status)

    def after_train(self) -> None:
        """Save a checkpoint if a signal ends the run.

        Contexts of an evaluation, such as averaged weights, are closed by now.
        """
        try:
            if self._status:
                self._save()
        finally:
            self._restore_handlers()

    def _save(self) -> None:
        if isinstance(self._inner.optimizer, ShardedOptimizer):
            self._inner.optimizer.consolidate_state_dict()
        self._inner.gather_states()
        name = f"model_{self.trainer.iter:07d}"
        if os.path.basename(self._checkpointer.get_checkpoint_file()) != f"{name}.pth":
            self._checkpointer.save_or_raise(name, iteration=self.trainer.iter)
        comm.synchronize()  # a launcher ends all ranks when the first has ended

    def _restore_handlers(self) -> None:
        _forks.protected = False
        for number, handler in self._former.items():
            signal.signal(number, handler or signal.SIG_DFL)
        self._former = {}

    def _evaluate(self, evaluate: Callable[[], Any]) -> Any:
        """Run an evaluation that can stop before each batch."""
        model = compat.without_ddp(self._inner.model)
        original = type(model)
        self._evaluation_key = f"{self._training}/evaluation {self.trainer.iter}"

        def train(model: nn.Module, mode: bool = True) -> nn.Module:
            if mode:  # inference_on_dataset has finished its batches
                self._agree_in_evaluation(is_through=True)
                self._evaluation_key += "/next"
            return original.train(model, mode)

        model.__class__ = type(original.__name__, (original,), {"train": train})
        before_batch = model.register_forward_pre_hook(lambda *_: self._agree_in_evaluation())
        try:
            return evaluate()
        except SystemExit:
            if self.trainer.iter >= self.trainer.max_iter:  # all is saved, no hook comes after
                self._restore_handlers()
            raise
        finally:
            before_batch.remove()
            model.__class__ = original

    def _agree_in_evaluation(self, is_through: bool = False) -> None:
        """Leave if a rank received a signal before any rank finished its images.

        A rank that has finished waits for the others' results.
        """
        number = self._inner.stop_signal
        if comm.get_world_size() > 1:
            store = default_store()
            if not (number or is_through or store.check([self._evaluation_key])):
                return
            # The first rank's word counts.
            number = int(store.compare_set(self._evaluation_key, "", str(number)))
        if number:
            self._leave(number)


def _is_free(number: int) -> bool:
    """Whether nobody handles a signal. submitit, for example, has its own handler."""
    handler = signal.getsignal(number)
    if handler in (signal.SIG_DFL, signal.SIG_IGN, signal.default_int_handler):
        return True
    name = signal.Signals(number).name
    logger.warning("%s has a handler already, which is left alone: it does not end the run", name)
    return False


def _wrapped(run: Callable[..., Any], function: Callable[[], Any]) -> Callable[[], Any]:
    return lambda: run(function)


class _Forks:
    """Keeps signals to all processes of a job away from the loader's workers.

    The run needs the workers until the end of its iteration. Spawned workers, as in spawned ranks,
    do this themselves (``loader_worker.Images``).
    """

    def __init__(self) -> None:
        self.protected = False
        if hasattr(signal, "sigwaitinfo"):  # on Linux
            os.register_at_fork(after_in_child=self._protect)

    def _protect(self) -> None:
        if self.protected:
            leave_signals_to_parent()


_forks = _Forks()
