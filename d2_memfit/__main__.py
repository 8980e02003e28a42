# Copyright (c) the d2_memfit developers.
"""The command d2-memfit, also ``python -m d2_memfit``."""

import sys

from .cli.command_line import command_parser
from .common.library_warnings import ignore_warnings_of_libraries


def main() -> None:
    if sys.argv[1:2] != ["train"]:
        command_parser().parse_args()  # help, version and errors, before PyTorch is imported
    ignore_warnings_of_libraries()
    from .cli.commands import main as run

    run()


if __name__ == "__main__":
    main()
