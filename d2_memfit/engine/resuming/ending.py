# Copyright (c) the d2_memfit developers.
"""Endings of a run by a signal, an error or a dead process: the last completed step is saved."""

import contextlib
import itertools
import logging
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Optional, TypeVar

from detectron2.engine import HookBase, TrainerBase
from detectron2.engine.hooks import LRScheduler, PeriodicCheckpointer
from detectron2.utils import comm
from fvcore.common.checkpoint import Checkpointer
from torch import nn

from ... import compat
from ...common.logs import tracebacks_only_in_files, write_traceback
from ...common.side_work import unchanged_random_state
from ...compat.pytorch import default_store
from ...errors import START_HERE, MemfitError, RankError, one_line
from ...memory import is_killed_worker, is_lost_rank, is_out_of_memory
from ...techniques import ShardedOptimizer
from ..window import host_memory_error
from .checkpoint import MemfitCheckpointer
from .signals import SIGNALS, handle, is_free, raising_handlers_held_back, say_ended

__all__ = [
    "Progress",
    "SaveOnEnding",
    "call_after_train",
    "causes_named",
    "checkpointers_of",
    "saved_at_end",
]

logger = logging.getLogger(__name__)

_Checkpointer = TypeVar("_Checkpointer", bound=Checkpointer)

_training_numbers = itertools.count()  # the same on all ranks, which train together


@dataclass
class Progress:
    """The progress of an iteration, for a checkpoint if the run ends in it."""

    iteration: int
    put_back: Callable[[], None] = lambda: None  # restores the state before the iteration
    is_stepping: bool = False  # the optimizer changes weights, and has not finished
    has_stepped: bool = False


@contextmanager
def saved_at_end(trainer: TrainerBase) -> Iterator[None]:
    """Around a trainer's ``train``: however it ends, the last completed step is saved.

    This needs a :class:`SaveOnEnding` among the trainer's hooks. A project's own loop may not call
    ``after_train`` after an error.

    Raises:
        SystemExit: a signal has asked the run to end. The status is 128 + its number.
    """
    show_tracebacks = tracebacks_only_in_files()
    try:
        yield
    except Exception as e:
        if explanation := _explanation(trainer, e):
            raise explanation from e
        raise
    finally:
        try:
            _end(trainer)
        finally:
            for checkpointer in checkpointers_of(trainer, MemfitCheckpointer):
                checkpointer.end_run()
            show_tracebacks()
    if number := getattr(compat.inner_trainer(trainer), "stop_signal", 0):
        say_ended(number, "The run is complete")
        raise SystemExit(128 + number)


def checkpointers_of(
    trainer: TrainerBase, kind: type[_Checkpointer] = Checkpointer
) -> list[_Checkpointer]:
    """The checkpointers of a trainer and of its hooks, its own first."""
    holders = (trainer, *compat.hooks_of(trainer))
    values = [getattr(trainer, "checkpointer", None)]
    values += [value for holder in holders for value in vars(holder).values()]
    return list({id(value): value for value in values if isinstance(value, kind)}.values())


def call_after_train(trainer: TrainerBase, hooks: Callable[[], None]) -> None:
    """Call ``after_train`` of a trainer's hooks. If the run has failed, it is saved first.

    If a run fails in its last iteration, Detectron2's ``EvalHook`` would evaluate as after a
    finished run, while other ranks wait elsewhere. So hooks see an earlier iteration then.

    A ``train`` of the project's own may stop early, or leave ``iter`` at the last iteration.
    Without an error, such a run has not failed.

    Args:
        hooks: calls them.
    """
    now = trainer.iter
    endings = [hook for hook in compat.hooks_of(trainer) if isinstance(hook, SaveOnEnding)]
    if now >= trainer.max_iter or not any(hook.is_failing() for hook in endings):
        hooks()
        return
    try:
        _end(trainer)
    finally:
        with compat.at_iteration(trainer, min(now, trainer.max_iter - 2)):
            try:
                hooks()
            except Exception as e:  # the first error is the one to be raised
                logger.error("After the end of the run, a hook failed too: %s", one_line(e))


