# Copyright (c) the d2_memfit developers.
"""What commands print: answers, the next command, progress, and the screen of a training.

The log's file has everything. The screen leaves out Detectron2's dumps of environment, config and
model, and has a progress bar on a terminal.
"""

import argparse
import logging
import re
import shlex
import sys
from contextlib import ExitStack
from typing import Any, Optional

import torch
from detectron2.engine import HookBase
from detectron2.utils.logger import setup_logger
from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from ..common import GB
from ..common.errors import printable
from ..memory import device_memory
from .command_line import OPTIONS, OPTIONS_OF

__all__ = ["PrintableFormatter", "ProgressBar", "end_progress", "leave_out_dumps"]
__all__ += ["next_step", "put_together", "say", "show", "show_progress"]

_LINES = 10  # of an answer, so that 15 are enough for all
_DUMPS = (
    *("Environment info", "Command line arguments", "Contents of args.config_file"),
    *("Running with full config", "Model:"),
)
_CODES = re.compile(r"\x1b\[[0-9;]*m")  # of Detectron2's tables
_LOGGERS = ("detectron2", "fvcore", "d2_memfit")
_OF_ANSWER = ("details", "json", "html", "overwrite", "output")  # the next command has its own
_bars: list[tqdm] = []  # the open one of show_progress


def put_together(args: argparse.Namespace, answer: str, details: str, next_step: str) -> str:
    """Put the parts of a text together. The answer comes first, what to type last."""
    answer = "\n".join(answer.splitlines()[:_LINES])
    options = ("--details", "--json", "--html FILE") if hasattr(args, "html") else ("--details",)
    more = f"\n\n{details}" if args.details else f"\nMore: {', '.join(options)}"
    return "\n\n".join(filter(None, [answer + more, next_step]))


def next_step(
    why: str, command: str, args: argparse.Namespace, program: str = "", **values: Any
) -> str:
    """Lines with a command to paste: the options of another command that this one has, too.

    Args:
        command: estimate, plan, ...
        program: what is typed; "" for ``d2-memfit`` and the command.
        values: other values for some options.
    """
    given = {**vars(args), **dict.fromkeys(_OF_ANSWER), **values}
    words: list[Any] = program.split() or ["d2-memfit", command]
    for option in OPTIONS_OF[command].split():
        name = option.lstrip("-").replace("-", "_")
        value = given.get(name)
        if name == option:  # it has no name on the command line
            words += value if isinstance(value, list) else filter(None, [value])
        elif isinstance(value, list):  # an option that may be repeated
            for each in value:
                words += [option, *([each] if isinstance(each, str) else each)]
        elif isinstance(value, tuple):
            words += [option, ",".join(map(str, value))]
        elif value and value != OPTIONS[option][1].get("default"):
            words += [option] if value is True else [option, value]
    return f"Next, {why}:\n  {shlex.join(map(str, words))}"


def show(text: str) -> None:
    """Print a text of several lines."""
    end_progress()
    print(printable(text, keeps="\n"), flush=True)


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
