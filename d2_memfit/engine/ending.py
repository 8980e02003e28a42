# Copyright (c) the d2_memfit developers.
"""Endings of a run by a signal, an error or a dead process: the last completed step is saved."""

import contextlib
import logging
import multiprocessing
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import FrameType
from typing import Any, Optional

from detectron2.engine import HookBase, TrainerBase
from detectron2.engine.hooks import EvalHook, LRScheduler, PeriodicCheckpointer
from detectron2.utils import comm
from fvcore.common.checkpoint import Checkpointer
from torch.multiprocessing import ProcessExitedException

from .. import compat
from ..common.logs import tracebacks_only_in_files, write_traceback
from ..compat.pytorch import end_with_parent
from ..errors import START_HERE, MemfitError, RankError, one_line
from ..memory import is_killed_worker, is_lost_rank, is_out_of_memory
from ..techniques import ShardedOptimizer
from .checkpoint import MemfitCheckpointer
from .window import host_memory_error

logger = logging.getLogger(__name__)

_NAMES = ("SIGTERM", "SIGINT", "SIGUSR2", "SIGHUP")
SIGNALS = [getattr(signal, name) for name in _NAMES if hasattr(signal, name)]
_OF_WORKERS = [signal.SIGCHLD] if hasattr(signal, "SIGCHLD") else []


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
    return handled(_OF_WORKERS, lambda *_: None)


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


def follow_launcher() -> None:
    """In a rank, until it trains: signals end it without a line. Later it gets a SIGTERM when its
    launcher is gone, as after ``kill -9``.
    """
    for number in free_signals():
        signal.signal(number, signal.SIG_DFL)
    end_with_parent(signal.SIGTERM)


def leave_signals_to_parent() -> None:
    """In a loader worker: take no notice of signals that all processes of a job get, and end when
    the process that started it is gone.
    """
    for number in SIGNALS:
        signal.signal(number, lambda *_: None)  # which programs that it starts do not inherit
    end_with_parent(signal.SIGKILL)


@contextmanager
def signals_passed_on() -> Iterator[None]:
    """While open, pass signals on to the processes started here. A third SIGINT kills all.

    Raises:
        SystemExit: the processes ended because of a signal. The status is 128 + the first one's
            number.
    """
    received: list[int] = []

    def pass_on(number: int, frame: Optional[FrameType]) -> None:
        received.append(number)
        times = received.count(signal.SIGINT)
        # The first Ctrl-C of a terminal has reached the processes already; a second one is new.
        passed = signal.SIGTERM if number == signal.SIGINT and times == 1 else number
        for child in multiprocessing.active_children():
            os.kill(child.pid or 0, signal.SIGKILL if times > 2 else passed)

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
    with causes_named(trainer), tracebacks_only_in_files():
        try:
            yield
        finally:
            _end(trainer)
    if number := getattr(compat.inner_trainer(trainer), "stop_signal", 0):
        end_by_signal(number)  # the run is complete


def call_after_train(trainer: TrainerBase, hooks: Callable[[], None]) -> None:
    """Call ``after_train`` of a trainer's hooks. If the run has failed, it is saved first.

    Args:
        hooks: calls them.
    """
    has_failed = trainer.iter < trainer.max_iter and any(h.is_failing() for h in _endings(trainer))
    try:
        if has_failed:
            _end(trainer)
    finally:
        try:
            hooks()
        except Exception as e:
            if not has_failed:
                raise
            logger.error("After the end of the run, a hook failed too: %s", one_line(e))


def _endings(trainer: TrainerBase) -> list["SaveOnEnding"]:
    return [hook for hook in compat.hooks_of(trainer) if isinstance(hook, SaveOnEnding)]


def _end(trainer: TrainerBase) -> None:
    for hook in _endings(trainer):
        hook.after_train()


@contextmanager
def causes_named(trainer: Optional[TrainerBase] = None) -> Iterator[None]:
    """Around a rank's main function, or a training: raise an error that names the cause.

    The cause is a dead process, or a hook without memory. The traceback is only in the log's file,
    if there is one.
    """
    try:
        yield
    except MemfitError:
        raise
    except Exception as error:
        write_traceback(error)
        if cause := _cause_of(error, compat.inner_trainer(trainer)):
            raise cause from error
        raise


