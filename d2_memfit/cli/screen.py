# Copyright (c) the d2_memfit developers.
"""What commands print: answers, the next command, progress, and the screen of a training.

The log's file has everything. The screen leaves out Detectron2's dumps of environment, config and
model.
"""

import logging
import re
import shlex
import sys
from argparse import Namespace
from typing import Any

from detectron2.utils.logger import setup_logger
from tqdm import tqdm

from ..common.errors import printable
from .command_line import OPTIONS, OPTIONS_OF

_DUMPS = (
    *("Environment info", "Command line arguments", "Contents of args.config_file"),
    *("Running with full config", "Model:"),
)
_CODES = re.compile(r"\x1b\[[0-9;]*m")  # of Detectron2's tables
_OF_ANSWER = ("details", "json", "html", "overwrite", "output")  # the next command has its own
_bars: list[tqdm] = []  # the open one of show_progress


def next_step(why: str, command: str, args: Namespace, program: str = "", **values: Any) -> str:
    """Lines with a command to paste: the options of another command that this one has, too.

    Args:
        command: estimate, plan, ...
        program: what is typed; "" for ``d2-memfit`` and the command.
        values: other values for some options.
    """
    given = {**vars(args), **dict.fromkeys(_OF_ANSWER), **values}
    words: list[Any] = program.split() or ["d2-memfit", command]
    for option in OPTIONS_OF[command].split():
        value = given.get(option.lstrip("-").replace("-", "_"))
        if not value or value == OPTIONS[option][1].get("default"):
            continue
        value = ",".join(map(str, value)) if isinstance(value, tuple) else value
        named = [option] if option.startswith("-") else []
        for each in value if isinstance(value, list) else [value]:  # an option may be repeated
            words += named + ([] if each is True else each if isinstance(each, list) else [each])
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
    """On a terminal, show a line on stderr after the time, in place of the one before."""
    if not _bars:
        bar = tqdm(bar_format="{elapsed} {desc}", dynamic_ncols=True, leave=False, disable=None)
        _bars.append(bar)
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
            handler.addFilter(escape)


def escape(record: logging.LogRecord) -> bool:
    """Filter of a handler: escape terminal control codes, for example from file names."""
    record.msg = printable(_CODES.sub("", record.getMessage()), keeps="\n\t")
    record.args = ()
    if record.exc_info:
        traceback = logging.Formatter().formatException(record.exc_info)
        record.exc_text = printable(traceback, keeps="\n")
    return True
