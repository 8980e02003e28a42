# Copyright (c) the d2_memfit developers.
"""The command d2-memfit, also ``python -m d2_memfit``."""

import gc
import io
import sys

from .cli.command_line import command_parser, runner
from .common.startup import ignore_warnings_of_libraries, import_dynamo_later, missing


def main() -> None:
    if isinstance(sys.stdout, io.TextIOWrapper):  # what the terminal's encoding lacks is escaped
        sys.stdout.reconfigure(errors="backslashreplace")
    if (lacks := missing()) is not None:
        print(lacks, file=sys.stderr)
    args = command_parser().parse_args()  # help, version and errors, before PyTorch is imported
    if lacks is not None:
        sys.exit(2)
    if args.command in ("estimate", "explain", "plan"):
        import_dynamo_later()
    ignore_warnings_of_libraries()
    gc.disable()  # nothing that is imported is ever freed: to look for it takes a tenth of a plan
    run = runner()
    gc.freeze()
    gc.enable()
    run(args)


if __name__ == "__main__":
    main()
