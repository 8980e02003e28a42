# Copyright (c) the d2_memfit developers.
"""The processes that tests start."""

import signal
import sys
import time

import psutil
import pytest
from forks import Forked
from ranks import Ranks


def double(rank, number):
    return rank, 2 * number


def test_functions_of_tests_are_found_beside_another_package_of_this_name(tmp_path, monkeypatch):
    """Such as Detectron2's own tests, where its checkout is on the path."""
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "__init__.py").write_text("")
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    ranks = Ranks(2)
    try:
        assert ranks.run(double, 4) == [(0, 8), (1, 8)]
    finally:
        ranks.stop()


STARTER = """
import signal
from forks import Forked
code = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"
started = Forked(["-c", code], "started")
signal.pause()
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="Linux tells of the end of a parent")
def test_they_end_with_the_process_that_started_them_however_it_ends(tmp_path):
    starter = Forked(["-c", STARTER], tmp_path / "starter", cwd=tmp_path)
    started = tmp_path / "started"
    while not (started.exists() and started.read_text()):
        assert starter.poll() is None, (tmp_path / "starter").read_text()
        time.sleep(0.05)
    process = psutil.Process(int(started.read_text()))
    starter.send_signal(signal.SIGKILL)
    process.wait(60)