def _end(trainer: TrainerBase) -> None:
    for hook in compat.hooks_of(trainer):
        if isinstance(hook, SaveOnEnding):
            try:
                hook.end()
            except RuntimeError:  # PyTorch's handler for a dead worker raises once, perhaps here
                hook.end()
                raise


def _explanation(trainer: TrainerBase, error: BaseException) -> Optional[BaseException]:
    """The error that names the hook in which memory ran out, under MEMFIT.OOM.POLICY split.

    Such hooks average weights, evaluate or write checkpoints.
    """
    recovery = getattr(compat.inner_trainer(trainer), "recovery", None)
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    objects = (frame.f_locals.get("self") for frame in frames)
    hook = next((o for o in objects if isinstance(o, HookBase)), None)  # the outermost
    if recovery is None or hook is None:
        return None
    explanation: Optional[BaseException] = recovery.oom_log.explanation(
        error, f"hook {type(hook).__name__}"
    )
    return explanation


@contextmanager
def causes_named() -> Iterator[None]:
    """Around a rank's main function: raise the cause of an error, as :class:`SaveOnEnding` does.

    The error's traceback is only in the log's file, if there is one.
    """
    try:
        yield
    except MemfitError:
        raise
    except Exception as error:
        write_traceback(error)
        cause = _cause_of(error)
        if cause is error:
            raise
        raise cause from error


def _cause_of(error: BaseException, worker_was_killed: bool = False) -> BaseException:
    """The error itself, or the one that names the other process that is its cause."""
    if isinstance(error, MemfitError) or not isinstance(error, Exception):
        return error
    # PyTorch raises it wherever this process is; or the connection to the worker breaks first.
    if is_killed_worker(error) or worker_was_killed:
        return host_memory_error("a worker was killed, which the kernel does if RAM is full")
    if comm.get_world_size() > 1 and is_lost_rank(error):
        return RankError(
            "the connection to another rank is lost, because that rank has ended: its last "
            "line, or the launcher's, says why"
        )
    return error


