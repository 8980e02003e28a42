# Copyright (c) the d2_memfit developers.
"""The command line of d2-memfit: commands and options, without PyTorch and Detectron2.

The module of a command is imported when it runs, and imports what it needs.
"""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Optional

from .. import __version__

_DESCRIPTION = "Plan and train Detectron2 models within the available memory"
COMMANDS = {
    "explain": "explain a log: what a run needed, why it died, and what would have fitted",
    "estimate": "estimate the memory that a job needs",
    "plan": "make a job fit a budget",
    "doctor": "test what works with a job, by small iterations on the CPU",
    "predict": "find objects in images and videos with a trained model",
    "measure-gpu": "measure this machine's GPU, and compare it with what estimates expect",
    "train": "train or evaluate, as Detectron2's tools/train_net.py, with more keys",
}
_MODULES = {"estimate": "plan", "measure-gpu": "doctor"}  # of a command with another name


def positive_int(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a positive integer, got {text!r}")
    return int(text)


def height_width(text: str) -> tuple[int, int]:
    sides = text.lower().replace("x", ",").split(",")
    if len(sides) != 2:
        what = "a height and a width in pixels, such as 800,1333"
        raise argparse.ArgumentTypeError(f"must be {what}, got {text!r}")
    return positive_int(sides[0].strip()), positive_int(sides[1].strip())


_FLAG: dict[str, Any] = {"action": "store_true"}
_INT: dict[str, Any] = {"type": positive_int}
_NAME: dict[str, Any] = {"metavar": "FILE"}
_FILE: dict[str, Any] = {"type": Path, "metavar": "FILE"}
_FUNCTION: dict[str, Any] = {"metavar": "MODULE:FUNCTION"}
_COCO: dict[str, Any] = {"nargs": 3, "metavar": ("NAME", "JSON", "IMAGE_DIR")}
_MANY: dict[str, Any] = {"action": "append", "default": []}
# Each option: its help, and arguments of add_argument.
OPTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "--allow": ("tiers that a plan may use: exact,precision,recipe", {"metavar": "TIERS"}),
    "--batch": ("a function that takes the config and returns the largest batch", _FUNCTION),
    "--budget": ("device memory in GB, such as 5.2; auto: what is free here", {"metavar": "GB"}),
    "--card": ("a card by its memory, 6GB, or its name, 'RTX 3060 Laptop'", {"metavar": "CARD"}),
    "--coco": ("a dataset to register; the first is for training", {**_COCO, **_MANY}),
    "--config-file": ("a file, or a name in a zoo; a LazyConfig is .py", {**_NAME, "default": ""}),
    "--details": ("print all that is known", _FLAG),
    "--device": ("a card (rtx_3060, t4, a100, ...), cuda, or cpu", {}),
    "--dist-url": ("address of the first of several machines", {"default": "auto"}),
    "--eval-only": ("evaluate, and do not train", _FLAG),
    "--fit": ("make the job fit this machine, or --budget or --card, by a plan", _FLAG),
    "--hold-out": ("evaluate on this share of --coco, such as 0.2", {"type": float}),
    "--html": ("write the answer and the memory of a step as an HTML page", _FILE),
    "--image-size": ("the largest image file", {"type": height_width, "metavar": "HEIGHT,WIDTH"}),
    "--inference-only": ("estimate inference on one image instead", _FLAG),
    "--input": ("an image, a video, or a folder of them", {"type": Path}),
    "--instances": ("annotated objects of the most crowded image", _INT),
    "--items": ("measure only items with this in their name", {"default": ""}),
    "--json": ("print the result as JSON", _FLAG),
    "--machine-rank": ("rank of this machine (default: 0)", {"type": int, "default": 0}),
    "--min-score": ("lowest score that is drawn (0.5)", {"type": float, "default": 0.5}),
    "--num-gpus": ("GPUs on each machine (default: 1)", {"type": int, "default": 1}),
    "--num-machines": ("number of machines (default: 1)", {**_INT, "default": 1}),
    "--output": ("file for the planned config", _FILE),
    "--overwrite": ("replace outputs that exist, instead of an error", _FLAG),
    "--prefer": ("speed: the plan that is predicted to be faster", {"choices": ("exact", "speed")}),
    "--probe": ("measure on this machine's GPU, instead of a dry run", _FLAG),
    "--project": ("a function that adds keys, or a folder of modules", {**_FUNCTION, **_MANY}),
    "--resume": ("continue from the last checkpoint in OUTPUT_DIR", _FLAG),
    "--run": ("folder of an earlier run here, whose peaks correct the estimate", {"type": Path}),
    "--seconds": ("time limit; run again for the rest (480)", {"type": float, "default": 480}),
    "--small": ("small images, for a rehearsal", _FLAG),
    "--tile-size": ("cut images into overlapping tiles of this size, in pixels", _INT),
    "--trainer": ("the class that trains: train_net:Trainer", {"metavar": "MODULE:CLASS"}),
    "--training-only": ("without evaluation and its memory", _FLAG),
    "--weights": ("trained weights (default: the last of the run)", _NAME),
    "log": ("a log.txt, the output of a console, a notebook, or an OUTPUT_DIR", {"type": Path}),
    "opts": ("KEY VALUE pairs of the config, docs/CONFIG.md; key=value for .py", {"nargs": "*"}),
}
_PROJECT = "--config-file --project --trainer --coco --card"
_JOB = f"{_PROJECT} --num-gpus --batch --image-size --instances --details"
_ANSWER = "--json --html --overwrite"
_ESTIMATE = f"{_JOB} {_ANSWER} --device --probe --run --training-only"
OPTIONS_OF = {
    "explain": f"log {_PROJECT} {_ANSWER} --image-size --instances --details --output",
    "estimate": f"{_ESTIMATE} --inference-only opts",
    "plan": f"{_ESTIMATE} --budget --allow --prefer --output opts",
    "doctor": f"{_JOB} opts",
    "predict": f"{_PROJECT} --budget --weights --input --output --overwrite --tile-size "
    "--min-score opts",
    "measure-gpu": "--seconds --output --items --small",
    "train": "--config-file --resume --eval-only --num-gpus --num-machines --machine-rank "
    "--dist-url --fit --budget --card --training-only --hold-out --coco opts",
}
# What differs in a command.
_INSTEAD: dict[str, dict[str, Any]] = {
    "predict --output": {"default": Path("predictions"), "help": "folder (predictions)"},
    "measure-gpu --output": {"default": Path("measured.jsonl"), "help": "file of the records"},
    "train opts": {"nargs": argparse.REMAINDER},
}


