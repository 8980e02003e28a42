# Copyright (c) the d2_memfit developers.
"""The commands estimate and plan."""

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Optional

from ..common.errors import ConfigError
from ..common.files import output_file
from ..config.cards import find_card
from ..job import Job
from ..memory import use_expandable_segments
from ..planner import text
from ..planner.estimate import DryJob
from ..planner.plan import Plan, plan_memory
from ..planner.plan_file import keys_as_yaml, lazy_file, planned_yaml
from ..predict.estimate import estimate_inference
from ..report import write_page
from .options import Config, budget_keys, is_lazy, job_of, load_config
from .screen import next_step, put_together, say, show, show_progress

__all__ = ["DOES_NOT_FIT", "check_plan_file", "estimate", "give_answer", "next_plan", "next_train"]
__all__ += ["plan", "write_plan"]

DOES_NOT_FIT = 3  # exit status


def estimate(args: argparse.Namespace) -> None:
    _, job, device = _asked(args)
    if args.inference_only:
        inference = estimate_inference(job, device)
        give_answer(args, inference, str(inference))
        return
    progress = show_progress if sys.stderr.isatty() else str  # its output has nothing else
    dry_job = DryJob(job, device, not args.training_only, progress, args.run)
    if args.probe:
        dry_job.probe()
    estimate, budget_gb = dry_job.estimate(), job.budget_gb
    if budget_gb is not None and not args.probe:
        estimate = replace(estimate, objects_that_fit=dry_job.objects_that_fit(budget_gb))
    fits = budget_gb is not None and dry_job.fits(budget_gb)
    give_answer(
        args,
        estimate,
        text.answer_of_estimate(estimate, budget_gb, fits),
        text.describe_estimate(estimate),
        next_plan(args),
        steps=lambda: {"training": dry_job.device.events(dry_job.whole())},
        limit_gb=budget_gb,
    )


def plan(args: argparse.Namespace) -> None:
    check_plan_file(args.config_file, args.output)
    cfg, job, device = _asked(args)
    if job.budget_gb is None:
        raise ConfigError(
            "a plan needs a budget: --budget with a number of GB, such as 5.2, or auto for the "
            "free memory of this machine. For a card, give its memory: --card 6GB"
        )
    plan = plan_memory(
        job,
        job.budget_gb,
        allow=args.allow.split(",") if args.allow else job.cfg.MEMFIT.PLAN.ALLOW,
        device=device,
        progress=show_progress,
        probe=args.probe,
        evaluates=not args.training_only,
        prefer=args.prefer or job.cfg.MEMFIT.PLAN.PREFER,
        counts_objects=True,
        run=args.run,
    )

    def steps() -> dict[str, Any]:
        planned = job.with_settings(plan.settings)
        dry = DryJob(planned, device, evaluates=False, run=args.run)
        return {"with the plan": dry.device.events(dry.whole())}

    if args.output is not None and plan.fits:  # who reads what is printed may end early
        write_plan(args, cfg, plan)
    give_answer(
        args,
        plan,
        text.answer_of_plan(plan),
        text.describe_plan(plan),
        _next_step(args, plan),
        keys=keys_as_yaml(job, plan),
        steps=steps,
        limit_gb=plan.budget_gb,
    )
    if not plan.fits:
        sys.exit(DOES_NOT_FIT)


def write_plan(args: argparse.Namespace, cfg: Config, plan: Plan) -> None:
    """Write ``--output``, which ``train`` takes: yaml, or a LazyConfig for one."""
    if args.output.suffix == ".py":
        planned = lazy_file(args.config_file, getattr(args, "opts", []), plan)
    else:
        planned = planned_yaml(cfg, plan)
    with output_file(args.output, "w") as file:
        file.write(planned)


def give_answer(
    args: argparse.Namespace,
    result: Any,
    answer: str,
    details: str = "",
    next_step: str = "",
    keys: str = "",
    steps: Callable[[], Mapping[str, Iterable[Any]]] = dict,
    limit_gb: Optional[float] = None,
) -> None:
    """Print the result of a command, as text or JSON, with its notes, and write its page.

    Args:
        result: a dataclass, for ``--json``.
        keys, steps, limit_gb: of the page, as for :func:`~d2_memfit.report.write_page`.
    """
    if args.notes:  # one for the answer, and all of them for the details
        answer += f"\n{text.first_of(args.notes, 200)}"
        details = "\n".join([*args.notes, "", details])
    if getattr(args, "html", None) is not None:
        texts = {"Answer": answer, "Keys": keys, "Next": next_step, "Details": details}
        write_page(args.html, f"d2-memfit {args.command}", texts, steps(), limit_gb)
    if getattr(args, "json", False):
        for note in args.notes:
            say(note)
        show(json.dumps(asdict(result), indent=2))
    else:
        show(put_together(args, answer, details, next_step))


def next_plan(args: argparse.Namespace, **values: Any) -> str:
    """The line that plans for the job of a command, by default for its card, or for 6 GB."""
    device = str(getattr(args, "device", None))
    if not (args.card or getattr(args, "budget", None) or budget_keys(args.opts)):
        values = {"card": device if find_card(device) else "6GB", **values}
    file = "plan.py" if is_lazy(args.config_file) else "plan.yaml"
    return next_step("plan, and write the plan to a file", "plan", args, output=file, **values)


def next_train(args: argparse.Namespace, num_gpus: int) -> str:
    """The lines after a plan was written."""
    script = Path((args.trainer or "").partition(":")[0].replace(".", "/") + ".py")
    has_code = args.trainer or args.project
    program = f"python {script if script.is_file() else 'YOUR_SCRIPT.py'}" if has_code else ""
    options = argparse.Namespace(config_file=args.output, num_gpus=num_gpus, coco=args.coco)
    data = "" if args.coco or args.command == "plan" else " (add its data with --coco)"
    return f"Written: {args.output}\n{next_step(f'train it{data}', 'train', options, program)}"


def _next_step(args: argparse.Namespace, plan: Plan) -> str:
    if plan.fits:
        return next_train(args, args.num_gpus) if args.output else next_plan(args)
    if plan.must_allow:
        return next_plan(args, allow=",".join(plan.must_allow))
    size = 1 if is_lazy(args.config_file) else 2
    pairs = [args.opts[i : i + size] for i in range(0, len(args.opts), size)]
    opts = [word for pair in pairs if not budget_keys(pair[:1]) for word in pair]
    return next_plan(args, card=None, budget=plan.smallest_budget_gb, opts=opts)


def check_plan_file(config_file: Optional[str], output: Optional[Path]) -> None:
    """Raise :class:`ConfigError` for a file of a plan that ``train`` would not take."""
    suffix = ".py" if config_file and is_lazy(config_file) else ".yaml"
    if output is not None and (output.suffix == ".py") != (suffix == ".py"):
        raise ConfigError(
            f"--output {output}: the plan of {config_file or 'a yaml config'} is a {suffix} file, "
            f"use {output.with_suffix(suffix)}"
        )


def _asked(args: argparse.Namespace) -> tuple[Config, Job, Optional[str]]:
    """The config, job and device of a command."""
    cfg = load_config(args)
    if args.probe and args.run:
        raise ConfigError("--probe and --run: a measurement is not corrected, give one of them")
    if args.probe:
        use_expandable_segments()  # as in training under a budget, and before CUDA is started
    card = find_card(args.card or "")
    return cfg, job_of(args, cfg), args.device or (card.device if card else None)
