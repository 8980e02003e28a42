# Copyright (c) the d2_memfit developers.
"""Endings of a run by a signal, an error or a dead process: the last completed step is saved."""

import contextlib
import logging
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import FrameType
from typing import Any, Optional
from unittest.mock import patch

from detectron2.engine import HookBase, TrainerBase
from detectron2.engine.hooks import EvalHook, LRScheduler
from detectron2.utils import comm
from fvcore.common.checkpoint import Checkpointer
from torch.multiprocessing import ProcessExitedException

from ..common import compat
from ..common.compat import end_with_parent
from ..common.errors import (
    START_HERE,
    MemfitError,
    RankError,
    no_traceback_of_loop,
    one_line,
    write_traceback,
)
from ..memory import is_killed_worker, is_lost_rank, is_out_of_memory
from .window import host_memory_error

logger = logging.getLogger(__name__)

SIGNALS = [s for s in signal.Signals if s.name in ("SIGTERM", "SIGINT", "SIGUSR2", "SIGHUP")]


@contextmanager
def handled(numbers: Iterable[int], handler: Any) -> Iterator[None]:
    """While open, handle signals, if this is the main thread."""
    former: dict[int, Any] = {}
    try:
        if threading.current_thread() is threading.main_thread():
            former.update((number, signal.signal(number, handler)) for number in numbers)
        yield
    finally:
        for number, original in former.items():
            signal.signal(number, original or signal.SIG_DFL)  # None if Python did not set it


def worker_deaths_wait() -> AbstractContextManager[None]:
    """While open, PyTorch's handler does not raise an error for a worker that dies: the loader will
    say so. A step, or the last save, is done as a whole.
    """
    return handled([s for s in signal.Signals if s.name == "SIGCHLD"], lambda *_: None)


@contextmanager
def signals_end_at_once() -> Iterator[None]:
    """While open, a signal ends this process with one line, and open contexts are closed.

    Training inside of it handles signals itself, from its start to its end.
    """
    with handled(free_signals(), end_by_signal):
        yield


def free_signals() -> list[int]:
    """The signals that nobody handles or ignores. nohup ignores SIGHUP, for example."""
    free = (signal.SIG_DFL, signal.default_int_handler, end_by_signal)
    return [number for number in SIGNALS if signal.getsignal(number) in free]


def end_by_signal(number: int, frame: Optional[FrameType] = None) -> None:
    """End this process with one line; a logger might be in use."""
    os.write(2, f"{signal.Signals(number).name}: ended\n".encode())
    sys.exit(128 + number)


def leave_signals_to_parent() -> None:
    """In a loader worker: take no notice of signals that all processes of a job get, and end when
    the process that started it is gone.
    """
    for number in SIGNALS:
        signal.signal(number, lambda *_: None)  # which programs that it starts do not inherit
    end_with_parent(signal.SIGKILL)


@contextmanager
def signals_passed_on() -> Iterator[None]:
    """While open, end the processes started here if a signal comes: each gets a SIGTERM. A third
    SIGINT kills them. A terminal's second Ctrl-C also reaches them as SIGINT.

    Raises:
        SystemExit: the processes ended because of a signal. The status is 128 + the first one's
            number.
    """
    received: list[int] = []

    def pass_on(number: int, frame: Optional[FrameType]) -> None:
        received.append(number)
        for child in multiprocessing.active_children():
            child.kill() if received.count(signal.SIGINT) > 2 else child.terminate()

    try:
        with handled(free_signals(), pass_on):
            yield
    except ProcessExitedException:
        if received:
            sys.exit(128 + received[0])
        raise


@contextmanager
def saved_at_end(trainer: TrainerBase) -> Iterator[None]:
    """Around a trainer's ``train``: however it ends, the last completed step is saved.

    This needs a :class:`SaveOnEnding` among the trainer's hooks. A project's own loop may not call
    ``after_train`` after an error.

    Raises:
        SystemExit: a signal has asked the run to end. The status is 128 + its number.
    """
    with causes_named(), no_traceback_of_loop():
        try:
            yield
        finally:
            saved_if_failing(trainer)
    if number := getattr(compat.inner_trainer(trainer), "stop_signal", 0):
        end_by_signal(number)  # the run is complete