def _add_options(parser: argparse.ArgumentParser, command: str) -> None:
    for name in OPTIONS_OF[command].split():
        help, arguments = OPTIONS[name]
        instead = _INSTEAD.get(f"{command} {name}", {})
        parser.add_argument(name, **{"help": help, **arguments, **instead})
    parser.set_defaults(notes=[])  # lines about the config, for the log or the answer


def command_parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    parser = argparse.ArgumentParser(prog="d2-memfit", description=_DESCRIPTION)
    parser.add_argument("--version", action="version", version=f"d2_memfit {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, text in COMMANDS.items():
        _add_options(commands.add_parser(name, help=text, description=text), name)
    return parser


def argument_parser(usage: Optional[str] = None) -> argparse.ArgumentParser:
    """The parser of a script that trains as the command train does.

    Args:
        usage: the text under the options in its help.
    """
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(epilog=usage, formatter_class=raw)
    _add_options(parser, "train")
    return parser


def files_read(args: argparse.Namespace) -> list[str]:
    """The files that a command's options name, without its outputs."""
    named = [getattr(args, option, None) for option in ("config_file", "input", "weights", "log")]
    return [str(file) for file in [*named, *(json for _, json, _ in args.coco)] if file]


def main(argv: Optional[Sequence[str]] = None) -> None:
    """Run a command with its arguments; None for those of the process."""
    runner()(command_parser().parse_args(argv))


def runner() -> Callable[[argparse.Namespace], None]:
    """Import PyTorch and Detectron2, and return the function that runs a command."""
    from ..common.errors import exit_on_error
    from ..engine.ending import signals_end_at_once

    return exit_on_error(signals_end_at_once()(_run))


def _run(args: argparse.Namespace) -> None:
    from unittest.mock import patch

    from ..common.files import check_outputs
    from .screen import end_progress

    if hasattr(args, "html"):
        outputs = [path for path in (getattr(args, "output", None), args.html) if path]
        check_outputs(outputs, files_read(args), args.overwrite)
    module = _MODULES.get(args.command, args.command)
    try:
        run = getattr(import_module(f".{module}", __package__), args.command.replace("-", "_"))
        with patch.object(sys, "path", [os.getcwd(), *sys.path]):  # as for ``python -m``
            run(args)
    finally:
        end_progress()
