# Copyright (c) the d2_memfit developers.
"""Logging in scripts that set up only Detectron2's loggers."""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from detectron2.engine.train_loop import TrainerBase
from detectron2.utils import comm
from detectron2.utils.logger import setup_logger

from ..errors import mark_as_logged

__all__ = ["start_logging", "tracebacks_only_in_files", "write_traceback"]


def start_logging(output_dir: str) -> None:
    """Write the log of d2_memfit to Detectron2's log, unless it is set up already."""
    if not logging.getLogger("d2_memfit").isEnabledFor(logging.INFO):
        setup_logger(output_dir, distributed_rank=comm.get_rank(), name="d2_memfit")


def write_traceback(error: BaseException) -> str:
    """Write an error's traceback to the log's file only, once; return the file's name, or "".

    A command then shows the error as one line (:func:`~d2_memfit.errors.exit_on_error`).
    """
    handlers = _file_handlers()
    if not handlers:
        return ""
    if mark_as_logged(error):
        what = type(error), error, error.__traceback__
        record = logging.LogRecord("d2_memfit", logging.ERROR, "", 0, "The traceback:", (), what)
        handlers[0].handle(record)
    return str(handlers[0].stream.name)


@contextmanager
def tracebacks_only_in_files() -> Iterator[None]:
    """While open, Detectron2's loop logs no traceback that :func:`write_traceback` writes."""
    source = logging.getLogger(TrainerBase.__module__)

    def has_no_traceback(record: logging.LogRecord) -> bool:
        return not (record.exc_info and _file_handlers())

    source.addFilter(has_no_traceback)
    try:
        yield
    finally:
        source.removeFilter(has_no_traceback)


def _file_handlers() -> "list[logging.StreamHandler[Any]]":
    """The handlers of ``setup_logger`` that write to a file, those of d2_memfit first."""
    loggers = logging.getLogger("d2_memfit"), logging.getLogger("detectron2")
    handlers = [handler for logger in loggers for handler in logger.handlers]
    streams = [h for h in handlers if isinstance(h, logging.StreamHandler)]
    return [h for h in streams if os.path.isfile(str(getattr(h.stream, "name", "")))]
