# Copyright (c) the d2_memfit developers.
"""What a training shows on the screen.

The log's file has everything. The screen leaves out Detectron2's dumps of environment, config and
model, shows each of the first iterations, and on a terminal a progress bar.
"""

import logging
import re
import shutil
import sys
from contextlib import ExitStack
from itertools import count
from typing import Optional, TextIO

import torch
from detectron2.engine import HookBase, hooks
from detectron2.utils.events import CommonMetricPrinter
from detectron2.utils.logger import setup_logger
from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from ..common.units import GB
from ..errors import printable
from ..memory import device_memory
from .answers import coloured, print_text

__all__ = [
    "PrintableFormatter",
    "end_progress",
    "leave_out_dumps",
    "progress_hooks",
    "say",
    "show",
    "show_progress",
]

_DUMPS = (
    *("Environment info", "Command line arguments", "Contents of args.config_file"),
    *("Running with full config", "Model:"),
)
_ERASE = "\x1b[2K"  # the line of the cursor
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")  # of Detectron2's tables
_LOGGERS = ("detectron2", "fvcore", "d2_memfit")
_BAR, _steps = 10, count()  # its length, and how often it was shown
_PERIOD = 20  # iterations between lines of Detectron2's log


def leave_out_dumps(output_dir: str, rank: int) -> None:
    """Keep Detectron2's dumps off the screen, and terminal control codes out of the log.

    Call this before ``default_setup``, which uses the same loggers.
    """
    for name in ({"name": "fvcore"}, {}, {"name": "d2_memfit"}):
        for handler in setup_logger(output_dir, distributed_rank=rank, **name).handlers:
            if getattr(handler, "stream", None) is sys.stdout:
                handler.addFilter(lambda record: not record.getMessage().startswith(_DUMPS))
            handler.setFormatter(PrintableFormatter(handler.formatter))


class PrintableFormatter(logging.Formatter):
    """Escapes terminal control codes in a message, for example from file names.

    Args:
        inner: formats the escaped message.
    """

    def __init__(self, inner: Optional[logging.Formatter]) -> None:
        super().__init__()
        self._inner = inner or logging.Formatter()

    def format(self, record: logging.LogRecord) -> str:
        record.msg, record.args = _COLOURS.sub("", record.getMessage()), ()
        record.msg = printable(record.msg, keeps="\n\t")
        if record.exc_info:
            record.exc_text = printable(self.formatException(record.exc_info), keeps="\n")
        return self._inner.format(record)


def show(text: object, file: Optional[TextIO] = None) -> None:
    """Print a text of several lines, with control codes escaped."""
    end_progress()
    print_text(coloured(printable(str(text), keeps="\n")), file)


def say(line: str) -> None:
    """Print a line about what happens to stderr. Results go to stdout."""
    end_progress()
    print(printable(line), file=sys.stderr, flush=True)


def show_progress(line: str) -> None:
    """Print a line to stderr; on a terminal, after a bar, in place of the one before."""
    if not sys.stderr.isatty():
        say(line)
        return
    filled = next(_steps) % _BAR + 1
    text = f"[{'#' * filled:{_BAR}}] {printable(line)}"
    columns = shutil.get_terminal_size().columns
    print(f"{_ERASE}{text[: columns - 1]}", end="\r", file=sys.stderr, flush=True)


def end_progress() -> None:
    """Remove the line of :func:`show_progress`."""
    if sys.stderr.isatty():
        print(_ERASE, end="", file=sys.stderr, flush=True)


def progress_hooks(max_iter: int) -> list[HookBase]:
    """The hooks of the main rank that show the progress of training."""
    first = FirstIterations([CommonMetricPrinter(max_iter)], period=1)
    return [first, *([ProgressBar()] if sys.stdout.isatty() else [])]


class FirstIterations(hooks.PeriodicWriter):
    """Writes each of the first iterations that Detectron2's writer leaves out."""

    def after_step(self) -> None:
        trainer = self.trainer
        is_first = trainer.iter - trainer.start_iter < _PERIOD
        is_in_the_log = (trainer.iter + 1) % _PERIOD == 0 or trainer.iter + 1 == trainer.max_iter
        if is_first and not is_in_the_log:
            super().after_step()

    def after_train(self) -> None:
        """Write nothing. The hook that writes the log does."""


class ProgressBar(HookBase):
    """A progress bar with iterations, remaining time, loss and memory, for terminals."""

    def __init__(self) -> None:
        self._open = ExitStack()
        self._bar: Optional[tqdm] = None

    def before_train(self) -> None:
        trainer = self.trainer
        loggers = [logging.getLogger(name) for name in _LOGGERS]
        self._open.enter_context(logging_redirect_tqdm(loggers))
        self._bar = self._open.enter_context(
            tqdm(total=trainer.max_iter, initial=trainer.start_iter, unit="iter")
        )

    def after_step(self) -> None:
        assert self._bar is not None
        loss = self.trainer.storage.latest().get("total_loss")
        parameter = next(self.trainer.model.parameters())
        used = device_memory(torch.device(parameter.device)).peak_reserved_bytes / GB
        shown = {"loss": f"{loss[0]:.3g}"} if loss else {}
        self._bar.set_postfix({**shown, "mem": f"{used:.1f} GB"}, refresh=False)
        self._bar.update()

    def after_train(self) -> None:
        self._open.close()
