# Copyright (c) the d2_memfit developers.
"""The text of a command, on a terminal and elsewhere."""

import argparse
import os
import pty
import re
import subprocess
import sys

import pytest
from tiny import ROOT

from d2_memfit.cli.answers import put_together


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_verdict_has_a_colour_on_a_terminal_only(is_terminal):
    """In a process of its own, whose stdout is a terminal or a pipe."""
    code = "from d2_memfit.cli.answers import coloured; print(coloured('Fits: 4.9 of 5.5 GB: yes'))"
    ours, theirs = pty.openpty() if is_terminal else os.pipe()
    environment = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "FORCE_COLOR")}
    environment.update(TERM="xterm", PYTHONPATH=str(ROOT), FORCE_COLOR="1")
    subprocess.run([sys.executable, "-c", code], stdout=theirs, env=environment, check=True)
    os.close(theirs)
    text = os.read(ours, 1000).decode().strip()
    os.close(ours)
    plain = "Fits: 4.9 of 5.5 GB: yes"
    assert (text == plain) is not is_terminal
    assert re.sub(r"\x1b\[\d*m", "", text) == plain
    assert text.endswith(" 4.9 of 5.5 GB: yes")


def test_a_reader_that_ends_early_is_no_error():
    code = "from d2_memfit.cli.answers import print_text; print_text('x' * 99); print_text('y')"
    code += "; print('done')"
    ours, theirs = os.pipe()
    os.close(ours)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    started = {"stdout": theirs, "stderr": subprocess.PIPE, "env": environment}
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=False, **started)
    os.close(theirs)
    assert (done.returncode, done.stderr) == (0, b"")


def test_all_that_is_printed_without_details_has_15_lines_at_most():
    args = argparse.Namespace(command="plan", details=False)
    answer = "\n".join(f"line {i}" for i in range(30))
    text = put_together(args, answer, "all", "Written: a\nNext, b:\n  c")
    assert len(text.splitlines()) == 15
    assert text.startswith("line 0\nline 1\n")


@pytest.mark.parametrize(
    ("command", "details", "last"),
    [
        ("plan", False, "answer\nMore: --details, --json, --html FILE\n\nNext"),
        ("doctor", False, "answer\nMore: --details\n\nNext"),
        ("explain", True, "answer\n\nall\n\nNext"),
    ],
)
def test_the_answer_comes_first_and_the_next_command_last(command, details, last):
    args = argparse.Namespace(command=command, details=details)
    assert put_together(args, "answer", "all", "Next") == last
