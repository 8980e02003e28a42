# Copyright (c) the d2_memfit developers.
"""The last lines of a command: the files that it wrote, and the next command, to paste."""

import argparse
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Optional

from ..config.cards import PRESETS, find_card

if TYPE_CHECKING:
    from ..explain.records import LoggedRun
    from ..planner.plan import Plan

__all__ = ["after_a_look", "after_explain", "after_no_plan", "after_plan", "after_training"]

_NOT_OF_MEMORY = ("diverged", "error")
_BUDGETS = ("MEMFIT.BUDGET_GB", "MEMFIT.PRESET")
# Options of a job and of its plan; those that are True have no value.
_OPTIONS = [
    *("config_file", "trainer", "batch", "image_size", "instances", "device", "probe"),
    *("training_only", "card", "budget", "allow", "prefer", "num_gpus", "project", "coco"),
]


def after_explain(
    args: argparse.Namespace, run: "LoggedRun", is_rebuilt: bool, plan: "Optional[Plan]"
) -> str:
    """The lines after an explanation: the plan's file and how to train it, or how to get one."""

    def explain(*words: Any, log: Any = args.log, **values: Any) -> str:
        return _line("d2-memfit", "explain", log, *_words(_with(args, **values)), *words)

    if plan is None and (run.oom.case == "host" if run.oom else run.ended in _NOT_OF_MEMORY):
        return ""  # memory of the card was not the cause
    if not is_rebuilt and run.is_lazy:
        return f"Next, name the code of its model:\n  {explain(config_file=run.config_file)}"
    if not is_rebuilt and not (run.config_text or run.zoo_config):
        of_folder = explain(log="OUTPUT_DIR")
        return f"Next, give the folder of the run, with its config.yaml:\n  {of_folder}"
    if not is_rebuilt:
        code = explain("--project", "MODULE:FUNCTION", "--trainer", "MODULE:CLASS")
        return f"Next, name the code of its model:\n  {code}"
    if plan is None:
        return f"Next, plan for a card:\n  {explain(card='8GB')}"
    if not plan.fits:
        larger = _larger_card(plan) or [*PRESETS][-1]
        return f"Next, plan for a larger card:\n  {explain(card=larger)}"
    if args.output is None:
        file = "plan.py" if args.config_file else "plan.yaml"
        return f"Next, write it to a file:\n  {explain('--output', file)}"
    train = _train(_with(args, num_gpus=plan.estimate.num_gpus))
    data = "" if args.coco or args.config_file else " (add its data with --coco)"
    return f"Written: {args.output}\nNext, train it{data}:\n  {train}"


def after_a_look(args: argparse.Namespace) -> str:
    """The line after estimate and doctor."""
    return f"Next, make it fit a card:\n  {_plan(args)}"


def after_plan(args: argparse.Namespace) -> str:
    """The lines after a plan that fits: its file and how to train it, or how to write it."""
    if args.output is None:
        return f"Next, write it to a file:\n  {_plan(args)}"
    return f"Written: {args.output}\nNext, train it:\n  {_train(args)}"


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
        places = ("train.memfit.budget_gb=", "train.memfit.preset=")
        return [text for text in args.opts if not text.lstrip("+").startswith(places)]
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
    options = argparse.Namespace(config_file=args.output, num_gpus=args.num_gpus, coco=args.coco)
    if args.trainer or args.project:
        script = Path((args.trainer or "").partition(":")[0].replace(".", "/") + ".py")
        name = script if script.is_file() else "YOUR_SCRIPT.py"
        return _line("python", name, *_words(options))
    return _line("d2-memfit", "train", *_words(options))


def after_training(
    args: argparse.Namespace,
    output_dir: str,
    weights: str,
    trainer: Optional[type] = None,
    add_keys: Sequence[Callable[..., Any]] = (),
) -> str:
    """The lines after a run, with its files and how to use its weights.

    Args:
        args: those of the run.
        output_dir: OUTPUT_DIR of the run.
        weights: the last checkpoint, or what was evaluated.
        trainer: the class of a project's script; None for the command train.
        add_keys: the functions of the script that add its keys.
    """
    config = Path(output_dir) / "config.yaml"
    held_out = next(iter(args.coco if args.eval_only else args.coco[1:]), ())
    images, files = "other images", ["--input", "FOLDER"]
    if held_out:
        images, files = f"{held_out[0]}, or in --input FOLDER", ["--coco", *held_out]
    lines = [
        f"Written: {weights} (weights), {Path(output_dir) / 'metrics.json'}, {config}",
        f"Curves:\n  {_line('tensorboard', '--logdir', output_dir)}",
    ]
    if args.eval_only:
        lines = [f"Written: {Path(output_dir) / 'inference'} (results)"]
    code = argparse.Namespace(project=[_name(add) for add in add_keys])
    code.trainer = None if trainer is None else _name(trainer)
    found, folder = "", Path(sys.argv[0]).parent
    if trainer is not None and folder.resolve() != Path.cwd():  # where its modules are
        found = f"export PYTHONPATH={shlex.quote(str(folder))}:$PYTHONPATH\n  "
    if not any("<" in name for name in _words(code)):  # no command finds what a function defines
        words = [*_words(code), "--output", "predictions", *files]
        use = _line("d2-memfit", "predict", *words, "--config-file", config, "--weights", weights)
        lines.append(f"Next, find objects in {images}:\n  {found}{use}")
    return "\n".join(lines)


def _plan(args: argparse.Namespace) -> str:
    """The command plan for the job of another command."""
    if not (args.card or getattr(args, "budget", None)):
        device = getattr(args, "device", None)
        args = _with(args, card=device if find_card(str(device)) else "6GB")
    file = "plan.py" if args.config_file.endswith(".py") else "plan.yaml"
    return _line("d2-memfit", "plan", *_words(args), "--output", file, *args.opts)


def _words(args: argparse.Namespace) -> list[Any]:
    """The options of a job that a command was given."""
    words: list[Any] = []
    for name in _OPTIONS:
        value, option = getattr(args, name, None), "--" + name.replace("_", "-")
        if name == "num_gpus" and value == 1:
            continue
        if isinstance(value, list):  # an option that may be repeated
            for each in value:
                words += [option, *([each] if isinstance(each, str) else each)]
        elif value:
            words += [option] if value is True else [option, value]
    return words


def _name(code: Any) -> str:
    """MODULE:NAME of a class or function, also of the script that runs."""
    is_script = code.__module__ in ("__main__", "__mp_main__")  # or the script of a rank
    module = Path(sys.argv[0]).stem if is_script else code.__module__
    return f"{module}:{code.__qualname__}"


def _line(*words: Any) -> str:
    return shlex.join(map(str, words))
