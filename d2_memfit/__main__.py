# Copyright (c) the d2_memfit developers.
"""The command d2-memfit, also ``python -m d2_memfit``."""

import sys

from .command_line import COMMANDS, command_parser
from .library_warnings import ignore_warnings_of_libraries


def main() -> None:
    name = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if name not in COMMANDS:
        _show_commands()
    ignore_warnings_of_libraries()
    from .cli import main as run  # it imports PyTorch and Detectron2

    run()


def _show_commands() -> None:
    """Show help, the version, or an error, without a command."""
    parser, commands = command_parser()
    for name, text in COMMANDS.items():
        commands.add_parser(name, help=text)
    parser.parse_args()


if __name__ == "__main__":
    main()
