# Copyright (c) the d2_memfit developers.
"""The command d2-memfit, also ``python -m d2_memfit``."""

import gc
import sys

from .command_line import COMMANDS, command_parser
from .library_warnings import ignore_warnings_of_libraries
from .without_dynamo import without_dynamo


def main() -> None:
    name = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if name not in COMMANDS:
        _show_commands()
    ignore_warnings_of_libraries()
    if name not in ("estimate", "plan"):
        _run()
        return
    with without_dynamo():  # no training here
        gc.disable()  # imports leave nothing to free
        from . import cli  # noqa: F401

        gc.freeze()
        gc.enable()
        _run()


def _show_commands() -> None:
    """Show help, the version, or an error, without a command."""
    parser, commands = command_parser()
    for name, text in COMMANDS.items():
        commands.add_parser(name, help=text)
    parser.parse_args()


def _run() -> None:
    from .cli import main  # it imports PyTorch and Detectron2

    main()


if __name__ == "__main__":
    main()
