"""The command d2-memfit: what a job needs of a GPU, and how it fits, said without one."""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Optional

from detectron2.config import CfgNode

from .config import load_cfg
from .data import add_coco_option, register_coco
from .errors import ConfigError, exit_on_error
from .memory import use_expandable_segments
from .planner import plan_memory
from .planner.estimate import run_dry
from .planner.fit import planned_yaml
from .planner.text import describe_estimate, describe_plan
from .presets import PRESETS, budget_of_preset, with_preset
from .projects import add_project_option, find_function

__all__ = ["main"]

_DOES_NOT_FIT = 3  # exit status


def _parser() -> argparse.ArgumentParser:
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--config-file", default="", metavar="FILE", help="of Detectron2 or ours")
    common.add_argument("--num-gpus", type=int, default=1, help="that train together")
    common.add_argument("--device", help="a family (v100, cuda, cpu), or a file of one")
    common.add_argument(
        "--probe", action="store_true", help="measure on this machine's GPU, instead of a dry run"
    )
    common.add_argument("--json", action="store_true", help="for programs")
    add_coco_option(common)
    add_project_option(common)
    common.add_argument("opts", nargs="*", metavar="KEY VALUE", help="config keys and values")
    parser = argparse.ArgumentParser(prog="d2-memfit", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    estimate = commands.add_parser("estimate", parents=[common], help="what a job needs")
    estimate.add_argument(
        "--timeline", type=Path, metavar="FILE", help="write all allocations of training, as CSV"
    )
    plan = commands.add_parser("plan", parents=[common], help="make a job fit a budget")
    plan.add_argument("--budget", help=f"in GB, such as 6, or one of {', '.join(PRESETS)}")
    plan.add_argument(
        "--allow", metavar="TIERS", help="of exact,precision,recipe; the first two if not"
    )
    plan.add_argument("--output", type=Path, metavar="FILE", help="write the planned config")
    return parser


@exit_on_error
def main(argv: Optional[Sequence[str]] = None) -> None:
    args = _parser().parse_args(argv)
    for dataset in args.coco:
        register_coco(*dataset)
    if len(args.opts) % 2:
        raise ConfigError(f"KEY VALUE pairs: a value is missing after {args.opts[-1]}")
    for name in ("output", "timeline"):
        _check_folder(f"--{name}", getattr(args, name, None))
    add_keys = [find_function(name) for name in args.project]
    cfg = with_preset(load_cfg(args.config_file, args.opts, add_keys))
    if args.probe and (args.command == "plan" or cfg.MEMFIT.BUDGET_GB is not None):
        use_expandable_segments()  # as in training under a budget, and before CUDA is started
    if args.command == "estimate":
        dry_job = run_dry(cfg, args.num_gpus, args.device, probe=args.probe)
        estimate = dry_job.estimate(dry_job.limit_bytes)
        print(_json(estimate) if args.json else describe_estimate(estimate))
        if args.timeline is not None:
            dry_job.training.write_csv(args.timeline)
        return
    plan = plan_memory(
        cfg,
        _budget(args.budget, cfg),
        args.num_gpus,
        args.allow.split(",") if args.allow else cfg.MEMFIT.PLAN.ALLOW,
        args.device,
        progress=lambda line: print(line, file=sys.stderr, flush=True),
        probe=args.probe,
    )
    print(_json(plan) if args.json else describe_plan(plan))
    if not plan.fits:
        sys.exit(_DOES_NOT_FIT)
    if args.output is not None:
        args.output.write_text(planned_yaml(cfg, plan))


def _check_folder(option: str, file: Optional[Path]) -> None:
    if file is not None and not file.parent.is_dir():
        raise ConfigError(f"{option} {file}: there is no folder {file.parent}")


def _budget(text: Optional[str], cfg: CfgNode) -> float:
    if text is None:
        if cfg.MEMFIT.BUDGET_GB is None:
            raise ConfigError("--budget: name one, in GB, or set MEMFIT.BUDGET_GB")
        return cfg.MEMFIT.BUDGET_GB
    try:
        return float(text)
    except ValueError:
        if text[:1].isdigit() and not text.endswith("GB"):
            raise ConfigError(f"--budget must be a number of GB, such as 6, got {text!r}") from None
        return budget_of_preset(text)


def _json(result: Any) -> str:
    return json.dumps(asdict(result), indent=2)


if __name__ == "__main__":
    main()
