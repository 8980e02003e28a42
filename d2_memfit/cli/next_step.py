# Copyright (c) the d2_memfit developers.
"""The last lines of a command: the files that it wrote, and the next command, to paste."""

import argparse
import shlex
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Optional

from ..config import PRESETS, find_card

if TYPE_CHECKING:
    from ..explain.verdict import ExplainedRun
    from ..planner.plan import Plan

__all__ = [
    "after_a_look",
    "after_explain",
    "after_no_plan",
    "after_plan",
    "after_training",
]

_BUDGETS = ("MEMFIT.BUDGET_GB", "MEMFIT.PRESET")
# Options of a job and of its plan; those that are True have no value.
_OPTIONS = [
    *("config_file", "trainer", "batch", "image_size", "instances", "device", "probe"),
    *("training_only", "card", "budget", "allow", "prefer"),
]


def after_explain(args: argparse.Namespace, told: "ExplainedRun", plan: "Optional[Plan]") -> str:
    """The lines after an explanation: the plan's file and how to train it, or how to get one."""
    explain = ["d2-memfit", "explain", args.log]
    for name in ("config_file", "trainer", "image_size", "instances"):
        value = getattr(args, name)
        explain += ["--" + name.replace("_", "-"), value] if value else []
    explain += _repeated("--project", args.project)
    explain += [word for dataset in args.coco for word in ("--coco", *dataset)]
    card = ["--card", args.card] if args.card else []
    is_of_host = told.oom is not None and told.oom.case == "host"
    if plan is None and (is_of_host or told.ended in ("diverged", "error")):
        return ""  # memory of the card was not the cause
    if told.not_rebuilt:
        if "has no config" in told.not_rebuilt:
            folder = _line(*explain[:2], "OUTPUT_DIR", *explain[3:], *card)
            return f"Next, give the folder of the run, with its config.yaml:\n  {folder}"
        code = ["--project", "MODULE:FUNCTION", "--trainer", "MODULE:CLASS"]
        if "LazyConfig" in told.not_rebuilt:
            code = ["--config-file", told.not_rebuilt.rpartition("--config-file ")[2]]
        return f"Next, name the code of its model:\n  {_line(*explain, *card, *code)}"
    if plan is None:
        return f"Next, plan for a card:\n  {_line(*explain, '--card', '8GB')}"
    if not plan.fits:
        larger = _larger_card(plan) or [*PRESETS][-1]
        return f"Next, plan for a larger card:\n  {_line(*explain, '--card', larger)}"
    if args.output is None:
        file = "plan.py" if args.config_file else "plan.yaml"
        return f"Next, write it to a file:\n  {_line(*explain, *card, '--output', file)}"
    args.num_gpus = plan.estimate.num_gpus
    train = _train(args)
    data = "" if args.coco or args.config_file else " (add its data with --coco)"
    return f"Written: {args.output}\nNext, train it{data}:\n  {train}"


def after_a_look(args: argparse.Namespace) -> str:
    """The line after estimate and doctor."""
    return f"Next, make it fit a card:\n  {_plan(args)}"


def after_plan(args: argparse.Namespace) -> str:
    """The lines after a plan that fits: its file and how to train it, or how to write it."""
    if args.output is None:
        return f"Next, write it to a file:\n  {_plan(args)}"
    train = _train(args)
    return f"Written: {args.output}\nNext, train it:\n  {train}"


def after_no_plan(args: argparse.Namespace, plan: "Plan") -> str:
    """The lines after a plan that does not fit: what would."""
    if plan.must_allow:
        asked = _with(args, allow=",".join(plan.must_allow))
        return f"Next, let the plan change more:\n  {_plan(asked)}"
    card = _larger_card(plan) if plan.estimate.expandable_segments is not None else None
    budget = None if card else plan.smallest_budget_gb
    asked = _with(args, card=card, budget=budget, opts=_without_budget(args))
    return f"Next, plan for more memory:\n  {_plan(asked)}"


def _without_budget(args: argparse.Namespace) -> list[str]:
    """The KEY VALUE pairs that set no budget, or, of a LazyConfig, the overrides."""
    if args.config_file.endswith(".py"):
        return [text for text in args.opts if not text.lstrip("+").startswith("train.budget_gb=")]
    pairs = zip(args.opts[::2], args.opts[1::2])
    return [word for pair in pairs if pair[0] not in _BUDGETS for word in pair]


