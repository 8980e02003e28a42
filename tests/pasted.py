# Copyright (c) the d2_memfit developers.
"""The commands that others end with, run as by a person who pastes them."""

import os
import shlex
import subprocess
import sys
from itertools import takewhile

from tiny import ROOT


def paste(printed, folder, *more, **placeholders):
    """Run the last command after "Next" in a folder, with more arguments; return what it prints."""
    lines = printed.rpartition("\nNext")[2].splitlines()[1:]
    command = "\n".join(takewhile(lambda line: line.startswith("  "), lines))
    for name, value in placeholders.items():
        assert name in command
        command = command.replace(name, str(value))
    programs = folder / "bin"
    programs.mkdir(exist_ok=True)
    python = shlex.quote(sys.executable)
    (programs / "d2-memfit").write_text(f'#!/bin/sh\nexec {python} -m d2_memfit "$@"')
    (programs / "d2-memfit").chmod(0o755)
    path = f"{programs}:{os.path.dirname(sys.executable)}:{os.environ['PATH']}"
    result = subprocess.run(
        ["bash", "-ec", f"{command} {shlex.join(map(str, more))}"],
        check=False,
        capture_output=True,
        text=True,
        timeout=400,
        cwd=folder,
        env={**os.environ, "PATH": path, "PYTHONPATH": str(ROOT)},
    )
    assert result.returncode == 0, f"{command}\n{result.stderr[-4000:]}"
    return result.stdout
