# Copyright (c) the d2_memfit developers.
"""The command d2-memfit, also ``python -m d2_memfit``."""

import gc
import io
import sys

from .cli.command_line import command_parser
from .cli.kept_answers import Reads, known_answer, show_again
from .common.library_warnings import ignore_warnings_of_libraries
from .environment import missing


def main() -> None:
    if isinstance(sys.stdout, io.TextIOWrapper):  # what the terminal's encoding lacks is escaped
        sys.stdout.reconfigure(errors="backslashreplace")
    lacks = missing()
    if lacks is not None:
        try:
            command_parser().parse_known_args()  # help and version
        finally:
            print(lacks, file=sys.stderr)
        sys.exit(2)
    reads = None
    if sys.argv[1:2] != ["train"]:
        args = command_parser().parse_args()  # help, version and errors, before PyTorch is imported
        if args.command in ("estimate", "plan"):
            answer = known_answer(args)
            if answer is not None:
                show_again(args, answer)
                sys.exit(answer["status"])
            reads = Reads(args)
    ignore_warnings_of_libraries()
    gc.disable()  # nothing that is imported is ever freed: to look for it takes a tenth of a plan
    from .cli.commands import main as run

    gc.freeze()
    gc.enable()
    run(None, reads)


if __name__ == "__main__":
    main()
