# Copyright (c) the d2_memfit developers.
"""Gloo ranks for tests: real processes, kept from test to test because they start slowly."""

import gc
import multiprocessing
import os
import tempfile
import traceback
from datetime import timedelta

import torch
import torch.distributed as dist
from forks import CONTEXT, end_with_parent, start_server

from d2_memfit.common import compat

TIMEOUT_S = 120


class Ranks:
    """``Ranks(2).run(function, *args)`` calls ``function(rank, *args)`` on each of two ranks.

    The function must be importable. A rank that raises or takes too long fails the call; then all
    processes are killed, and the next call starts new ones.
    """

    def __init__(self, num_ranks):
        self.num_ranks = num_ranks
        self._processes, self._pipes, self._folder = [], [], None

    def run(self, function, *args):
        """Results in the order of the ranks."""
        if not self._processes:
            self._start()
        for pipe in self._pipes:
            pipe.send((function, args))
        outcomes = [_answer(pipe) for pipe in self._pipes]
        errors = [e for _, e in filter(None, outcomes) if e]
        if errors or None in outcomes:
            self.stop()
        assert not errors, "\n".join(errors)
        assert None not in outcomes, f"a rank has died, or did not answer within {TIMEOUT_S} s"
        return [result for result, _ in outcomes]

    def stop(self):
        for process in self._processes:
            process.kill()
            process.join()
        if self._folder:
            self._folder.cleanup()
        self._processes, self._pipes, self._folder = [], [], None

    def _start(self):
        start_server()
        self._folder = tempfile.TemporaryDirectory()
        init_method = f"file://{self._folder.name}/rendezvous"
        for rank in range(self.num_ranks):
            here, there = CONTEXT.Pipe()
            process = CONTEXT.Process(
                target=_serve, args=(rank, self.num_ranks, init_method, there)
            )
            process.start()
            there.close()
            self._processes.append(process)
            self._pipes.append(here)


def _answer(pipe):
    """What a rank sent; None if it takes too long or has died."""
    try:
        return pipe.recv() if pipe.poll(TIMEOUT_S) else None
    except (EOFError, ConnectionError):
        return None


def _serve(rank, num_ranks, init_method, pipe):
    end_with_parent(os.getpid())
    multiprocessing.set_start_method(None, force=True)  # that of loaders' workers: the system's
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)  # as in conftest.py
    gc.freeze()  # as there
    dist.init_process_group(
        "gloo",
        init_method=init_method,
        rank=rank,
        world_size=num_ranks,
        timeout=timedelta(seconds=TIMEOUT_S),
    )
    compat.create_local_process_group(num_ranks)
    while True:
        try:
            function, args = pipe.recv()
        except EOFError:  # the test run is over
            return
        try:
            pipe.send((function(rank, *args), None))
        except Exception:
            pipe.send((None, f"rank {rank}:\n{traceback.format_exc()}"))
