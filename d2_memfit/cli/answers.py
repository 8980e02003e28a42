# Copyright (c) the d2_memfit developers.
"""The text of a command: the answer, its details if they are asked for, and what to type."""

import argparse
import os
import sys
from typing import Optional, TextIO

__all__ = ["coloured", "print_text", "put_together"]

_LINES = 10  # of an answer, so that 15 are enough for all
_MORE = {
    "estimate": "--details, --json, --html FILE",
    "plan": "--details, --json, --html FILE",
    "explain": "--details, --json, --html FILE",
}
_COLOURS = {"Fits": "green", "Works": "green", "Does not fit": "red", "Does not work": "red"}


def put_together(args: argparse.Namespace, answer: str, details: str, next_step: str) -> str:
    """Put the parts of a text together. The answer comes first, what to type last."""
    answer = "\n".join(answer.splitlines()[:_LINES])
    more = details if args.details else f"More: {_MORE.get(args.command, '--details')}"
    between = "\n\n" if args.details else "\n"
    return "\n\n".join(filter(None, [f"{answer}{between}{more}", next_step]))


def coloured(text: str) -> str:
    """A text whose verdict, the words before the first colon, has a colour on a terminal."""
    verdict, colon, rest = text.partition(":")
    if not sys.stdout.isatty() or verdict not in _COLOURS:
        return text
    from termcolor import colored  # Detectron2 brings it

    return colored(verdict + colon, _COLOURS[verdict], attrs=["bold"]) + rest


def print_text(text: str, file: Optional[TextIO] = None) -> None:
    """Print a text, unless its reader has ended, as in ``d2-memfit ... | head``."""
    file = file or sys.stdout
    try:
        print(text, file=file, flush=True)
    except BrokenPipeError:  # https://docs.python.org/3/library/signal.html#note-on-sigpipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), file.fileno())
