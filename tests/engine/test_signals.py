# Copyright (c) the d2_memfit developers.
"""Workers of a loader, whoever starts them, and signals."""

import os
import signal
import socket
import sys
from multiprocessing import resource_sharer

import pytest
from d2_memfit.engine.resuming import signals
from torch.utils.data import DataLoader, Dataset

pytestmark = pytest.mark.skipif(not signals._ON_LINUX, reason="workers hear all signals elsewhere")


class LosesReaders(Dataset):
    """In its worker, two readers of a file descriptor are killed before they have it."""

    def __len__(self):
        return 1

    def __getitem__(self, index):
        with open(os.devnull) as file:
            passed = resource_sharer.DupFd(file.fileno())
        for said in (b"", b"\0\0\0\7partly"):
            with socket.socket(socket.AF_UNIX) as reader:
                reader.connect(passed._id[0])
                reader.send(said)
        os.close(passed.detach())  # readers are served one after another
        sys.excepthook(ValueError, ValueError("another error"), None)
        return index


def test_a_worker_says_nothing_of_a_reader_that_was_killed(capfd):
    assert len(list(DataLoader(LosesReaders(), num_workers=1))) == 1
    said = capfd.readouterr().err.removeprefix("[rank0]: ")  # if this process had a group once
    assert said == "ValueError: another error\n"


class Signalled(Dataset):
    """Its worker gets all signals that end a run, as from a terminal or Slurm."""

    def __len__(self):
        return 8

    def __getitem__(self, index):
        for number in signals.SIGNALS:
            os.kill(os.getpid(), number)
        return index


def test_workers_of_any_loader_take_no_notice_of_signals_and_end_when_their_parent_asks():
    batches = iter(DataLoader(Signalled(), num_workers=2))
    assert [next(batches).item() for _ in range(4)] == list(range(4))
    for worker in batches._workers:
        worker.terminate()
        worker.join(10)
        assert worker.exitcode == 0


def test_a_handler_that_raises_is_called_when_that_can_do_no_harm():
    def interrupt(number, frame):
        raise KeyboardInterrupt

    def hold_back(answers):
        with signals.raising_handlers_held_back() as came:
            signal.raise_signal(signal.SIGINT)
            is_done.append(came == [signal.SIGINT])
            if answers:
                came.clear()

    is_done = []
    former = signal.signal(signal.SIGINT, interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            hold_back(answers=False)
        hold_back(answers=True)
        assert is_done == [True, True]
        assert signal.getsignal(signal.SIGINT) is interrupt
    finally:
        signal.signal(signal.SIGINT, former)
