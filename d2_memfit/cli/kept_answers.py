# Copyright (c) the d2_memfit developers.
"""What commands estimate and plan find, kept for the next ones.

An answer is shown again at once, without PyTorch, if the question, the environment, and all files
and folders are the same that Python read for it, sources included. Another question about the same
job, such as one with another budget, takes the dry runs of the earlier ones, on the same
conditions. Packages of site-packages count as the same until one is
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
import zipfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import FrameType
from typing import Any, Optional

from .. import __version__
from .answers import coloured, print_text, put_together
from .command_line import files_read

__all__ = [
    "FILE",
    "Reads",
    "keep_answer",
    "keep_dry_runs",
    "known_answer",
    "known_dry_runs",
    "show_again",
]

FILE = "PLAN_FILE"  # stands for --output in an answer's next command

_MOST = {"answers": 64, "dry_runs": 16}  # files; the oldest go
_OTHERS = ("details", "output", "html", "json", "no_cache", "reads")  # they do not change an answer
_OF_ANSWERS = (  # they change an answer, but no dry run
    *("command", "device", "card", "budget", "allow", "prefer"),
    *("training_only", "inference_only"),
)
_STATES = "states"
_PARTS = {"text", "details", "next", "json", "file", "status", "when"}  # of an answer
# Variables of a terminal and a login, which change nothing.
_OF_TERMINALS = ("COLUMNS", "LINES", "OLDPWD", "PWD", "SHLVL", "TERM", "WINDOWID", "_")
_OF_LOGINS = ("DBUS_", "SSH_", "TMUX", "XDG_SESSION", "VSCODE_")
_EACH_SOURCE = ("detectron2", "d2_memfit", "fvcore")
_SITE = f"{os.sep}site-packages{os.sep}"
_STDLIB = os.path.dirname(os.__file__) + os.sep
_WRITES = os.O_TRUNC | os.O_CREAT
_READS = ("open", "os.listdir", "os.scandir", "os.rename", "sqlite3.connect")

_State = Optional[list[int]]  # of a file: when it was changed, and its size; None: not there


class Reads:
    """The files and folders that this process reads from now on, as they are at their first read.

    Attributes:
        answer, dry_runs: files for what is found. A command may change the environment, which is
            in their names.
        states: by path.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self.answer, self.dry_runs = _file_of(args, "answers"), _file_of(args, "dry_runs")
        self._ours = (str(self.answer.parent) + os.sep, str(self.dry_runs.parent) + os.sep)
        if not args.no_cache:
            with contextlib.suppress(OSError):  # before the folder of both is read
                for file in (self.answer, self.dry_runs):
                    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.states: dict[str, _State] = {}
        self._written: set[str] = set()
        self._is_over = False
        sys.addaudithook(self._note)

    def _note(self, event: str, args: tuple[Any, ...]) -> None:
        if self._is_over or event not in _READS:
            return
        path = args[1] if event == "os.rename" else args[0]
        if not isinstance(path, (str, os.PathLike)):
            return
        if event == "os.rename" or (event == "open" and args[2] & _WRITES):
            self._written.add(os.path.abspath(path))
        elif event == "sqlite3.connect":
            self.add(path)
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
        elif not is_of_site and path.startswith((_STDLIB, "/proc/", "/sys/", *self._ours)):
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
    if args.json:
        print_text(answer["json"])
    else:
        text = put_together(args, answer["text"], answer["details"], next_step)
        print_text(coloured(text))
    again = f"From {answer['when']}: nothing has changed since. --no-cache computes it again"
    print(again, file=sys.stderr)


def known_answer(args: argparse.Namespace) -> Optional[dict[str, Any]]:
    """The answer to a command that was kept, if it still holds."""
    try:
        file = _file_of(args, "answers")
        if args.no_cache:
            return None
        if args.html or not _is_ours(file.parent):
            return None
        kept = json.loads(file.read_text())
        holds = _hold(kept[_STATES]) and kept.keys() >= _PARTS
    except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError):
        return None
    is_python = str(getattr(args, "output", None)).endswith(".py")  # a LazyConfig is written anew
    return kept if holds and not is_python else None


