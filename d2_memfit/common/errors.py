# Copyright (c) the d2_memfit developers.
"""Errors that a user can fix, and what a log and a terminal have of them.

The message names the key or file, the value, and what to do.
"""

import functools
import logging
import os
import signal
import sys
import time
from contextlib import AbstractContextManager
from typing import Any, Callable
from unittest.mock import patch

import torch
from detectron2.utils import comm
from detectron2.utils.logger import setup_logger
from torch.multiprocessing import ProcessExitedException

__all__ = ["START_HERE", "CheckpointError", "ConfigError", "ConfigErrors", "DataError"]
__all__ += ["HostMemoryError", "MemfitError", "OutOfMemoryError", "RankError", "exit_on_error"]
__all__ += ["no_traceback_of_loop", "one_line", "printable", "start_logging", "write_traceback"]

START_HERE = "docs/OUT_OF_MEMORY.md"  # what to do after an out-of-memory error
_LOGGED = "_d2_memfit_logged"
_OTHERS_FIRST_S = 3.0  # a launcher has the status of the rank that ends first


class MemfitError(Exception):
    """Base of all errors here. Command-line tools print it as one line and exit with status 2."""


class ConfigError(MemfitError, ValueError):
    """A config key, or the corresponding argument, has a value that cannot work.

    Attributes:
        what: the message without advice, which may be about options of one command; "" if it has
            none.
    """

    what = ""


class ConfigErrors(ConfigError):
    """Several values cannot work; the message has a line for each."""


class DataError(MemfitError, RuntimeError):
    """A file cannot be read; or a dataset has nothing to train on, or ended too early."""


class CheckpointError(MemfitError, RuntimeError):
    """A checkpoint file is missing or cannot be read."""


class HostMemoryError(MemfitError, RuntimeError):
    """The data loader ran out of the host's memory. It is not tried again."""


class RankError(MemfitError, RuntimeError):
    """Another rank has ended, and this one cannot go on."""


class OutOfMemoryError(MemfitError, torch.OutOfMemoryError):
    """Memory ran out again after all recovery that the config allows."""


def one_line(error: BaseException) -> str:
    """An error's message, without the traceback that a worker of the data loader adds.

    Other line breaks are in a name or value, but for those of a final :class:`OutOfMemoryError` and
    of :class:`ConfigErrors`.
    """
    text = str(error).rstrip()
    if "Original Traceback" in text:
        text = text.splitlines()[-1]
    text = text.rpartition(f"{type(error).__name__}: ")[2]
    if isinstance(error, (ConfigErrors, OutOfMemoryError)):
        return printable(text, "\n")
    return printable(text[:2000])  # a value in it may be a whole file


def printable(text: str, keeps: str = "") -> str:
    """A text for a terminal or a log, which names of files and classes cannot command.

    Control characters, such as those that begin a terminal's commands, and characters that no
    encoding has, are escaped.

    Args:
        keeps: control characters that stay, such as line breaks.
    """
    return "".join(c if c.isprintable() or c in keeps else repr(c)[1:-1] for c in text)


def start_logging(output_dir: str) -> None:
    """Write the log of d2_memfit to Detectron2's log, unless it is set up already."""
    if not logging.getLogger("d2_memfit").isEnabledFor(logging.INFO):
        setup_logger(output_dir, distributed_rank=comm.get_rank(), name="d2_memfit")


def write_traceback(error: BaseException) -> None:
    """Write an error's traceback to the log's file only, once.

    A command then shows the error as one line (:func:`exit_on_error`).
    """
    if (files := _log_files()) and not hasattr(error, _LOGGED):
        setattr(error, _LOGGED, True)
        what = type(error), error, error.__traceback__
        record = logging.LogRecord("d2_memfit", logging.ERROR, "", 0, "The traceback:", (), what)
        files[0].handle(record)


def _log_files() -> "list[logging.StreamHandler[Any]]":
    loggers = logging.getLogger("d2_memfit"), logging.getLogger("detectron2")
    handlers = [h for n in loggers for h in n.handlers if isinstance(h, logging.StreamHandler)]
    return [h for h in handlers if os.path.isfile(str(getattr(h.stream, "name", "")))]


def no_traceback_of_loop() -> AbstractContextManager[Any]:
    """While open, Detectron2's loop logs no traceback that :func:`write_traceback` writes."""
    source = logging.getLogger("detectron2.engine.train_loop")
    is_shown = lambda record: not (record.exc_info and _log_files())  # noqa: E731
    return patch.object(source, "filters", [*source.filters, is_shown])


def exit_on_error(main: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate the main function of a tool, and the main function of its ranks.

    A :class:`MemfitError` is printed as one line, and the exit status is 2. Any other error whose
    traceback is in the log is printed as one line too, and the status is 1. If a rank ends this
    way, the process that started it ends with the same status, which is that of the rank that is
    the cause: others wait a moment. If a signal ended a rank, one line
    names both, and the status is 128 + its number.
    """

    @functools.wraps(main)
    def main_without_traceback(*args: Any) -> Any:
        try:
            return main(*args)
        except MemfitError as e:
            separator = "\nerror: " if isinstance(e, ConfigErrors) else "\n"
            print("error:", one_line(e).replace("\n", separator), file=sys.stderr)
            if isinstance(e, RankError):
                time.sleep(_OTHERS_FIRST_S)
            sys.exit(2)
        except KeyboardInterrupt:
            sys.exit(128 + signal.SIGINT)
        except ProcessExitedException as e:  # a rank that ended by itself has said why
            if e.exit_code < 0:
                print(f"error: {_killed(e.error_index, -e.exit_code)}", file=sys.stderr)
            sys.exit(e.exit_code if e.exit_code >= 0 else 128 - e.exit_code)
        except Exception as e:
            if not hasattr(e, _LOGGED):
                raise
            print(f"error: {type(e).__name__}: {one_line(e)}", file=sys.stderr)
            sys.exit(1)

    return main_without_traceback


def _killed(rank: int, number: int) -> str:
    advice = (
        ", by a person, or by the kernel because RAM is full (dmesg tells). Then lower "
        f"DATALOADER.NUM_WORKERS, or set MEMFIT.HOST.BUDGET_GB: {START_HERE}"
    )
    return (
        f"rank {rank} of this machine was ended with {signal.Signals(number).name}"
        f"{advice if number == signal.SIGKILL else ''}. --resume goes on from the last checkpoint"
    )
