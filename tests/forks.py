# Copyright (c) the d2_memfit developers.
"""Processes that begin with PyTorch, Detectron2 and this package imported.

These imports take four seconds of a CPU, more than most jobs of tests. A server makes them once,
and each process is a fork of it. All else is as in a process that Python starts: the script runs
as ``__main__``, with arguments, environment, folder and limits of its own.
"""

import atexit
import contextlib
import fcntl
import gc
import multiprocessing
import os
import resource
import runpy
import signal
import subprocess
import sys
import tempfile
import warnings
from multiprocessing import forkserver
from pathlib import Path
from types import ModuleType
from unittest import mock

import torch

CONTEXT = multiprocessing.get_context("forkserver")
_COMMANDS = ["d2_memfit.cli.command_line", "d2_memfit.cli.train"]
CONTEXT.set_forkserver_preload([*_COMMANDS, "ranks", "tiny"])

# A script for "-c", before the arguments of another one: its ranks are forks, and import nothing.
FORKED_RANKS = """
import multiprocessing, os, runpy, signal, sys
from d2_memfit.engine.ending import SIGNALS

def as_in_a_new_process():
    for number in SIGNALS:
        is_ctrl_c = number == signal.SIGINT
        signal.signal(number, signal.default_int_handler if is_ctrl_c else signal.SIG_DFL)

context_of = multiprocessing.get_context
multiprocessing.get_context = lambda method=None: context_of("fork" if method else None)
os.register_at_fork(after_in_child=as_in_a_new_process)
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""

_ENVIRONMENT = dict(os.environ)  # before any test has changed it


def start_server():
    """Start what processes of :data:`CONTEXT` are forks of, unless it is there.

    It has no limit of memory that a test has set on its own process.
    """
    environment = {**_ENVIRONMENT, "PYTHONPATH": os.pathsep.join(sys.path)}
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))
    try:
        with mock.patch.dict(os.environ, environment, clear=True):
            forkserver.ensure_running()
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def end_with_parent(owner):
    """Let SIGIO end a process, or the group of a negative number, when the test process is gone."""
    sentinel = multiprocessing.parent_process().sentinel
    fcntl.fcntl(sentinel, fcntl.F_SETOWN, owner)
    fcntl.fcntl(sentinel, fcntl.F_SETFL, os.O_ASYNC)


class Forked:
    """``python ARGUMENTS``, with the methods of :class:`subprocess.Popen` that tests need.

    Args:
        arguments: a script, ``-c CODE`` or ``-m MODULE``, and what follows.
        stdout: file for what the process prints.
        stderr: file for its errors, if that is another one.
        limits: pairs for :func:`resource.setrlimit`, of which each is a hard limit too.

    The process has a session of its own, and prints no warnings.
    """

    def __init__(self, arguments, stdout, stderr=None, cwd=None, env=None, limits=()):
        start_server()
        files = str(stdout), str(stderr or stdout)
        given = [a if isinstance(a, bytes) else str(a) for a in arguments]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **(env or {})}
        options = (given, files, str(cwd or os.getcwd()), environment, limits)
        self._process = CONTEXT.Process(target=_run, args=options)
        self._process.start()
        self.pid = self._process.pid

    def poll(self):
        return self._process.exitcode

    def wait(self, timeout_s):
        self._process.join(timeout_s)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("a forked process", timeout_s)
        return self._process.exitcode

    def kill(self):
        self._process.kill()


def run_forked(*arguments, timeout_s=180, **options):
    """As :func:`tiny.run_process`, for the arguments of Python: see :class:`Forked`."""
    with tempfile.TemporaryDirectory() as folder:
        stdout, stderr = Path(folder, "stdout"), Path(folder, "stderr")
        process = Forked(arguments, stdout, stderr, **options)
        try:
            status = process.wait(timeout_s)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        printed = stdout.read_text(), stderr.read_text()
    return subprocess.CompletedProcess(arguments, status, *printed)


def _run(arguments, files, folder, environment, limits):
    os.setsid()
    end_with_parent(-os.getpid())
    gc.freeze()  # as in conftest.py
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored if the suite runs behind "&"
    multiprocessing.set_start_method(None, force=True)  # that of workers: the system's
    for number, file in enumerate(files, 1):
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        os.dup2(descriptor, number)
        os.close(descriptor)
    sys.stdout = os.fdopen(1, "w", closefd=False)  # the server's may be a file, with a position
    sys.stderr = os.fdopen(2, "w", 1, closefd=False, errors="backslashreplace")
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.warnoptions[:] = ["ignore"]  # the processes that this one starts have it too
    warnings.simplefilter("ignore")
    if "OMP_NUM_THREADS" in environment:  # which PyTorch has read already
        torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))
    for limit, value in limits:
        resource.setrlimit(limit, (value, value))
    try:
        _run_as_main(*map(os.fsdecode, arguments))
    except SystemExit:
        raise
    except BaseException:
        sys.excepthook(*sys.exc_info())
        sys.exit(1)
    finally:
        atexit._run_exitfuncs()


def _run_as_main(first, *rest):
    if first == "-m":
        sys.path.insert(0, os.getcwd())
        module, *sys.argv[1:] = rest
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    elif first == "-c":
        sys.path.insert(0, "")
        code, *sys.argv[1:] = rest
        sys.argv[0] = "-c"
        sys.modules["__main__"] = ModuleType("__main__")
        exec(compile(code, "<string>", "exec"), sys.modules["__main__"].__dict__)
    else:
        sys.path.insert(0, os.path.dirname(os.path.abspath(first)))
        sys.argv = [first, *rest]
        runpy.run_path(first, run_name="__main__")
