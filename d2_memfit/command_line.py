# Copyright (c) the d2_memfit developers.
"""The commands of d2-memfit by name; ``--help`` lists them without importing PyTorch."""

import argparse
from typing import Any

from . import __version__

__all__ = ["COMMANDS", "command_parser"]

_DESCRIPTION = (
    "The command d2-memfit: train within the memory that there is; or ask what a job needs of a "
    "GPU, and how it fits, without one."
)
COMMANDS = {
    "estimate": "what a job needs",
    "plan": "make a job fit a budget",
    "doctor": "find what works with a job, by small iterations on the CPU with injected errors",
    "draw": "draw what a trained model finds",
    "measure-gpu": "measure this machine's GPU: is all right on it, and how well is it known",
    "train": "train or evaluate",
}


def command_parser() -> tuple[argparse.ArgumentParser, "argparse._SubParsersAction[Any]"]:
    """The parser, and the object that takes its commands."""
    parser = argparse.ArgumentParser(prog="d2-memfit", description=_DESCRIPTION)
    parser.add_argument("--version", action="version", version=f"d2_memfit {__version__}")
    return parser, parser.add_subparsers(dest="command", required=True)
