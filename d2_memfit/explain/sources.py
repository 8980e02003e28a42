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

from ..common.reading import checked, load_json
from ..errors import DataError, printable
from .records import LoggedRun, clean, read_parts

__all__ = ["read_runs"]

_CONFIG = 2**20  # bytes
_LINE = 10_000  # characters; a longer line is read in pieces
_CODE, _VALUE = 100_000, 1_000  # characters of all cells, and of a setting
_KEY = re.compile(r"(?:\w+\.)*(?:cfg|config)\.(?!MODEL\.WEIGHTS)([A-Z][A-Z\d_]*(?:\.[A-Z\d_]+)*)")


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
    log, config = folder / "log.txt", folder / "config.yaml"
    runs = _runs_of_file(checked(log if log.exists() else folder / "metrics.json", "log.txt, or "))
    last = runs[-1]
    for other in sorted(folder.glob("log.txt.rank*"))[:64]:
        if last.ended == "running":  # the log of the main rank may not show the error
            with suppress(DataError):
                run = _runs_of_file(checked(other))[-1]
                last.oom, last.error = run.oom, run.error
                if run.oom or run.error:
                    last.notes.append(f"the error is that of {printable(other.name)}")
    if not last.config_text and config.exists():
        with open(checked(config), encoding="utf-8", errors="replace") as f:
            last.config_text = "\n".join(map(clean, f.read(_CONFIG).splitlines()))
        last.notes.append("the config is that of config.yaml")
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
    code, parts = _Code(), []
    try:
        for cell in load_json(name)["cells"]:
            if cell["cell_type"] == "code":
                code.read("".join(cell["source"]))
                for output in cell["outputs"]:
                    text = "\n".join(
                        ["".join(output.get("text", "")), *output.get("traceback", [])]
                    )
                    parts.append((code.settings(), text.splitlines()))
    except (AttributeError, KeyError, TypeError) as e:
        raise DataError(f"{name} is not a notebook ({e!r:.99})") from e
    return read_parts(parts, name)


class _Code(ast.NodeVisitor):
    """The config that a notebook's cells make, read but never run."""

    def __init__(self) -> None:
        self._zoo_config = ""
        self._values: dict[str, Any] = {}  # of variables and keys; None if it is computed
        self._room = _CODE

    def settings(self) -> dict[str, Any]:
        """Fields of the run that begins after the cells so far."""
        keys = {key[1]: v for name, v in self._values.items() if (key := _KEY.fullmatch(name))}
        known = {key: v for key, v in keys.items() if v is not None}
        notes = [f"{key} is computed by the notebook" for key in keys if key not in known]
        most = known.get("SOLVER.MAX_ITER")
        fields = {"zoo_config": self._zoo_config, "overrides": known, "notes": notes}
        return {**fields, "max_iter": most if isinstance(most, int) else None}

    def read(self, source: str) -> None:
        """Read the code of the next cell, without the commands of IPython."""
        source = re.sub(r"(?m)^([ \t]*)[%!?].*", r"\1pass", source[: self._room])
        self._room = max(self._room - len(source), 0)
        with suppress(MemoryError, RecursionError, SyntaxError, ValueError):
            self.visit(ast.parse(source))  # unless it is not Python, or deeper than people write

    def visit_Assign(self, node: ast.Assign) -> None:
        self.visit(node.value)
        self._values[ast.unparse(node.targets[0])] = self._value(node.value)

    def visit_Call(self, node: ast.Call) -> None:
        self.generic_visit(node)
        name = ast.unparse(node.func).rpartition(".")[2]
        value = self._value(node.args[0]) if node.args else None
        if name in ("get_cfg", "get_config"):
            self._values = {n: v for n, v in self._values.items() if not _KEY.fullmatch(n)}
        if name in ("get_config", "get_config_file", "merge_from_file") and isinstance(value, str):
            self._zoo_config = value

    def _value(self, node: ast.expr) -> Any:
        """The value of a literal, or of a variable that is one; None if it is not known."""
        if (name := ast.unparse(node)) in self._values:
            return self._values[name]
        with suppress(TypeError, ValueError):
            value = ast.literal_eval(node)
            return value if len(name) < _VALUE and str(value).isprintable() else None
        return None
