# Copyright (c) the d2_memfit developers.
"""Signals that end a run, passed on to ranks and kept away from loader workers."""

import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from multiprocessing import resource_tracker
from multiprocessing.util import register_after_fork
from typing import Any

from torch.multiprocessing import ProcessExitedException

from ...compat.pytorch import is_loader_worker

__all__ = [
    "SIGNALS",
    "end_with_launcher",
    "handle",
    "is_free",
    "leave_signals_to_launcher",
    "leave_signals_to_parent",
    "raising_handlers_held_back",
    "say_ended",
    "signals_end_at_once",
    "signals_held_back",
    "signals_passed_on",
]

logger = logging.getLogger(__name__)

_NAMES = ("SIGTERM", "SIGINT", "SIGUSR2", "SIGHUP")
SIGNALS = [getattr(signal, name) for name in _NAMES if hasattr(signal, name)]

_RAISING = [getattr(signal, name) for name in ("SIGCHLD", "SIGINT") if hasattr(signal, name)]

_ON_LINUX = hasattr(signal, "sigtimedwait")
_LOOK_FOR_PARENT_S = 2


def is_free(number: int) -> bool:
    """Whether nobody handles a signal. submitit, for example, has its own handler."""
    if _is_free(number):
        return True
    handler, name = signal.getsignal(number), signal.Signals(number).name
    if handler != signal.SIG_IGN:
        logger.warning(
            "%s has a handler already, which is left alone: it does not end the run", name
        )
    return False


def _is_free(number: int) -> bool:
    handler = signal.getsignal(number)
    if handler == signal.SIG_IGN:  # nohup asks for it
        return signal.Signals(number).name != "SIGHUP"
    return handler in (signal.SIG_DFL, signal.default_int_handler, _end_at_once)


@contextmanager
def signals_end_at_once() -> Iterator[None]:
    """While open, a signal ends this process with one line, and open contexts are closed.

    Training inside of it handles signals itself, from its start to its end.
    """
    take_back = handle(filter(_is_free, SIGNALS), _end_at_once)
    try:
        yield
    finally:
        take_back()


def _end_at_once(number: int, frame: Any) -> None:
    say_ended(number, "No training was running")
    sys.exit(128 + number)


def say_ended(number: int, state: str) -> None:
    """Say on the terminal that a signal has ended this process; a logger might be in use."""
    os.write(2, f"{signal.Signals(number).name}: ended. {state}\n".encode())


def leave_signals_to_launcher() -> None:
    """In a rank, until it trains: a signal ends it by the system's default, without a line.

    This also works while the rank waits for others, when Python's handlers are not called.
    """
    handle(filter(_is_free, SIGNALS), signal.SIG_DFL)
    if _ON_LINUX:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)  # held back while it was started


@contextmanager
def signals_held_back() -> Iterator[None]:
    """While open, signals are blocked, and child processes inherit the blocked signals.

    Loader workers unblock them once they leave signals to their parent.
    """
    if not _ON_LINUX:
        yield
        return
    if multiprocessing.get_start_method(allow_none=True) == "spawn":
        resource_tracker.ensure_running()  # it lets signals through
    former = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, former)


def handle(numbers: Iterable[int], handler: Any) -> Callable[[], None]:
    """Handle signals, if this is the main thread; return a function that undoes this."""
    former: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        former = {number: signal.signal(number, handler) for number in numbers}

    def take_back() -> None:
        for number, original in former.items():
            signal.signal(number, original or signal.SIG_DFL)  # None if Python did not set it

    return take_back


@contextmanager
def raising_handlers_held_back() -> Iterator[list[int]]:
    """While open, handlers that may raise wait: PyTorch's for dead workers, and that of SIGINT.

    Yields:
        The numbers of the signals that were received. Their handlers are called at the end.
    """
    came: list[int] = []
    numbers = [number for number in _RAISING if callable(signal.getsignal(number))]
    take_back = handle(numbers, lambda number, _: came.append(number))
    try:
        yield came
    finally:
        take_back()
    for number in came:
        signal.raise_signal(number)


@contextmanager
def signals_passed_on() -> Iterator[None]:
    """While open, pass signals on to the processes started here. A third SIGINT kills all.

    Raises:
        SystemExit: the processes ended because of a signal. The status is 128 + the first one's
            number.
    """
    received: list[int] = []

    def pass_on(number: int, frame: Any) -> None:
        received.append(number)
        times = received.count(signal.SIGINT)
        # The first Ctrl-C of a terminal has reached the processes already; a second one is new.
        passed = signal.SIGTERM if number == signal.SIGINT and times == 1 else number
        for child in multiprocessing.active_children():
            if child.pid is not None:
                os.kill(child.pid, signal.SIGKILL if times > 2 else passed)

    with signals_held_back():  # Python's tracker of semaphores ignores SIGTERM and SIGINT only
        resource_tracker.ensure_running()
    take_back = handle(filter(is_free, SIGNALS), pass_on)
    try:
        yield
    except ProcessExitedException as e:
        if not received:
            raise
        if -e.exit_code in (signal.SIGTERM, received[0]):  # by the system, before it trained
            say_ended(received[0], "No training was running")
        sys.exit(128 + received[0])
    finally:
        take_back()


def end_with_launcher() -> None:
    """In a rank: get a SIGTERM when the process that started it is gone, as after ``kill -9``.

    Otherwise it would train on, unnoticed.
    """

    def watch(parent: int) -> None:
        while os.getppid() == parent:
            time.sleep(_LOOK_FOR_PARENT_S)
        os.kill(os.getpid(), signal.SIGTERM)

    launcher = multiprocessing.parent_process()  # None under torchrun
    parent = launcher.pid if launcher is not None and launcher.pid else os.getppid()
    threading.Thread(target=watch, args=(parent,), daemon=True).start()


def leave_signals_to_parent(_: Any = None) -> None:
    """In a loader worker: ignore signals that all processes of a job get. The worker ends when the
    process that started it asks for it, or is gone.

    Forked workers call this themselves, whichever code starts them. Spawned ones call it in
    ``ResumedImages``.
    """
    if not is_loader_worker(multiprocessing.current_process()) or not _ON_LINUX:
        return
    if signal.getsignal(signal.SIGUSR2) is _take_no_notice:
        return
    for number in set(SIGNALS) - {signal.SIGTERM}:
        signal.signal(number, _take_no_notice)  # which a program that it runs does not inherit
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    signal.pthread_sigmask(signal.SIG_SETMASK, (mask - set(SIGNALS)) | {signal.SIGTERM})
    sys.excepthook = partial(_ignore_lost_reader, sys.excepthook)
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()


register_after_fork(leave_signals_to_parent, leave_signals_to_parent)


def _take_no_notice(number: int, frame: Any) -> None:
    pass


def _ignore_lost_reader(former: Callable[..., Any], kind: type[BaseException], *error: Any) -> None:
    """Handle an error in a thread. multiprocessing's thread, which hands over file descriptors,
    loses its reader if the process that started this worker is killed.
    """
    if not issubclass(kind, (ConnectionError, EOFError)):
        former(kind, *error)


def _end_with(parent: int) -> None:
    """End this worker when its parent asks for it, or is gone.

    PyTorch's workers also end without their parent, unless nobody has read their last batches.
    Such a worker waits for a reader, because its siblings hold the pipe open.
    """
    while os.getppid() == parent:
        received = signal.sigtimedwait({signal.SIGTERM}, _LOOK_FOR_PARENT_S)
        if received is not None and received.si_pid == parent:
            break
    os._exit(0)