def _cause_of(error: Exception, inner: Any) -> Optional[Exception]:
    run_state, recovery = getattr(inner, "run_state", None), getattr(inner, "recovery", None)
    # PyTorch raises it wherever this process is; or the connection to the worker breaks first.
    if is_killed_worker(error) or (run_state is not None and run_state.has_killed_worker()):
        return host_memory_error("a worker was killed, which the kernel does if RAM is full")
    if comm.get_world_size() > 1 and is_lost_rank(error):
        return RankError(
            "the connection to another rank is lost, because that rank has ended: its last "
            "line, or the launcher's, says why"
        )
    frames = (frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__))
    hook = next((owner for owner in frames if isinstance(owner, HookBase)), None)  # the outermost
    if recovery is None or hook is None:
        return None
    return recovery.oom_log.explanation(error, f"hook {type(hook).__name__}")


class SaveOnEnding(HookBase):
    """Saves a checkpoint of the last completed step when a run ends early, for whatever reason.

    - SIGTERM, SIGINT, SIGUSR2 or SIGHUP to any rank: all ranks end after the iteration, even if it
      is the last one. Their exit status is that of a shell (128 + the signal's number). They agree
      in the vote at the end of each iteration. In an evaluation of an ``EvalHook``, a rank ends at
      once, and its launcher ends the others. A second SIGINT ends at once, too.
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
        checkpointer: writes ``model_<iteration>.pth`` on rank 0. Other ranks need none.
        stops_on_signals: whether it handles signals. A signal that has a handler keeps it.
    """

    def __init__(self, checkpointer: Optional[Checkpointer], stops_on_signals: bool = True) -> None:
        self._checkpointer = checkpointer
        self._stops_on_signals = stops_on_signals
        self._is_training = False
        self._undo = contextlib.ExitStack()  # undoes the changes for the time of training

    def before_train(self) -> None:
        self._inner: Any = compat.inner_trainer(self.trainer)  # runs the steps
        self._inner.stop_signal, self._inner.agreed_stop_signal = 0, None
        self._inner.done = self.trainer.start_iter - 1
        self._is_training, self._is_interrupted, self._has_agreed = True, False, False
        self._began, self._tells = -1, False  # a project's own run_step may not tell its progress
        self._pid = os.getpid()
        self._other_error = sys.exc_info()[1]  # handled outside, while this run trains
        if self._stops_on_signals:
            self._undo.enter_context(handled(free_signals(), self._note))
        self._complete_last_save()

    def _complete_last_save(self) -> None:
        """Save ``model_final`` if this failed in the run that is resumed."""
        own, last = self._checkpointer, self.trainer.start_iter - 1
        if self.trainer.start_iter == self.trainer.max_iter:
            self._inner.run_state.restore_again(self.trainer.start_iter)
            saves = any(isinstance(h, PeriodicCheckpointer) for h in compat.hooks_of(self.trainer))
            with compat.at_iteration(self.trainer, last):  # the run is not complete
                self._inner.gather_states()
                if (
                    saves
                    and isinstance(own, MemfitCheckpointer)
                    and not own.has("model_final", last)
                ):
                    own.save("model_final", iteration=last)

    def _note(self, number: int, frame: Optional[FrameType]) -> None:
        """Let the run end after this iteration, or at once in an evaluation."""
        if os.getpid() != self._pid:  # a worker of another loader, which was forked since
            return
        if number == signal.SIGINT and self._is_training and not self._is_stepping():
            if self._is_interrupted:
                raise KeyboardInterrupt
            self._is_interrupted = True  # a logger might be in use
            os.write(2, b"\nEnding after this iteration. Ctrl-C again ends now, and saves too\n")
        self._inner.stop_signal = self._inner.stop_signal or number
        while frame is not None:
            if isinstance(frame.f_locals.get("self"), EvalHook):
                end_by_signal(number)
            frame = frame.f_back

    def before_step(self) -> None:
        self._inner.agreed_stop_signal = None
        self._inner.undo = (lambda: None) if self._tells else None  # nothing is changed yet
        self._undo_data = self._inner.run_state.undo_point()
        self._began = self.trainer.iter

    def _is_half_done(self) -> bool:
        return bool(self._began == self.trainer.iter > self._inner.done)

    def _is_stepping(self) -> bool:
        has_voted = self._inner.agreed_stop_signal is not None
        return self._is_half_done() and self._inner.undo is None and has_voted

    def after_step(self) -> None:
        inner = self._inner
        inner.done = self.trainer.iter
        number = inner.agreed_stop_signal
        self._tells = number is not None
        is_last = self.trainer.iter + 1 == self.trainer.max_iter  # signals may have come since
        if number is None or is_last:  # or a project's run_step took no vote
            number = max(comm.all_gather(inner.stop_signal))
        elif comm.get_world_size() == 1:
            number = inner.stop_signal
        if number:
            inner.stop_signal, self._has_agreed = number, True
            raise SystemExit(128 + number)

    def is_failing(self) -> bool:
        """Whether an error is ending the run."""
        return self._is_training and sys.exc_info()[1] not in (None, self._other_error)

    def after_train(self) -> None:
        """Save what is not saved yet, and take the handlers back. Call it in an ``except`` or
        ``finally`` if a loop does not call ``after_train`` after an error.

        If PyTorch's handler for a dead worker raises here, once, the next call saves.
        """
        try:
            with worker_deaths_wait():
                has_failed, self._is_training = self.is_failing(), False
                if has_failed:
                    self._save_after(sys.exc_info()[1])
        finally:
            if not self._is_training:
                self._undo.close()
                if isinstance(self._checkpointer, MemfitCheckpointer):
                    self._checkpointer.end_run()
                # After a failure in the last iteration, EvalHook would evaluate as after a finished
                # run, while other ranks wait elsewhere.
                if has_failed:
                    self.trainer.iter = min(self.trainer.iter, self.trainer.max_iter - 2)

    def _save_after(self, error: Optional[BaseException]) -> None:
        """Save the last completed step, and say so in one line."""
        number, iteration = self._inner.stop_signal, self.trainer.iter
        kept = "Rank 0 saves the state of all ranks"
        if self._has_agreed:  # all ranks are here
            with contextlib.suppress(RuntimeError):  # but one may have died since
                self._inner.gather_states()
        if comm.is_main_process():
            try:
                kept = self._save_last_completed()
            except Exception as e:  # a device may be lost, or memory be short
                if self._has_agreed:
                    raise
                kept = f"The state could not be saved: {type(e).__name__}: {one_line(e)}"
        by = f"{signal.Signals(number).name}:" if number else type(error).__name__
        text = f"{by} ended the run in iteration {iteration}. {kept}"
        if isinstance(error, Exception) and (file := write_traceback(error)):
            text += f". The traceback is in {file}"
        if error is not None and is_out_of_memory(error):
            text += f". What to do: {START_HERE}"
        if isinstance(error, FloatingPointError):
            text += ". Fix the cause before you resume, or the error comes again"
        logger.error("%s", text)
        if number and isinstance(error, Exception):  # such as that of a worker that got it too
            raise SystemExit(128 + number)

    def _save_last_completed(self) -> str:
        """Save, and return what was saved, or why nothing was."""
        inner, own = self._inner, self._checkpointer
        is_sharded = isinstance(inner.optimizer, ShardedOptimizer) and comm.get_world_size() > 1
        if inner.done < self.trainer.start_iter:
            return "No step was completed"
        reason = ""
        if self._is_stepping():
            reason = "the optimizer had not finished its step"
        elif self._is_half_done() and inner.undo is None:
            reason = "this trainer's own run_step does not tell how much of the step is done"
        elif is_sharded and not self._has_agreed:
            reason = "the optimizer's state is spread over all ranks"
        elif self._is_half_done():
            inner.undo()
            self._undo_data()
        if not reason and not all(bool(p.isfinite().all()) for p in inner.model.parameters()):
            reason = "the weights are not finite"
        if reason or own is None:
            return f"Its state is not saved: {reason or 'there is no checkpointer'}"
        for hook in compat.hooks_of(self.trainer):  # an error may have come before this one
            if isinstance(hook, LRScheduler) and hook.scheduler.last_epoch == inner.done:
                hook.scheduler.step()
        last, name = os.path.basename(own.get_checkpoint_file()), f"model_{inner.done:07d}"
        is_final = last == "model_final.pth" and inner.done + 1 == self.trainer.max_iter
        if last != f"{name}.pth" and not is_final:
            with compat.at_iteration(self.trainer, inner.done):
                getattr(own, "save_or_raise", own.save)(name, iteration=inner.done)
        file = own.get_checkpoint_file()
        return f"The state after iteration {inner.done} is in {file}, and --resume continues there"
