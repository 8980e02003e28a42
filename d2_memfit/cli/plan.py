# Copyright (c) the d2_memfit developers.
"""The commands estimate and plan."""

import argparse
import json
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Optional

from ..common.files import output_file
from ..config.cards import find_card
from ..errors import ConfigError
from ..job import Job
from ..memory import use_expandable_segments
from ..planner.estimate import DryJob
from ..planner.plan import plan_memory
from ..planner.plan_file import keys_as_yaml, lazy_file, planned_yaml
from ..planner.text import (
    answer_of_estimate,
    answer_of_plan,
    describe_estimate,
    describe_plan,
    first_of,
)
from ..predict.estimate import estimate_inference
from ..report import write_page
from .next_step import after_a_look, after_no_plan, after_plan
from .options import Config, is_lazy, job_of, load_config
from .screen import print_text, put_together, say, show, show_progress

__all__ = ["check_plan_file", "estimate", "plan", "with_notes"]

DOES_NOT_FIT = 3  # exit status


def estimate(args: argparse.Namespace) -> None:
    _, job, device = _asked(args)
    if args.inference_only:
        inference = estimate_inference(job, device)
        _print(args, inference, str(inference), "", "")
        return
    progress = show_progress if sys.stderr.isatty() else str  # its output has nothing else
    dry_job = DryJob(job, device, not args.training_only, progress, args.run)
    if args.probe:
        dry_job.probe()
    estimate, budget_gb = dry_job.estimate(), job.budget_gb
    if budget_gb is not None and not args.probe:
        estimate = replace(estimate, objects_that_fit=dry_job.objects_that_fit(budget_gb))
    fits = budget_gb is not None and dry_job.fits(budget_gb)
    answer = answer_of_estimate(estimate, budget_gb, fits)
    details, next_step = describe_estimate(estimate), after_a_look(args)
    if args.html is not None:
        texts = {"Answer": with_notes(args, answer, details)[0], "Next": next_step}
        steps = {"training": dry_job.device.events(dry_job.whole())}
        write_page(args.html, "What a job needs", {**texts, "Details": details}, steps, budget_gb)
    _print(args, estimate, answer, details, next_step)


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
    answer, details = answer_of_plan(plan), describe_plan(plan)
    next_step = after_plan(args) if plan.fits else after_no_plan(args, plan)
    # Files first: who reads what is printed may end early.
    if args.html is not None:
        texts = {"Answer": with_notes(args, answer, details)[0], "Keys": keys_as_yaml(job, plan)}
        texts |= {"Next": next_step, "Details": details}
        steps = {}
        for name, of_step in (
            ("without the plan", job),
            ("with the plan", job.with_settings(plan.settings)),
        ):
            dry_job = DryJob(of_step, device, evaluates=False, run=args.run)
            steps[name] = dry_job.device.events(dry_job.whole())
        write_page(args.html, f"A plan for {plan.budget_gb:.4g} GB", texts, steps, plan.budget_gb)
    if args.output is not None and plan.fits:
        as_python = args.output.suffix == ".py"
        text = (
            lazy_file(args.config_file, args.opts, plan) if as_python else planned_yaml(cfg, plan)
        )
        with output_file(args.output, "w") as file:
            file.write(text)
    _print(args, plan, answer, details, next_step)
    if not plan.fits:
        sys.exit(DOES_NOT_FIT)


def check_plan_file(config_file: Optional[str], output: Optional[Path]) -> None:
    """Raise :class:`ConfigError` for a file of a plan that ``train`` would not take."""
    suffix = ".py" if config_file and is_lazy(config_file) else ".yaml"
    if output is not None and (output.suffix == ".py") != (suffix == ".py"):
        raise ConfigError(
            f"--output {output}: the plan of {config_file or 'a yaml config'} is a {suffix} file, "
            f"use {output.with_suffix(suffix)}"
        )


def with_notes(args: argparse.Namespace, answer: str, details: str) -> tuple[str, str]:
    """Add the lines about the config: one for the answer, and all of them for the details."""
    if not args.notes:
        return answer, details
    lines = [*args.notes, "", details]
    return "\n".join([answer, first_of(args.notes, 200)]), "\n".join(lines)


def _asked(args: argparse.Namespace) -> tuple[Config, Job, Optional[str]]:
    """The config, job and device of a command."""
    cfg = load_config(args)
    if args.probe and args.run:
        raise ConfigError("--probe and --run: a measurement is not corrected, give one of them")
    if args.probe:
        use_expandable_segments()  # as in training under a budget, and before CUDA is started
    card = find_card(args.card or "")
    return cfg, job_of(args, cfg), args.device or (card.device if card else None)


def _print(
    args: argparse.Namespace, result: Any, answer: str, details: str, next_step: str
) -> None:
    if args.json:
        for note in args.notes:
            say(note)
        print_text(json.dumps(asdict(result), indent=2))
    else:
        show(put_together(args, *with_notes(args, answer, details), next_step))
