# Copyright (c) the d2_memfit developers.
"""The command line of d2-memfit: commands and options, without PyTorch and Detectron2."""

import argparse
import difflib
import re
from pathlib import Path
from typing import Any, Optional

from .. import __version__

__all__ = ["COMMANDS", "add_card_and_coco_options", "add_coco_option", "command_parser"]
__all__ += ["files_read"]

_DESCRIPTION = (
    "Train Detectron2 models within the available memory. Before training, and without a GPU, "
    "estimate what a job needs, and plan how to make it fit."
)
COMMANDS = {
    "explain": "explain a log: what a run needed, why it died, and what would have fitted",
    "estimate": "estimate the memory that a job needs",
    "plan": "make a job fit a budget",
    "doctor": "test what works with a job, by small iterations on the CPU with injected errors",
    "predict": "find objects in images and videos with a trained model",
    "measure-gpu": "measure this machine's GPU, and compare it with what estimates expect",
    "train": "train or evaluate",
}


def files_read(args: argparse.Namespace) -> list[str]:
    """The files that a command's options name, without its outputs."""
    options = ("config_file", "device", "input", "weights")
    named = [getattr(args, option, None) for option in (*options, "log")]
    return [str(file) for file in [*named, *(json for _, json, _ in args.coco)] if file]


class _CommandParser(argparse.ArgumentParser):
    """The parser of a program with commands, which suggests an option for an unknown one."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.commands = self.add_subparsers(
            dest="command", required=True, parser_class=argparse.ArgumentParser
        )

    def parse_args(self, *args: Any) -> argparse.Namespace:  # type: ignore[override]
        parsed, unknown = self.parse_known_args(*args)
        if unknown:
            options = re.findall(r"--[\w-]+", self.commands.choices[parsed.command].format_help())
            name = unknown[0].partition("=")[0]
            near = difflib.get_close_matches(name, options, n=1)
            hint = f" (did you mean {near[0]}?)" if near else ""
            if parsed.command == "train" and name in ("--trainer", "--project"):
                hint = ". A project trains by its own script: docs/YOUR_PROJECT.md"
            self.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
        return parsed


def command_parser(
    training: Optional[argparse.ArgumentParser] = None,
) -> argparse.ArgumentParser:
    """The parser of all commands.

    Args:
        training: the parser of the command ``train``, which needs Detectron2; None leaves its
            options out.
    """
    parser = _CommandParser(prog="d2-memfit", description=_DESCRIPTION)
    parser.add_argument("--version", action="version", version=f"d2_memfit {__version__}")
    commands = parser.commands
    explain = commands.add_parser("explain", help=COMMANDS["explain"])
    _add_explain_options(explain)
    asking = _parser_of_asking()
    estimate = commands.add_parser("estimate", parents=[asking], help=COMMANDS["estimate"])
    estimate.add_argument(
        "--inference-only",
        action="store_true",
        help="estimate memory and time of inference on one image instead",
    )
    plan = commands.add_parser("plan", parents=[asking], help=COMMANDS["plan"])
    _add_budget_option(plan)
    plan.add_argument(
        "--allow",
        metavar="TIERS",
        help="tiers of techniques that the plan may use: exact, precision, recipe, separated by "
        "commas (default: MEMFIT.PLAN.ALLOW, which is exact,precision)",
    )
    plan.add_argument(
        "--prefer",
        choices=("exact", "speed"),
        help="speed chooses the plan that is predicted to be faster, which may change number "
        "formats if they are allowed (default: MEMFIT.PLAN.PREFER, which is exact)",
    )
    plan.add_argument("--output", type=Path, metavar="FILE", help="write the planned config")
    doctor = commands.add_parser("doctor", help=COMMANDS["doctor"])
    _add_job_options(doctor)
    _add_details_option(doctor)
    predict = commands.add_parser("predict", help=COMMANDS["predict"])
    _add_predict_options(predict)
    measure = commands.add_parser("measure-gpu", help=COMMANDS["measure-gpu"])
    _add_measure_options(measure)
    if training is None:
        commands.add_parser("train", help=COMMANDS["train"])
    else:
        commands.add_parser(
            "train",
            parents=[training],
            add_help=False,  # it has one
            help=COMMANDS["train"],
            epilog=training.epilog,
            formatter_class=training.formatter_class,
        )
    return parser


def _parser_of_asking() -> argparse.ArgumentParser:
    """The options that estimate and plan share."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument(
        "--device",
        help="the device that the job runs on: a card (rtx_3060, t4, a100, ...), cuda, cpu, "
        "or a device file (default: this machine's GPU, or cuda if there "
        "is none)",
    )
    measured = parser.add_mutually_exclusive_group()
    measured.add_argument(
        "--probe", action="store_true", help="measure on this machine's GPU, instead of a dry run"
    )
    measured.add_argument(
        "--run",
        type=Path,
        metavar="OUTPUT_DIR",
        help="the folder of an earlier run of this model on this machine: its peaks correct the "
        "estimate",
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    _add_details_option(parser)
    parser.add_argument(
        "--training-only", action="store_true", help="leave out the memory of evaluation"
    )
    _add_html_option(parser)
    _add_job_options(parser)
    return parser


def _add_explain_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "log",
        type=Path,
        metavar="LOG",
        help="a log.txt, the output of a console, a notebook, or an OUTPUT_DIR",
    )
    parser.add_argument(
        "--card", metavar="CARD", help="plan for this card (default: that of the log)"
    )
    parser.add_argument(
        "--config-file",
        metavar="FILE.py",
        help="the LazyConfig of the log, whose code no log has; it is run",
    )
    add_coco_option(parser)
    _add_project_options(parser)
    _add_size_options(parser)
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the planned config")
    _add_html_option(parser)
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    _add_details_option(parser)


