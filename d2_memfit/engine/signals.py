# Copyright (c) the d2_memfit developers.
"""Signals that end a run, passed on to ranks and kept away from loader workers."""

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker
from typing import Any

from torch.multiprocessing import ProcessExitedException

__all__ = ["SIGNALS", "leave_signals_to_parent", "signals_passed_on"]

SIGNALS = [getattr(signal, n) for n in ("SIGTERM", "SIGINT", "SIGUSR2") if hasattr(signal, n)]

_LOOK_FOR_PARENT_S = 5


@contextmanager
def signals_passed_on() -> Iterator[None]:
    """While open, pass signals on to the processes started here. A second SIGINT kills all.

    Raises:
        SystemExit: the processes ended because of a signal. The status is 128 + the first one's
            number.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    received: list[int] = []

    def pass_on(number: int, frame: Any) -> None:
        children = multiprocessing.active_children()
        if number == signal.SIGINT in received:
            for child in children:
                child.kill()
            raise KeyboardInterrupt
        received.append(number)
        for child in children:
            # A terminal's Ctrl-C has reached them already, and their second ends them at once.
            passed = signal.SIGTERM if number == signal.SIGINT else number
            if child.pid is not None:
                os.kill(child.pid, passed)

    if hasattr(signal, "SIGUSR2"):
        # Python's tracker of semaphores ignores the others only, and inherits what is ignored.
        before = signal.signal(signal.SIGUSR2, signal.SIG_IGN)
        resource_tracker.ensure_running()
        signal.signal(signal.SIGUSR2, before or signal.SIG_DFL)
    former = {number: signal.signal(number, pass_on) for number in SIGNALS}
    try:
        yield
    except ProcessExitedException:
        if received:
            sys.exit(128 + received[0])
        raise
    finally:
        for number, handler in former.items():
            signal.signal(number, handler or signal.SIG_DFL)


def leave_signals_to_parent() -> None:
    """In a worker: take no notice of signals that all processes of a job get. It ends when the
    process that started it asks, or is gone.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()


def _end_with(parent: int) -> None:
    """PyTorch's workers end without their parent, too, but for those whose last batches no one has
    taken: each waits for a reader, and its siblings hold the pipe open.
    """
    while os.getppid() == parent:
        received = signal.sigtimedwait({signal.SIGTERM}, _LOOK_FOR_PARENT_S)
        if received is not None and received.si_pid == parent:
            break
    os._exit(0)
