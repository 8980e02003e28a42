# Copyright (c) the d2_memfit developers.
"""Logs as users have them: a file, what a console showed, a notebook, a folder of a run."""

import ast
import os
import re
import sys
from contextlib import suppress
from io import BufferedReader, TextIOWrapper
from pathlib import Path
from typing import Any, Union, cast

from ..common.errors import DataError
from ..common.files import checked, load_json
from .records import LoggedRun, clean, read_parts

_CONFIG = 2**20  # bytes
_LINE = 10_000  # characters; a longer line is read in pieces
_CODE = 100_000  # characters of all cells
_KEY = re.compile(r"(?:\w+\.)*(?:cfg|config)\.(?!MODEL\.WEIGHTS)([A-Z][A-Z\d_]*(?:\.[A-Z\d_]+)*)")
_ASSIGNED = re.compile(r"(?m)^[ \t]*([A-Za-z_][\w.]{0,99}) *= *(.{1,1000})$")
_ZOO = re.compile(r"[\"']((?:COCO|LVIS|Cityscapes|PascalVOC|Misc)[\w.-]*/[\w.-]+\.yaml)[\"']")


def read_runs(path: Union[str, "os.PathLike[str]"]) -> list[LoggedRun]:
    """The trainings that a file or folder shows, in order.

    Args:
        path: a ``log.txt``, the output of a console, a notebook, or an ``OUTPUT_DIR``; "-" is
            standard input.

    Raises:
        DataError: it cannot be read, or shows no training with Detectron2.
    """
    try:
        if os.fspath(path) == "-":
            return _runs_of_log(cast(BufferedReader, sys.stdin.buffer), "standard input")
        return _runs_of_folder(Path(path)) if os.path.isdir(path) else _runs_of_file(checked(path))
    except OSError as e:
        raise DataError(f"{path} cannot be read ({e.strerror or e})") from e


def _runs_of_folder(folder: Path) -> list[LoggedRun]:
    """The runs of a folder with Detectron2's outputs. Its config.yaml is of the last of them."""
    runs = _runs_of_file(checked(folder / "log.txt"))
    last, config = runs[-1], folder / "config.yaml"
    for other in sorted(folder.glob("log.txt.rank*")):
        if last.ended == "running":  # the log of the main rank may not show the error
            with suppress(DataError):
                run = _runs_of_file(checked(other))[-1]
                last.oom, last.error = run.oom, run.error
    if not last.config_text and config.exists():
        with open(checked(config), encoding="utf-8", errors="replace") as f:
            last.config_text = "\n".join(map(clean, f.read(_CONFIG).splitlines()))
    return runs


def _runs_of_file(name: str) -> list[LoggedRun]:
    if name.endswith(".ipynb"):
        return _runs_of_notebook(name)
    with open(name, "rb") as f:
        return _runs_of_log(f, name)


def _runs_of_log(f: BufferedReader, name: str) -> list[LoggedRun]:
    head = f.peek()
    encoding = "utf-16" if head[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8"  # PowerShell's
    if b"\0" in head and encoding == "utf-8" and b"iter: " not in head:
        raise DataError(f"{name} is not a log: it has binary data")
    text = TextIOWrapper(f, encoding, "replace")
    return read_parts([({}, iter(lambda: text.readline(_LINE), ""))], name)


def _runs_of_notebook(name: str) -> list[LoggedRun]:
    """The trainings whose outputs a notebook has, with the settings that its code makes before."""
    code, parts = "", []
    try:
        for cell in load_json(name)["cells"]:
            if cell["cell_type"] == "code":
                code += "".join(cell["source"]) + "\n"
                for output in cell["outputs"]:
                    shown = ["".join(output.get("text", "")), *output.get("traceback", [])]
                    parts.append((_settings(code[:_CODE]), "\n".join(shown).splitlines()))
    except (AttributeError, KeyError, TypeError) as e:
        raise DataError(f"{name} is not a notebook ({e!r:.99})") from e
    return read_parts(parts, name)


def _settings(code: str) -> dict[str, Any]:
    """Fields of the run that begins after a notebook's code, which is read but never run."""
    values: dict[str, Any] = {}  # of variables and keys; None if it is computed
    for name, right in _ASSIGNED.findall(code):
        text = right.partition("#")[0].strip()
        values[name] = values.get(text)
        with suppress(MemoryError, RecursionError, SyntaxError, TypeError, ValueError):
            values[name] = ast.literal_eval(text)
    keys = {key[1]: v for name, v in values.items() if (key := _KEY.fullmatch(name))}
    known = {key: v for key, v in keys.items() if v is not None and str(v).isprintable()}
    most = known.get("SOLVER.MAX_ITER")
    return {
        "zoo_config": ["", *_ZOO.findall(code)][-1],
        "overrides": known,
        "max_iter": most if isinstance(most, int) else None,
        "notes": [f"{key} is computed by the notebook" for key in keys if key not in known],
    }
