# Copyright (c) the d2_memfit developers.
"""The command d2-memfit: it runs the module of a command, which imports what that needs."""

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Optional
from unittest.mock import patch

from ..common.errors import ConfigError, exit_on_error
from ..common.files import check_outputs
from ..engine.ending import signals_end_at_once
from ..engine.launch import world_size
from .command_line import command_parser, files_read
from .screen import end_progress, show

__all__ = ["main", "run_command"]

# Where the function of a command is. Its module imports what it needs.
_RUN = {
    "doctor": ("doctor", "doctor"),
    "estimate": ("plan", "estimate"),
    "explain": ("explain", "explain"),
    "measure-gpu": ("commands", "measure"),
    "plan": ("plan", "plan"),
    "predict": ("predict", "predict"),
    "train": ("train", "run"),
}


def main(argv: Optional[Sequence[str]] = None) -> None:
    """Run a command.

    Args:
        argv: its arguments; None for those of the process.
    """
    run_command(command_parser().parse_args(sys.argv[1:] if argv is None else argv))


@exit_on_error
@signals_end_at_once()
def run_command(args: argparse.Namespace) -> None:
    """Run a command with its parsed arguments."""
    if args.command != "train" and world_size(1) > 1:
        raise ConfigError(f"{args.command} runs in one process: start it without torchrun")
    try:
        if hasattr(args, "html"):
            outputs = [path for path in (getattr(args, "output", None), args.html) if path]
            check_outputs(outputs, files_read(args), args.overwrite)
        module, function = _RUN[args.command]
        run = getattr(import_module(f".{module}", __package__), function)
        with patch.object(sys, "path", [os.getcwd(), *sys.path]):  # as for ``python -m``
            run(args)
    finally:
        end_progress()


def measure(args: argparse.Namespace) -> None:
    from ..measure import measure_gpu

    for text in measure_gpu(args.device, args.seconds, args.output, args.items, args.small):
        show(text)