def saved_if_failing(trainer: TrainerBase) -> AbstractContextManager[Any]:
    """If the run has failed, save it. While open, no hook that fails then, too, hides why."""
    hooks = [hook for hook in compat.hooks_of(trainer) if isinstance(hook, SaveOnEnding)]
    failing = [hook for hook in hooks if hook.is_failing()]
    for hook in failing:
        hook.after_train()
    return contextlib.suppress(Exception) if failing else contextlib.nullcontext()


@contextmanager
def causes_named() -> Iterator[None]:
    """Around a rank's main function, or a training: raise an error that names the cause.

    The cause is a dead process. The traceback is only in the log's file, if there is one.
    """
    try:
        yield
    except MemfitError:
        raise
    except Exception as error:
        write_traceback(error)
        if is_killed_worker(error):
            raise host_memory_error("a worker was killed: RAM may be full") from error
        if comm.get_world_size() > 1 and is_lost_rank(error):
            raise RankError("the connection to another rank is lost: see its end") from error
        raise


class SaveOnEnding(HookBase):
    """Saves a checkpoint of the last completed step when a run ends early, for whatever reason.

    - SIGTERM, SIGINT, SIGUSR2 or SIGHUP to any rank: all ranks end after the iteration, even if it
      is the last one. Their exit status is that of a shell (128 + the signal's number). They agree
      in the vote at the end of each iteration. In an evaluation of an ``EvalHook``, a rank ends at
      once, and its launcher ends the others. SIGINT after another signal ends at once, too.
    - An error on any rank, such as one of the loader, or another rank's death: rank 0 saves alone.
      Before that, it undoes the unfinished iteration. The error is raised again. Its traceback is
      only in the log file.

    A step that the optimizer has not finished is never saved, and neither are weights that are not
    finite. One line says what is saved, or why it is not. If the last save of a run failed, it is
    repeated when the run is resumed.

    Register it on all ranks, after all other hooks, in a trainer that is an ``AccumulatingTrainer``
    or has one. Only the main thread of a process receives signals. It reads two attributes of the
    ``AccumulatingTrainer``: ``undo`` undoes the iteration until its step begins, and is None from
    then on; ``done`` is the last iteration whose step is complete.

    Args:
        checkpointer: writes ``model_<iteration>.pth`` on rank 0. Other ranks need none. A signal
            that has a handler keeps it.
    """

    def __init__(self, checkpointer: Optional[Checkpointer]) -> None:
        self._checkpointer = checkpointer
        self._is_training = self._has_agreed = False
        self._undo = contextlib.ExitStack()  # undoes the changes for the time of training

    def before_train(self) -> None:
        self._inner: Any = compat.inner_trainer(self.trainer)  # runs the steps
        self._inner.stop_signal, self._inner.agreed_stop_signal = 0, None
        self._inner.done = self.trainer.start_iter - 1
        self._is_training, self._has_agreed, self._pid = True, False, os.getpid()
        self._other_error = sys.exc_info()[1]  # handled outside, while this run trains
        self._undo.enter_context(handled(free_signals(), self._note))
        if self.trainer.start_iter == self.trainer.max_iter:  # its last save may have failed
            self._inner.restore_again()
            done = self._inner.done
            with patch.object(self.trainer, "iter", done), patch.object(self._inner, "iter", done):
                self._inner.gather_states()
                if self._checkpointer is not None:
                    self._checkpointer.save("model_final", iteration=done)

    def _note(self, number: int, frame: Optional[FrameType]) -> None:
        """Let the run end after this iteration, or at once in an evaluation."""
        inner = self._inner
        if os.getpid() != self._pid:  # a worker of another loader, which was forked since
            if number == signal.SIGTERM:  # of PyTorch, which waits for its end
                os._exit(128 + number)
            return
        is_stepping = inner.undo is None and inner.agreed_stop_signal is not None
        if number == signal.SIGINT and inner.stop_signal and self._is_training and not is_stepping:
            raise KeyboardInterrupt
        os.write(2, b"\nEnding after this iteration\n")  # a logger might be in use
        inner.stop_signal = inner.stop_signal or number
        while frame is not None:
            if isinstance(frame.f_locals.get("self"), EvalHook):
                end_by_signal(number)
            frame = frame.f_back

    def before_step(self) -> None:
        self._inner.agreed_stop_signal = self._inner.undo = None  # until its run_step says more
        batches = self._inner.resumable_batches
        self._undo_data = (lambda: None) if batches is None else batches.undo_point()

    def after_step(self) -> None:
        inner = self._inner
        inner.done, number = self.trainer.iter, inner.agreed_stop_signal
        inner.undo = self._undo_data = lambda: None  # nothing is changed
        is_last = self.trainer.iter + 1 == self.trainer.max_iter  # signals may have come since
        if number is None or is_last or comm.get_world_size() == 1:  # None: it took no vote
            number = max(comm.all_gather(inner.stop_signal))
        if number:
            inner.stop_signal, self._has_agreed = number, True
            raise SystemExit(128 + number)

    def is_failing(self) -> bool:
        """Whether an error is ending the run."""
        return self._is_training and sys.exc_info()[1] not in (None, self._other_error)

    def after_train(self) -> None:
        """Save what is not saved yet, and take the handlers back. Call it in an ``except`` or
        ``finally`` if a loop does not call ``after_train`` after an error.
        """
        with worker_deaths_wait():  # if PyTorch's handler raises before, the next call saves
            has_failed, self._is_training = self.is_failing(), False
            try:
                if has_failed:
                    self._save_after(sys.exc_info()[1])
            finally:
                self._undo.close()
                # After a failure in the last iteration, EvalHook would evaluate as after a finished
                # run, while other ranks wait elsewhere.
                if has_failed:
                    self.trainer.iter = min(self.trainer.iter, self.trainer.max_iter - 2)

    def _save_after(self, error: Optional[BaseException]) -> None:
        """Save the last completed step, and say so in one line."""
        number, kept = self._inner.stop_signal, "Rank 0 saves the state of all ranks"
        if self._has_agreed:  # all ranks are here
            with contextlib.suppress(RuntimeError):  # but one may have died since
                self._inner.gather_states()
        try:
            if comm.is_main_process():
                kept = self._save_last_completed()
        except Exception as e:  # a device may be lost, or memory be short
            kept = f"The state could not be saved: {type(e).__name__}: {one_line(e)}"
        by = f"{signal.Signals(number).name}:" if number else type(error).__name__
        text = f"{by} ended the run in iteration {self.trainer.iter}. {kept}"
        if error is not None and is_out_of_memory(error):
            text += f". What to do: {START_HERE}"
        logger.error("%s", text)
        if number and isinstance(error, Exception):  # such as that of a worker that got it too
            raise SystemExit(128 + number)

    def _save_last_completed(self) -> str:
        """Save, and return what was saved, or why nothing was."""
        inner, own = self._inner, self._checkpointer
        if inner.done < self.trainer.start_iter or own is None:
            return "No step was completed" if own else "There is no checkpointer"
        if inner.done < self.trainer.iter:
            if inner.undo is None:  # or the trainer's own run_step does not tell
                return "Its state is not saved: the optimizer had not finished its step"
            inner.undo()
            self._undo_data()
        if not all(bool(p.isfinite().all()) for p in inner.model.parameters()):
            return "Its state is not saved: the weights are not finite"
        for hook in compat.hooks_of(self.trainer):  # an error may have come before this one
            if isinstance(hook, LRScheduler) and hook.scheduler.last_epoch == inner.done:
                hook.scheduler.step()
        name = f"model_{inner.done:07d}"
        if not own.get_checkpoint_file().endswith(f"{name}.pth"):
            done = inner.done
            with patch.object(self.trainer, "iter", done), patch.object(inner, "iter", done):
                own.save(name, iteration=done)
        return f"The last checkpoint is {own.get_checkpoint_file()}"
