"""What a user can put right. The text names the key or file, the value, and what to do."""

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


# What a shell gives to SIGINT, SIGUSR2 and SIGTERM: a rank that was asked to end did so.
_STOPPED = (130, 140, 143)


class MemfitError(Exception):
    """Base of them all. The command-line tools print it as one line and exit with status 2."""


class ConfigError(MemfitError, ValueError):
    """A config key, or the argument of the same meaning, has a value that cannot work."""


class DataError(MemfitError, RuntimeError):
    """A dataset cannot be read, has nothing to train on, or ended too early."""


class CheckpointError(MemfitError, RuntimeError):
    """A checkpoint file is missing or cannot be read."""


class HostMemoryError(MemfitError, RuntimeError):
    """The data loader ran out of the host's memory. It is not tried again."""


class OutOfMemoryError(MemfitError, torch.OutOfMemoryError):
    """All that recovery can do was done, or ruled out by the config, and memory ran out again."""


def one_line(error: MemfitError) -> str:
    """Its text. From a worker of the data loader it comes with the worker's traceback before it."""
    return str(error).rpartition(f"{type(error).__name__}: ")[2].rstrip()


def exit_on_error(main: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate the main function of a tool, and that of its ranks.

    A :class:`MemfitError` is printed as one line, and the exit status is 2. The process that
    started a rank which ended so ends with the same status.
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