class SaveOnEnding(HookBase):
    """Saves a checkpoint of the last completed step when a run ends early, for whatever reason.

    - SIGTERM, SIGINT, SIGUSR2 or SIGHUP to any rank: all ranks end after the iteration, even if it
      is the last one. Their exit status is that of a shell (128 + the signal's number). They agree
      in the vote at the end of each iteration. In an evaluation of an ``EvalHook`` they agree
      through the process group's store, and end before their next batch; a single process ends at
      once. If a rank has already finished its images, the evaluation runs to its end. A second
      SIGINT ends at once, without the rest of the iteration.
    - An error on any rank, such as one of the loader, or another rank's death: rank 0 saves alone.
      Before that, it undoes the unfinished iteration. The error is raised again. Its traceback is
      only in the log file.

    A step that the optimizer has not finished is never saved, and neither are weights that are not
    finite. One line says what is saved, or why it is not.

    Random numbers of an evaluation do not affect training: it continues with the numbers that it
    would have drawn without the evaluation, even if the run ended in the evaluation and is resumed.
    If the last save of a run failed, it is repeated when the run is resumed.

    Register it on all ranks, after all other hooks, in a trainer that is an ``AccumulatingTrainer``
    or has one. Only the main thread of a process receives signals.

    Args:
        checkpointer: writes ``model_<iteration>.pth`` on rank 0. Other ranks need none.
        stops_on_signals: whether it handles signals. A signal that has a handler keeps it.
    """

    def __init__(self, checkpointer: Optional[Checkpointer], stops_on_signals: bool = True) -> None:
        self._checkpointer = checkpointer
        self._stops_on_signals = stops_on_signals
        self._status = 0
        self._is_training = False
        self._is_interrupted = False
        self._is_evaluating = False
        self._run_step_tells = False  # its progress; a project's own run_step may not
        self._training = 0
        self._evaluation_key = ""
        self._other_error: Optional[BaseException] = None  # handled outside, while this run trains
        self._inner: Any = None  # the trainer that runs the steps
        self._undo = contextlib.ExitStack()  # undoes the changes for the time of training

    def before_train(self) -> None:
        self._inner = compat.inner_trainer(self.trainer)
        self._inner.stop_signal = 0
        self._inner.progress = Progress(self.trainer.start_iter - 1, has_stepped=True)
        self._status = 0
        self._is_training = True
        self._is_interrupted = False
        self._run_step_tells = False
        self._training = next(_training_numbers)
        self._other_error = sys.exc_info()[1]
        if self._stops_on_signals:
            self._undo.callback(handle(filter(is_free, SIGNALS), self._note))
        compat.replace_evaluations(self.trainer, lambda run: partial(self._evaluate, run))
        self._complete_last_save()

    def _complete_last_save(self) -> None:
        """Save ``model_final`` if this failed in the run that is resumed."""
        last = self.trainer.start_iter - 1
        if self.trainer.start_iter != self.trainer.max_iter:
            return
        self._inner.run_state.restore_again(self.trainer.start_iter)
        saves = any(isinstance(h, PeriodicCheckpointer) for h in compat.hooks_of(self.trainer))
        own = self._checkpointer if isinstance(self._checkpointer, MemfitCheckpointer) else None
        with compat.at_iteration(self.trainer, last):  # the run is not complete
            self._inner.gather_states()
            if saves and own is not None and not own.has("model_final", last):
                own.save("model_final", iteration=last)

    def _note(self, number: int, frame: Any) -> None:
        if number == signal.SIGINT:
            if self._is_interrupted:
                raise KeyboardInterrupt
            self._is_interrupted = True  # a logger might be in use
            os.write(2, b"\nEnding after this iteration. Ctrl-C again ends now, and saves too\n")
        self._inner.stop_signal = self._inner.stop_signal or number
        if self._is_evaluating and comm.get_world_size() == 1:
            self._leave(number)

    def before_step(self) -> None:
        self._inner.agreed_stop_signal = None
        if not self._run_step_tells:
            self._inner.progress = None

    def after_step(self) -> None:
        number = self._inner.agreed_stop_signal
        progress = self._inner.progress
        is_told = progress is not None and progress.iteration == self.trainer.iter
        if not is_told:
            self._inner.progress = Progress(self.trainer.iter, has_stepped=True)
        self._run_step_tells = is_told and number is not None
        if number is None:  # a project's run_step took no vote
            number = max(comm.all_gather(self._inner.stop_signal))
        elif comm.get_world_size() == 1:
            number = self._inner.stop_signal
        if number:
            self._leave(number)

    def _leave(self, number: int) -> None:
        self._inner.stop_signal = number
        self._status = 128 + number
        raise SystemExit(self._status)

    def after_train(self) -> None:
        self.end()

    def is_failing(self) -> bool:
        """Whether an error is ending the run."""
        error = sys.exc_info()[1]
        return error is not None and error is not self._other_error

    def end(self) -> None:
        """Save what is not saved yet, and take the handlers back. Call it in an ``except`` or
        ``finally`` if a loop does not call ``after_train`` after an error.

        If PyTorch's handler for a dead worker raises here, once, the next call saves.
        """
        if not self._is_training:
            return
        error = sys.exc_info()[1]
        try:
            with raising_handlers_held_back() as came:
                self._is_training = False
                if self._status:
                    self._save_with_all_ranks()
                elif error is not None and self.is_failing():
                    self._save_alone(error)
                came.clear()
        finally:
            if not self._is_training:
                self._undo.close()

    def _save_with_all_ranks(self) -> None:
        progress = self._inner.progress  # None in a run_step of a project's own
        last = self.trainer.iter if progress is None else progress.iteration
        name = signal.Signals(self._inner.stop_signal).name
        logger.warning("%s: ending after iteration %d. --resume continues from there", name, last)
        try:
            with compat.at_iteration(self.trainer, last):
                self._inner.gather_states()
        except RuntimeError as e:  # another rank has died
            self._save_alone(e)
        try:
            if self._is_finite():  # the weights are the same on all ranks
                self._save(last)
            else:
                logger.error(
                    "The state after iteration %d is not saved: the weights are not finite", last
                )
        finally:
            with contextlib.suppress(RuntimeError):  # another rank may have died
                comm.synchronize()  # a launcher ends all ranks when the first has ended

    def _save_alone(self, error: BaseException) -> None:
        """Save the last completed step without other ranks, and say so in one line."""
        number = self._inner.stop_signal
        explanation = _explanation(self.trainer, error)
        if comm.is_main_process():
            try:
                kept = self._save_last_completed()
            except Exception as e:  # a device may be lost, or memory be short
                kept = f"The state could not be saved: {type(e).__name__}: {one_line(e)}"
        else:
            kept = "Rank 0 saves the state of all ranks"
        said = explanation or _cause_of(error, self._inner.run_state.has_killed_worker())
        ended_by = signal.Signals(number).name if number else type(said).__name__
        file = write_traceback(error)
        where = f". The traceback is in {file}" if file else ""
        advice = ""
        if is_out_of_memory(said):
            advice = f". What to do: {START_HERE}"
        elif isinstance(said, FloatingPointError):
            advice = ". Fix the cause before you resume, or the error comes again"
        iteration = self.trainer.iter
        is_over = iteration >= self.trainer.max_iter
        logger.error(
            "%s ended the run %s. %s%s%s",
            ended_by,
            "after its last iteration" if is_over else f"in iteration {iteration}",
            kept,
            where,
            advice,
        )
        if number and isinstance(error, Exception):  # such as that of a worker that got it too
            raise SystemExit(128 + number)
        if said is not error:
            raise said from error

    def _save_last_completed(self) -> str:
        """Save, and return what was saved, or why nothing was."""
        last, reason = self._last_completed()
        if reason:
            return f"Its state is not saved: {reason}"
        if last < 0:
            return "No step was completed"
        if self._checkpointer is None:
            return "Its state is not saved: there is no checkpointer"
        sharded = isinstance(self._inner.optimizer, ShardedOptimizer)
        if sharded and comm.get_world_size() > 1:
            return "Its state is not saved: the optimizer's state is spread over all ranks"
        if not self._is_finite():
            return "Its state is not saved: the weights are not finite"
        file = self._save(last)
        return f"The state after iteration {last} is in {file}, and --resume continues from there"

    def _is_finite(self) -> bool:
        return all(bool(p.isfinite().all()) for p in self._inner.model.parameters())

    def _last_completed(self) -> tuple[int, str]:
        """The last iteration whose step is complete, after later changes are undone. If there is
        none, the reason.
        """
        progress = self._inner.progress
        if progress is None:
            return -1, "this trainer's own run_step does not tell how much of the step is done"
        if progress.has_stepped:
            for hook in compat.hooks_of(self.trainer):  # an error may have come before this one
                is_late = isinstance(hook, LRScheduler) and (
                    hook.scheduler.last_epoch == progress.iteration
                )
                if is_late:
                    hook.scheduler.step()
            return progress.iteration, ""
        if progress.is_stepping:
            return -1, "the optimizer had not finished its step"
        progress.put_back()
        return progress.iteration - 1, ""

    def _save(self, iteration: int) -> str:
        """The file that has the state after an iteration."""
        if self._checkpointer is None:
            return ""
        name = f"model_{iteration:07d}"
        last = os.path.basename(self._checkpointer.get_checkpoint_file())
        is_final = last == "model_final.pth" and iteration + 1 == self.trainer.max_iter
        if last != f"{name}.pth" and not is_final:
            save = getattr(self._checkpointer, "save_or_raise", self._checkpointer.save)
            with compat.at_iteration(self.trainer, iteration):
                save(name, iteration=iteration)
        return self._checkpointer.get_checkpoint_file()

    def _evaluate(self, evaluate: Callable[[], Any]) -> Any:
        """Run an evaluation that can stop before each batch."""
        model = compat.without_ddp(self._inner.model)
        self._evaluation_key = f"d2_memfit/{self._training}/{self.trainer.iter}"

        def train(mode: bool = True) -> nn.Module:
            if mode:  # inference_on_dataset has finished its batches
                self._agree_in_evaluation(is_through=True)
                self._evaluation_key += "/next"
            return type(model).train(model, mode)

        model.__dict__["train"] = train  # a module has no hook for it
        before_batch = model.register_forward_pre_hook(lambda *_: self._agree_in_evaluation())
        try:
            self._is_evaluating = True
            with unchanged_random_state(next(model.parameters()).device):
                return evaluate()
        finally:
            self._is_evaluating = False
            before_batch.remove()
            del model.__dict__["train"]

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