def _with(args: argparse.Namespace, **values: Any) -> argparse.Namespace:
    return argparse.Namespace(**{**vars(args), **values})


def _larger_card(plan: "Plan") -> Optional[str]:
    """The smallest card on which a plan fits that does not fit its budget; None if none is."""
    least = plan.smallest_budget_gb or 0.0
    return next((card for card, gb in PRESETS.items() if gb >= least), None)


def _train(args: argparse.Namespace) -> str:
    """The command that trains a plan, with the data and ranks of another command."""
    data = [word for dataset in args.coco for word in ("--coco", *dataset)]
    ranks = ["--num-gpus", args.num_gpus] if args.num_gpus > 1 else []
    words = ["--config-file", args.output, *ranks, *data]
    if args.trainer or args.project:
        script = Path((args.trainer or "").partition(":")[0].replace(".", "/") + ".py")
        name = script if script.is_file() else "YOUR_SCRIPT.py"
        return _line("python", name, *words)
    return _line("d2-memfit", "train", *words)


def after_training(
    output_dir: str,
    coco: Sequence[Sequence[str]],
    weights: str,
    trainer: Optional[type] = None,
    add_keys: Sequence[Callable[..., Any]] = (),
    *,
    eval_only: bool = False,
) -> str:
    """The lines after a run, with its files and how to use its weights.

    Args:
        output_dir: OUTPUT_DIR of the run.
        coco: values of ``--coco``, as the run got them.
        weights: the last checkpoint, or what was evaluated.
        trainer: the class of a project's script; None for the command train.
        add_keys: the functions of the script that add its keys.
    """
    config = Path(output_dir) / "config.yaml"
    held_out = next(iter(coco if eval_only else coco[1:]), ())
    images, files = "other images", ["--input", "FOLDER"]
    if held_out:
        images, files = f"{held_out[0]}, or in --input FOLDER", ["--coco", *held_out]
    trained = ["--config-file", config, "--weights", weights]
    lines = [
        f"Written: {weights} (weights), {Path(output_dir) / 'metrics.json'}, {config}",
        f"Curves:\n  {_line('tensorboard', '--logdir', output_dir)}",
    ]
    if eval_only:
        lines = [f"Written: {Path(output_dir) / 'inference'} (results)"]
    code: list[str] = []
    found = ""
    if trainer is not None:
        code = ["--trainer", _name(trainer), *_repeated("--project", map(_name, add_keys))]
        folder = Path(sys.argv[0]).parent
        if folder.resolve() != Path.cwd():  # where python looks for what the script imports
            found = f"export PYTHONPATH={shlex.quote(str(folder))}:$PYTHONPATH\n  "
    if not any("<" in name for name in code):  # no command finds what a function defines
        use = _line("d2-memfit", "predict", *code, "--output", "predictions", *files, *trained)
        lines.append(f"Next, find objects in {images}:\n  {found}{use}")
    return "\n".join(lines)


def _plan(args: argparse.Namespace) -> str:
    """The command plan for the job of another command."""
    words: list[Any] = []
    for name in _OPTIONS:
        value = getattr(args, name, None)
        if value:
            words += ["--" + name.replace("_", "-"), *([] if value is True else [value])]
    words += ["--num-gpus", args.num_gpus] if args.num_gpus > 1 else []
    words += _repeated("--project", args.project)
    words += [word for dataset in args.coco for word in ("--coco", *dataset)]
    if not (args.card or getattr(args, "budget", None)):
        is_card = find_card(str(getattr(args, "device", "")))
        words += ["--card", args.device if is_card else "6GB"]
    return _line("d2-memfit", "plan", *words, "--output", "plan.yaml", *args.opts)


def _name(code: Any) -> str:
    """MODULE:NAME of a class or function, also of the script that runs."""
    is_script = code.__module__ in ("__main__", "__mp_main__")  # or the script of a rank
    module = Path(sys.argv[0]).stem if is_script else code.__module__
    return f"{module}:{code.__qualname__}"


def _repeated(option: str, values: Iterable[str]) -> list[str]:
    return [word for value in values for word in (option, value)]


def _line(*words: Any) -> str:
    return shlex.join(map(str, words))