def _add_html_option(parser: argparse.ArgumentParser) -> None:
    help = "write the answer and the memory of a step as one HTML page"
    parser.add_argument("--html", type=Path, metavar="FILE", help=help)
    _add_overwrite_option(parser)


def _add_overwrite_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--overwrite", action="store_true", help="replace existing outputs")


def _add_details_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--details", action="store_true", help="print all that is known")


def _add_job_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that choose a job and its largest batch."""
    parser.set_defaults(json=False)  # for commands without --json
    parser.add_argument(
        "--num-gpus", type=int, default=1, help="number of GPUs that train together (default: 1)"
    )
    add_card_and_coco_options(parser)
    _add_config_options(parser)
    parser.add_argument(
        "--batch",
        metavar="MODULE:FUNCTION",
        help="a function that takes the config and returns the largest batch: a list of dataset "
        "dicts as the model gets them",
    )
    _add_size_options(parser)


def _add_size_options(parser: argparse.ArgumentParser) -> None:
    """Add what a dataset would say."""
    parser.add_argument(
        "--image-size",
        metavar="HEIGHT,WIDTH",
        help="size of the largest image file in pixels (default: that of the dataset)",
    )
    parser.add_argument(
        "--instances",
        type=int,
        metavar="N",
        help="annotated objects of the most crowded image (default: those of the dataset)",
    )


def _add_config_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that choose a config and the code of its project."""
    parser.add_argument(
        "--config-file",
        default="",
        metavar="FILE",
        help="a file, or the name of a config in Detectron2's model zoo or ours; a LazyConfig ends "
        "in .py",
    )
    _add_project_options(parser)
    parser.add_argument(
        "opts", nargs="*", metavar="KEY VALUE", help="config keys and values; key=value for .py"
    )


def _add_project_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that name the code of a project."""
    parser.add_argument(
        "--project",
        action="append",
        default=[],
        metavar="MODULE:FUNCTION",
        help="a function that adds a project's keys to a config, or returns a config with them, "
        "such as detectron2.projects.point_rend:add_pointrend_config; may be repeated",
    )
    parser.add_argument(
        "--trainer",
        metavar="MODULE:CLASS",
        help="the class that trains, with build_model, build_optimizer, ... as in DefaultTrainer; "
        "for a script train_net.py in this folder it is train_net:Trainer",
    )


def _add_predict_options(parser: argparse.ArgumentParser) -> None:
    _add_config_options(parser)
    parser.add_argument(
        "--weights",
        metavar="FILE",
        help="the trained weights (default: the last ones in the config's folder, or "
        "MODEL.WEIGHTS)",
    )
    parser.set_defaults(num_gpus=1, batch=None, image_size=None, instances=None, json=False)
    parser.add_argument(
        "--input",
        type=Path,
        metavar="PATH",
        help="an image, a video, or a folder of them (default: the images of --coco)",
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("predictions"),
        metavar="FOLDER",
        help="folder for pictures and results; created if needed (default: predictions)",
    )
    _add_overwrite_option(parser)
    parser.add_argument(
        "--tile-size",
        type=int,
        metavar="PIXELS",
        help="cut images into overlapping tiles of this size, and merge the objects found in them; "
        "for small objects, or for images that do not fit",
    )
    parser.add_argument(
        "--min-score",
        type=float,
        default=0.5,
        help="lowest score of an object that is drawn (default: 0.5)",
    )
    _add_budget_option(parser)
    add_card_and_coco_options(parser)


def _add_budget_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--budget",
        metavar="GB",
        help="device memory in GB that the job may use, such as 5.2; auto takes what is free on "
        "this machine",
    )


def _add_measure_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", default="cuda:0", help="the GPU (default: cuda:0)")
    parser.add_argument(
        "--seconds",
        type=float,
        default=480,
        help="time limit; run the command again to measure the rest (default: 480)",
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("measured.jsonl"),
        metavar="FILE",
        help="file for the records; items that have one are not measured again (default: "
        "measured.jsonl)",
    )
    parser.add_argument(
        "--items", default="", metavar="TEXT", help="measure only items with this in their name"
    )
    parser.add_argument("--small", action="store_true", help="small images, for a rehearsal")


def add_card_and_coco_options(parser: argparse.ArgumentParser) -> None:
    """Add ``--card`` and ``--coco``."""
    parser.add_argument(
        "--card",
        metavar="CARD",
        help="use the budget of a card by its nominal memory, such as 6GB, or by its name, such as "
        "'RTX 3060 Laptop'; sets MEMFIT.PRESET or MEMFIT.BUDGET_GB",
    )
    add_coco_option(parser)


def add_coco_option(parser: argparse.ArgumentParser) -> None:
    """Add ``--coco NAME JSON IMAGE_DIR``, whose values ``register_coco`` takes."""
    parser.add_argument(
        "--coco",
        nargs=3,
        action="append",
        default=[],
        metavar=("NAME", "JSON", "IMAGE_DIR"),
        help="register a dataset in COCO's format under this name; may be repeated. Unless "
        "DATASETS says otherwise, the first is for training and the others are for evaluation",
    )
