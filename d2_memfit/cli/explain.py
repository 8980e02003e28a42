# Copyright (c) the d2_memfit developers.
"""The command explain."""

import argparse
import json
import sys
from dataclasses import asdict
from functools import partial

from ..common.checks import check_positive_int
from ..common.files import output_file
from ..config.cards import settings_of_card
from ..config.files import find_config_file
from ..explain import Explanation, Help
from ..explain.sources import read_runs
from ..explain.text import answer_of_run, details_of
from ..explain.verdict import explain_run, plan_for, predict_run
from ..job import Job, load_lazy_config
from ..planner.plan import Plan
from ..planner.plan_file import keys_as_yaml, lazy_file, planned_yaml
from ..report import write_page
from .next_step import after_explain
from .options import check_lazy_options, image_size_of, project_functions, trainer_of
from .plan import DOES_NOT_FIT, check_plan_file
from .screen import print_text, put_together, show

__all__ = ["explain"]


def explain(args: argparse.Namespace) -> None:
    help = Help(
        project_functions(args),
        trainer_of(args),
        args.coco,
        image_size_of(args.image_size),
        args.instances,
        partial(_lazy_job, args) if args.config_file else None,
    )
    check_plan_file(args.config_file, args.output)
    if args.config_file is not None:
        check_lazy_options(args)
    if args.card is not None:
        settings_of_card(args.card)  # raises at once if there is none
    if args.instances is not None:
        check_positive_int("--instances", args.instances)
    runs = read_runs(args.log)
    # The last run that died, or else the last.
    number = max(range(len(runs)), key=lambda i: (runs[i].oom is not None, i))
    predictions = [
        predict_run(run, help) if args.json or i == number else (None, "")
        for i, run in enumerate(runs)
    ]
    each = [
        explain_run(f"run {i}", run, *of_run)
        for i, (run, of_run) in enumerate(zip(runs, predictions), 1)
    ]
    as_json = json.dumps(asdict(Explanation(tuple(each))), indent=2)
    if args.json and args.output is None and args.html is None:
        print_text(as_json)
        return
    run, (prediction, _), told = runs[number], predictions[number], each[number]
    is_on_card = run.oom.case != "host" if run.oom else run.ended not in ("diverged", "error")
    wants_plan = is_on_card or args.card is not None or args.output is not None
    plan = plan_for(run, prediction, args.card) if prediction and wants_plan else None
    writes = args.output is not None and plan is not None and plan.fits
    if prediction is not None and plan is not None and writes:
        with output_file(args.output, "w") as file:
            file.write(_planned_file(args, prediction.dry_job.job, plan))
    answer = answer_of_run(run, told, plan)
    details = details_of(each, told)
    next_step = after_explain(args, run, not told.not_rebuilt, plan)
    if each[1:]:
        answer += f"\nThis is {told.name} of {len(each)} in the log: --details lists them"
    if args.html is not None:
        keys = keys_as_yaml(prediction.dry_job.job, plan) if prediction and plan else ""
        dry = prediction.dry_job if prediction else None
        steps = {"as it ran": dry.device.events(dry.whole())} if dry else {}
        texts = {"Answer": answer, "Keys": keys, "Next": next_step, "Details": details}
        limit_gb = None if plan is None else plan.budget_gb
        write_page(args.html, f"A log explained: {told.name}", texts, steps, limit_gb)
    if args.json:
        print_text(as_json)
    else:
        show(put_together(args, answer, details, next_step))
    if args.output is not None and not writes:
        sys.exit(DOES_NOT_FIT)


def _planned_file(args: argparse.Namespace, job: Job, plan: Plan) -> str:
    as_python = args.config_file is not None
    return lazy_file(args.config_file, [], plan) if as_python else planned_yaml(job.cfg, plan)


def _lazy_job(args: argparse.Namespace, ranks: int) -> Job:
    sizes = {"image_size": image_size_of(args.image_size), "num_instances": args.instances}
    cfg = load_lazy_config(find_config_file(args.config_file, ".py"), [])
    return Job.from_lazy(cfg, ranks, **sizes)
