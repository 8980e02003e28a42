# Copyright (c) the d2_memfit developers.
import os
import sys
import time
from contextlib import closing
from functools import partial

import psutil
import pytest

from d2_memfit.measure.worker import Worker, started_ahead

pytestmark = pytest.mark.slow

SAY = """
import json, subprocess, sys, time
def say(**record):
    print("d2_memfit record: " + json.dumps(record), flush=True)
"""
CHILD = "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(100)'])"


def worker(code):
    return Worker([sys.executable, "-c", SAY + code], dict(os.environ))


def ended(pid, seconds=10):
    end = time.monotonic() + seconds
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


def test_records_are_taken_and_other_lines_are_not():
    records = []
    code = "print('of a library'); say(given=sys.stdin.read()); say(b=2)"
    assert worker(code).run("items", 60, records.append) is None
    assert records == [{"given": "items"}, {"b": 2}]


def test_the_last_line_of_the_errors_says_why_a_process_ended():
    records = []
    error = worker("say(a=1); raise ValueError('no such card')").run("", 60, records.append)
    assert error == "status 1: ValueError: no such card"
    assert records == [{"a": 1}]


def test_a_process_whose_time_is_over_ends_with_those_it_has_started():
    pids = []
    code = f"child = {CHILD}; say(pid=child.pid); time.sleep(100)"
    start = time.monotonic()
    error = worker(code).run("", 3, lambda record: pids.append(record["pid"]))
    assert error == "the time was over"
    assert time.monotonic() - start < 30
    assert ended(pids[0])


def test_the_next_processes_are_started_while_one_runs(tmp_path):
    code = f"import os; open(f'{tmp_path}/{{os.getpid()}}', 'w'); sys.stdin.read()"
    with closing(started_ahead([partial(worker, code)] * 4, 2)) as workers:
        for number, each in enumerate(workers):
            end = time.monotonic() + 60
            while len(list(tmp_path.iterdir())) < number + 3:  # this one, and two ahead
                assert time.monotonic() < end
                time.sleep(0.02)
            assert each.run("", 60, print) is None
            if number == 1:
                break
        waiting = psutil.Process().children()
        pids = [p.pid for p in waiting if code in " ".join(p.cmdline())]
        assert len(pids) == 2
    assert all(map(ended, pids))