def keep_answer(
    args: argparse.Namespace, reads: Reads, more: Iterable[str], answer: dict[str, Any]
) -> None:
    """Keep an answer to a command; silently not, if the cache's folder cannot be written.

    From now on, ``reads`` is over.

    Args:
        more: files and folders on which it depends, whether they are there or not.
    """
    reads.end()
    if args.no_cache or args.probe:
        return
    for path in more:
        reads.add(path)
    kept = {**answer, "when": time.strftime("%Y-%m-%d %H:%M"), _STATES: reads.states}
    _write(reads.answer, lambda new: new.write_text(json.dumps(kept)))


def known_dry_runs(args: argparse.Namespace, reads: Reads) -> dict[str, bytes]:
    """The dry runs of the same job that were kept, if they still hold.

    Files on which they depend are added to ``reads``.
    """
    if args.no_cache or args.probe:
        return {}
    try:
        with zipfile.ZipFile(reads.dry_runs) as file:
            kept = {name: file.read(name) for name in file.namelist()}
        states = json.loads(kept.pop(_STATES))
        holds = _is_ours(reads.dry_runs.parent) and _hold(states)
    except (OSError, ValueError, KeyError, AttributeError, TypeError, zipfile.BadZipFile):
        return {}
    if not holds:
        return {}
    reads.states.update(states)
    return kept


def keep_dry_runs(args: argparse.Namespace, reads: Reads, kept: Mapping[str, bytes]) -> None:
    """Keep dry runs of a job, after :func:`keep_answer`."""
    if args.no_cache or args.probe:
        return

    def write(new: Path) -> None:
        with zipfile.ZipFile(new, "w") as file:
            for name, data in {_STATES: json.dumps(reads.states).encode(), **kept}.items():
                file.writestr(name, data)

    _write(reads.dry_runs, write)


def _write(file: Path, write: Callable[[Path], Any]) -> None:
    with contextlib.suppress(OSError):
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        new = file.with_suffix(f".{os.getpid()}")
        try:
            write(new)
            new.replace(file)
        finally:
            new.unlink(missing_ok=True)
        # With what commands that were killed have left.
        kept = sorted(file.parent.iterdir(), key=lambda path: path.stat().st_mtime)
        for old in kept[: -_MOST[file.parent.name]]:
            old.unlink()


def _is_ours(folder: Path) -> bool:
    return folder.stat().st_uid == os.getuid()


def _hold(states: dict[str, _State]) -> bool:
    return all(_state_of(path) == state for path, state in states.items())


def _was_temporary(path: str) -> bool:
    return path.startswith(tempfile.gettempdir() + os.sep) and not os.path.exists(path)


def _file_of(args: argparse.Namespace, kind: str) -> Path:
    others = _OTHERS if kind == "answers" else _OTHERS + _OF_ANSWERS
    question = {k: str(v) for k, v in vars(args).items() if k not in others}
    environment = {
        k: v
        for k, v in os.environ.items()
        if k not in _OF_TERMINALS and not k.startswith(_OF_LOGINS)
    }
    software = [__version__, sys.version, sys.executable, _gpus(), os.getcwd()]
    text = json.dumps([question, environment, software], sort_keys=True)
    folder = os.environ.get("D2_MEMFIT_CACHE") or os.path.expanduser("~/.cache/d2_memfit")
    suffix = "json" if kind == "answers" else "zip"
    return Path(folder) / kind / f"{hashlib.sha256(text.encode()).hexdigest()}.{suffix}"


def _gpus() -> list[str]:
    """This machine's GPUs, as NVIDIA's driver for Linux names them."""
    names: list[str] = []
    for file in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information")):
        with contextlib.suppress(OSError):
            names += [line for line in file.read_text().splitlines() if line.startswith("Model")]
    return names
