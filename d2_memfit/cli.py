"""The command d2-memfit: train within the memory that there is; or ask what a job needs of a GPU,
and how it fits, without one.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Optional

from detectron2.config import CfgNode
from torch import nn

from . import __version__, train
from .checks import check_positive_int
from .config import load_cfg
from .config_files import find_config_file
from .data import add_coco_option, check_classes, check_coco_file, register_coco
from .draw import draw_predictions
from .engine import MemfitCheckpointer, usable_device
from .errors import ConfigError, exit_on_error
from .measure.run import measure_gpu
from .memory import use_expandable_segments
from .options import add_options, check_opts, opts_of_card, opts_of_settings, settings_of_data
from .planner import plan_memory
from .planner.estimate import run_dry
from .planner.fit import planned_yaml
from .planner.text import describe_estimate, describe_plan
from .presets import with_budget
from .projects import add_project_option, find_function

__all__ = ["main"]

_DOES_NOT_FIT = 3  # exit status
_PICTURES = (".png", ".jpg", ".jpeg")  # what OpenCV always writes


def _parser() -> argparse.ArgumentParser:
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument(
        "--config-file",
        default="",
        metavar="FILE",
        help="a file, or the name of a config in Detectron2's model zoo or ours",
    )
    common.add_argument("--num-gpus", type=int, default=1, help="that train together")
    common.add_argument("--device", help="a family (v100, cuda, cpu), or a file of one")
    common.add_argument(
        "--probe", action="store_true", help="measure on this machine's GPU, instead of a dry run"
    )
    common.add_argument("--json", action="store_true", help="for programs")
    add_options(common)
    add_project_option(common)
    common.add_argument("opts", nargs="*", metavar="KEY VALUE", help="config keys and values")
    parser = argparse.ArgumentParser(prog="d2-memfit", description=__doc__)
    parser.add_argument("--version", action="version", version=f"d2_memfit {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    estimate = commands.add_parser("estimate", parents=[common], help="what a job needs")
    estimate.add_argument(
        "--timeline", type=Path, metavar="FILE", help="write all allocations of training, as CSV"
    )
    plan = commands.add_parser("plan", parents=[common], help="make a job fit a budget")
    plan.add_argument("--budget", metavar="GB", help="of the device, such as 5.2, or auto")
    plan.add_argument(
        "--allow", metavar="TIERS", help="of exact,precision,recipe; the first two if not"
    )
    plan.add_argument("--output", type=Path, metavar="FILE", help="write the planned config")
    draw = commands.add_parser("draw", help="draw what a trained model finds")
    draw.add_argument("--config-file", default="", metavar="FILE", help="OUTPUT_DIR/config.yaml")
    add_coco_option(draw)
    draw.add_argument("--output", type=Path, metavar="FILE", help="OUTPUT_DIR/predictions.png")
    draw.add_argument("--num-images", type=int, default=6, help="the first so many of the dataset")
    draw.add_argument("--min-score", type=float, default=0.5, help="of what is drawn")
    draw.add_argument("opts", nargs="*", metavar="KEY VALUE", help="config keys and values")
    measure = commands.add_parser(
        "measure-gpu",
        help="measure this machine's GPU: is all right on it, and how well is it known",
    )
    measure.add_argument("--minutes", type=float, default=8, help="after which it ends; 8")
    measure.add_argument("--device", default="cuda:0", help="cuda:0, or cpu for a rehearsal")
    measure.add_argument(
        "--output", type=Path, default=Path(), metavar="FOLDER", help="for the files; here"
    )
    of_training = train.argument_parser()
    commands.add_parser(
        "train",
        parents=[of_training],
        add_help=False,  # it has one
        help="train or evaluate",
        epilog=of_training.epilog,
        formatter_class=of_training.formatter_class,
    )
    return parser


@exit_on_error
def main(argv: Optional[Sequence[str]] = None) -> None:
    args = _parser().parse_args(argv)
    if args.command == "train":
        train.run(args)
        return
    if args.command == "measure-gpu":
        print(measure_gpu(args.device, args.minutes, args.output, progress=_say))
        return
    for name in ("output", "timeline"):
        _check_folder(f"--{name}", getattr(args, name, None))
    check_opts(args.opts)
    if args.command == "draw":
        _draw(args)
        return
    add_keys = [find_function(name) for name in args.project]
    if not args.project:  # it may have everything in its keys
        find_config_file(args.config_file)
    cfg = _cfg(args, add_keys)
    if args.probe and (args.command == "plan" or cfg.MEMFIT.BUDGET_GB is not None):
        use_expandable_segments()  # as in training under a budget, and before CUDA is started
    if args.command == "estimate":
        dry_job = run_dry(cfg, args.num_gpus, args.device, probe=args.probe)
        estimate = dry_job.estimate(dry_job.limit_bytes)
        print(_json(estimate) if args.json else describe_estimate(estimate))
        if args.timeline is not None:
            dry_job.training.write_csv(args.timeline)
        return
    cfg = with_budget(cfg, args.num_gpus)
    if cfg.MEMFIT.BUDGET_GB is None:
        raise ConfigError(
            "--budget: name one in GB, such as 5.2, or auto for what is free on this machine; or "
            "name a card that is sold with so much, such as --card 6GB"
        )
    plan = plan_memory(
        cfg,
        cfg.MEMFIT.BUDGET_GB,
        args.num_gpus,
        args.allow.split(",") if args.allow else cfg.MEMFIT.PLAN.ALLOW,
        args.device,
        progress=_say,
        probe=args.probe,
    )
    print(_json(plan) if args.json else describe_plan(plan))
    if not plan.fits:
        sys.exit(_DOES_NOT_FIT)
    if args.output is not None:
        args.output.write_text(planned_yaml(cfg, plan))


def _draw(args: argparse.Namespace) -> None:
    find_config_file(args.config_file)
    if not args.coco:
        raise ConfigError("--coco: name the images to be drawn, --coco NAME JSON IMAGE_DIR")
    check_positive_int("--num-images", args.num_images)
    name, json_file, image_dir = args.coco[0]
    register_coco(name, json_file, image_dir)
    file = check_coco_file(name, json_file, image_dir, for_training=False)
    folder = Path(load_cfg(args.config_file, args.opts).OUTPUT_DIR)
    weights = ["MODEL.WEIGHTS", str(folder / "model_final.pth")]
    cfg = load_cfg(args.config_file, [*weights, *args.opts])
    cfg.MODEL.DEVICE = usable_device(cfg.MODEL.DEVICE)
    MemfitCheckpointer(nn.Module(), str(folder)).check(cfg.MODEL.WEIGHTS, resume=False)
    output = args.output or folder / "predictions.png"
    if output.suffix.lower() not in _PICTURES:
        raise ConfigError(f"--output {output} must end in {', '.join(_PICTURES)}")
    check_classes(cfg, file)
    draw_predictions(cfg, name, output, args.num_images, args.min_score)
    print(output)


def _cfg(args: argparse.Namespace, add_keys: Sequence[Any]) -> CfgNode:
    """The config with what follows from --card, --budget and --coco."""
    opts = [*_opts_of_budget(args), *args.opts]
    settings = settings_of_data(args.coco, args.config_file, opts, add_keys, progress=_say)
    for setting in settings:
        print(f"From the data: {setting}", file=sys.stderr if args.json else sys.stdout)
    return load_cfg(args.config_file, [*opts_of_settings(settings), *opts], add_keys)


def _opts_of_budget(args: argparse.Namespace) -> list[str]:
    card, budget = args.card, getattr(args, "budget", None)
    if budget is None:
        return opts_of_card(card, args.opts)
    others = [key for key in ("MEMFIT.BUDGET_GB", "MEMFIT.PRESET") if key in args.opts[::2]]
    if card is not None or others:
        other = f"--card {card}" if card is not None else others[0]
        raise ConfigError(f"--budget {budget} and {other} are two budgets: name one")
    if budget.upper().endswith("GB"):
        _say(f"--budget {budget} is deprecated, for a card of that size take --card {budget}")
        return opts_of_card(budget, args.opts)
    if budget != "auto" and not _is_number(budget):
        raise ConfigError(f"--budget must be a number of GB, such as 6, got {budget!r}")
    here = ["MODEL.DEVICE", "cpu"] if budget == "auto" and args.device == "cpu" else []
    return ["MEMFIT.BUDGET_GB", budget, *here]


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _check_folder(option: str, file: Optional[Path]) -> None:
    if file is not None and not file.parent.is_dir():
        raise ConfigError(f"{option} {file}: there is no folder {file.parent}")


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _json(result: Any) -> str:
    return json.dumps(asdict(result), indent=2)
