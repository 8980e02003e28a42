# Copyright (c) the d2_memfit developers.
"""Answers of estimate and plan, kept to be shown again at once, without PyTorch.

An answer is shown again if the question, the environment, and all files and folders are the same
that Python read for it, sources included. Packages of site-packages count as the same until one is
installed or removed; of Detectron2, fvcore and d2_memfit each source counts. Answers about a CPU
are not kept, because they start from the memory of the process, and neither are measured ones.
"""

import argparse
import contextlib
import hashlib
import importlib.util
import json
import os
import shlex
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from types import FrameType
from typing import Any, Optional

from .. import __version__
from .command_line import files_read

__all__ = ["FILE", "Reads", "keep_answer", "known_answer", "show_again"]

FILE = "PLAN_FILE"  # stands for --output in an answer's next command

_MOST_ANSWERS = 64  # the oldest go
_OTHERS = ("output", "html", "json", "no_cache", "reads")  # they do not change an answer
# Variables of a terminal and a login, which change nothing.
_OF_TERMINALS = (
    *("COLUMNS", "LINES", "OLDPWD", "PWD", "SHLVL", "TERM", "WINDOWID", "_"),
    *("DBUS_", "SSH_", "TMUX", "XDG_SESSION", "VSCODE_"),
)
_EACH_SOURCE = ("detectron2", "d2_memfit", "fvcore")
_SITE = f"{os.sep}site-packages{os.sep}"
_STDLIB = os.path.dirname(os.__file__) + os.sep
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT

_State = Optional[list[int]]  # of a file: when it was changed, and its size; None: not there


class Reads:
    """The files and folders that this process reads from now on, as they are at their first read.

    Attributes:
        answer: the file for the answer. A command may change the environment, which is in its name.
        states: by path.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self.answer = _file_of(args)
        self.states: dict[str, _State] = {}
        self._written: set[str] = set()
        self._is_over = False
        sys.addaudithook(self._note)

    def _note(self, event: str, args: tuple[Any, ...]) -> None:
        if self._is_over or event not in ("open", "os.listdir", "os.scandir", "os.rename"):
            return
        path = args[1] if event == "os.rename" else args[0]
        if not isinstance(path, (str, os.PathLike)):
            return
        if event == "os.rename" or (event == "open" and args[2] & _WRITES):
            self._written.add(os.path.abspath(path))
        elif os.path.isdir(path) if event == "open" else _is_of_packages(sys._getframe(1)):
            return  # a folder that is opened is flushed, not listed
        else:
            self.add(path)

    def add(self, path: Any) -> None:
        """Add a file, a folder, or one that is not there."""
        path = os.path.abspath(path)
        if path.endswith(".pyc"):
            with contextlib.suppress(ValueError, NotImplementedError):
                path = importlib.util.source_from_cache(path)
        site, is_of_site, name = path.partition(_SITE)
        if is_of_site and not name.startswith(_EACH_SOURCE):
            path = site + _SITE.rstrip(os.sep)
        elif path.startswith((_STDLIB, "/proc/", "/sys/")):
            return
        if path not in self.states:
            self.states[path] = _state_of(path)

    def end(self) -> None:
        """Read no more, and forget what the command has written itself, and what is gone."""
        self._is_over = True
        for path, state in [*self.states.items()]:
            if path in self._written or (state and _was_temporary(path)):
                del self.states[path]


def _is_of_packages(frame: Optional[FrameType]) -> bool:
    """Whether an import, or a package that is not watched, looks into a folder."""
    while frame is not None:
        name = frame.f_code.co_filename
        of_site = name.partition(_SITE)[2]
        if name.startswith(("<frozen importlib", f"{_STDLIB}importlib")) or of_site:
            return not of_site.startswith(_EACH_SOURCE)
        if not name.startswith((_STDLIB, "<")):
            return False
        frame = frame.f_back
    return False


def _state_of(path: str) -> _State:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return [status.st_mtime_ns, status.st_size]


def show_again(args: argparse.Namespace, answer: dict[str, Any]) -> None:
    """Print an answer that was kept, and write its plan to ``--output``."""
    next_step = answer["next"]
    if getattr(args, "output", None) and answer["file"]:
        from ..common.files import check_outputs, output_file  # with PyTorch
        from ..errors import exit_on_error

        exit_on_error(check_outputs)([args.output], files_read(args))
        with output_file(args.output, "w") as file:
            file.write(answer["file"])
        written, _, train = answer["next of file"].partition("\n")
        train = train.replace(FILE, shlex.quote(str(args.output)))
        next_step = written.replace(FILE, str(args.output)) + "\n" + train
    again = f"From {answer['when']}: nothing has changed since. --no-cache computes it again"
    print(again, file=sys.stderr)
    print(answer["json"] if args.json else "\n\n".join(filter(None, [answer["text"], next_step])))


def known_answer(args: argparse.Namespace) -> Optional[dict[str, Any]]:
    """The answer to a command that was kept, if it still holds."""
    try:
        file = _file_of(args)
        if args.no_cache:
            return None
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)  # before its folder is read
        if args.html or file.parent.stat().st_uid != os.getuid():
            return None
        kept = json.loads(file.read_text())
        holds = all(_state_of(path) == state for path, state in kept["states"].items())
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        return None
    is_python = str(getattr(args, "output", None)).endswith(".py")  # a LazyConfig is written anew
    return kept if holds and not is_python else None


def keep_answer(
    args: argparse.Namespace, reads: Reads, more: Iterable[str], answer: dict[str, Any]
) -> None:
    """Keep an answer to a command; silently not, if the cache's folder cannot be written.

    Args:
        more: files and folders on which it depends, whether they are there or not.
    """
    reads.end()
    if args.no_cache or args.probe or getattr(args, "budget", None) == "auto":
        return
    for path in more:
        reads.add(path)
    file = reads.answer
    when = time.strftime("%Y-%m-%d %H:%M")
    with contextlib.suppress(OSError):
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        new = file.with_suffix(f".{os.getpid()}")
        new.write_text(json.dumps({**answer, "when": when, "states": reads.states}))
        new.replace(file)
        kept = sorted(file.parent.glob("*.json"), key=lambda path: path.stat().st_mtime)
        for old in kept[:-_MOST_ANSWERS]:
            old.unlink()


def _was_temporary(path: str) -> bool:
    return path.startswith(tempfile.gettempdir() + os.sep) and not os.path.exists(path)


def _file_of(args: argparse.Namespace) -> Path:
    question = {k: str(v) for k, v in vars(args).items() if k not in _OTHERS}
    environment = {k: v for k, v in os.environ.items() if not k.startswith(_OF_TERMINALS)}
    gpus = (
        [name for name in os.listdir("/dev") if name.startswith("nvidia")] if os.sep == "/" else []
    )
    software = [__version__, sys.version, sys.executable, sorted(gpus), os.getcwd()]
    text = json.dumps([question, environment, software], sort_keys=True)
    folder = os.environ.get("D2_MEMFIT_CACHE") or os.path.expanduser("~/.cache/d2_memfit")
    return Path(folder) / "answers" / f"{hashlib.sha256(text.encode()).hexdigest()}.json"
