# Copyright (c) the d2_memfit developers.
"""Errors that a user can fix. The message names the key or file, the value, and what to do."""

import functools
import sys
from typing import Any, Callable

import torch
from torch.multiprocessing import ProcessExitedException

__all__ = [
    "CheckpointError",
    "ConfigError",
    "DataError",
    "HostMemoryError",
    "MemfitError",
    "OutOfMemoryError",
    "exit_on_error",
    "one_line",
]


# Exit statuses for SIGINT, SIGUSR2 and SIGTERM: a rank ended because of a signal.
_STOPPED = (130, 140, 143)


class MemfitError(Exception):
    """Base of all errors here. Command-line tools print it as one line and exit with status 2."""


class ConfigError(MemfitError, ValueError):
    """A config key, or the corresponding argument, has a value that cannot work."""


class DataError(MemfitError, RuntimeError):
    """A dataset cannot be read, has nothing to train on, or ended too early."""


class CheckpointError(MemfitError, RuntimeError):
    """A checkpoint file is missing or cannot be read."""


class HostMemoryError(MemfitError, RuntimeError):
    """The data loader ran out of the host's memory. It is not tried again."""


class OutOfMemoryError(MemfitError, torch.OutOfMemoryError):
    """Memory ran out again after all recovery that the config allows."""


def one_line(error: MemfitError) -> str:
    """An error's message, without the traceback that a worker of the data loader adds."""
    return str(error).rpartition(f"{type(error).__name__}: ")[2].rstrip()


def exit_on_error(main: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate the main function of a tool, and the main function of its ranks.

    A :class:`MemfitError` is printed as one line, and the exit status is 2. If a rank ends this
    way, the process that started it ends with the same status.
    """

    @functools.wraps(main)
    def main_without_traceback(*args: Any) -> Any:
        try:
            return main(*args)
        except MemfitError as e:
            print(f"error: {one_line(e)}", file=sys.stderr)
            sys.exit(2)
        except ProcessExitedException as e:
            if e.exit_code not in (2, *_STOPPED):
                print(f"error: {e}", file=sys.stderr)
            sys.exit(e.exit_code)

    return main_without_traceback
