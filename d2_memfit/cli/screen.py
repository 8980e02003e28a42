# Copyright (c) the d2_memfit developers.
"""What commands print: answers, progress, and the screen of a training.

The log's file has everything. The screen leaves out Detectron2's dumps of environment, config and
model, shows each of the first iterations, and on a terminal a progress bar.
"""

import argparse
import logging
import os
import re
import sys
from contextlib import ExitStack
from typing import Optional

import torch
from detectron2.engine import HookBase, hooks
from detectron2.utils.events import CommonMetricPrinter
from detectron2.utils.logger import setup_logger
from termcolor import colored
from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from ..common.units import GB
from ..errors import printable
from ..memory import device_memory

__all__ = ["PrintableFormatter", "end_progress", "leave_out_dumps", "print_text", "progress_hooks"]
__all__ += ["put_together", "say", "show", "show_progress"]

_LINES = 10  # of an answer, so that 15 are enough for all
_COLOURS = {"Fits": "green", "Works": "green", "Does not fit": "red", "Does not work": "red"}
_DUMPS = (
    *("Environment info", "Command line arguments", "Contents of args.config_file"),
    *("Running with full config", "Model:"),
)
_CODES = re.compile(r"\x1b\[[0-9;]*m")  # of Detectron2's tables
_LOGGERS = ("detectron2", "fvcore", "d2_memfit")
_PERIOD = 20  # iterations between lines of Detectron2's log
_bars: list[tqdm] = []  # the open one of show_progress


def put_together(args: argparse.Namespace, answer: str, details: str, next_step: str) -> str:
    """Put the parts of a text together. The answer comes first, what to type last."""
    answer = "\n".join(answer.splitlines()[:_LINES])
    options = ("--details", "--json", "--html FILE") if hasattr(args, "html") else ("--details",)
    more = f"\n\n{details}" if args.details else f"\nMore: {', '.join(options)}"
    return "\n\n".join(filter(None, [answer + more, next_step]))


def show(text: object) -> None:
    """Print a text of several lines. The verdict, before the first colon, has a colour."""
    end_progress()
    shown = printable(str(text), keeps="\n")
    verdict, colon, rest = shown.partition(":")
    if sys.stdout.isatty() and verdict in _COLOURS:
        shown = colored(verdict + colon, _COLOURS[verdict], attrs=["bold"]) + rest
    print_text(shown)


def print_text(text: str) -> None:
    """Print a text, unless its reader has ended, as in ``d2-memfit ... | head``."""
    end_progress()
    try:
        print(text, flush=True)
    except BrokenPipeError:  # https://docs.python.org/3/library/signal.html#note-on-sigpipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def say(line: str) -> None:
    """Print a line about what happens to stderr. Results go to stdout."""
    end_progress()
    print(printable(line), file=sys.stderr, flush=True)


def show_progress(line: str) -> None:
    """Print a line to stderr; on a terminal, after the time, in place of the one before."""
    if not sys.stderr.isatty():
        say(line)
        return
    if not _bars:
        _bars.append(tqdm(bar_format="{elapsed} {desc}", dynamic_ncols=True, leave=False))
    _bars[0].set_description_str(printable(line))


def end_progress() -> None:
    """Remove the line of :func:`show_progress`."""
    while _bars:
        _bars.pop().close()


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
        record.msg, record.args = _CODES.sub("", record.getMessage()), ()
        record.msg = printable(record.msg, keeps="\n\t")
        if record.exc_info:
            record.exc_text = printable(self.formatException(record.exc_info), keeps="\n")
        return self._inner.format(record)


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

    def before_train(self) -> None:
        trainer = self.trainer
        loggers = [logging.getLogger(name) for name in _LOGGERS]
        self._open.enter_context(logging_redirect_tqdm(loggers))
        bar = tqdm(total=trainer.max_iter, initial=trainer.start_iter, unit="iter")
        self._bar = self._open.enter_context(bar)

    def after_step(self) -> None:
        loss = self.trainer.storage.latest().get("total_loss")
        parameter = next(self.trainer.model.parameters())
        used = device_memory(torch.device(parameter.device)).peak_reserved_bytes / GB
        shown = {"loss": f"{loss[0]:.3g}"} if loss else {}
        self._bar.set_postfix({**shown, "mem": f"{used:.1f} GB"}, refresh=False)
        self._bar.update()

    def after_train(self) -> None:
        self._open.close()
