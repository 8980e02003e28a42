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
from ..explain.text import answer_of_run, describe_run, describe_runs
from ..explain.verdict import Predictions, explain_run, plan_for
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
    predict, named = Predictions(help), [*enumerate(read_runs(args.log), 1)]
    each = [
        predict(f"run {i}", run)[1] if args.json else explain_run(f"run {i}", run, None)
        for i, run in named
    ]
    as_json = json.dumps(asdict(Explanation(tuple(each))), indent=2)
    if args.json and args.output is None and args.html is None:
        print_text(as_json)
        return
    # The last run that died, or else the last.
    number, run = max(named, key=lambda pair: (pair[1].oom is not None, pair[0]))
    prediction, told = predict(f"run {number}", run)
    is_on_card = run.oom.case != "host" if run.oom else run.ended not in ("diverged", "error")
    wants_plan = is_on_card or args.card is not None or args.output is not None
    plan = plan_for(run, prediction, args.card) if prediction and wants_plan else None
    writes = args.output is not None and plan is not None and plan.fits
    if prediction is not None and plan is not None and writes:
        with output_file(args.output, "w") as file:
            file.write(_planned_file(args, prediction.rebuilt.job, plan))
    answer = answer_of_run(run, told, prediction, plan)
    details = describe_run(run, told, prediction)
    next_step = after_explain(args, run, not told.not_rebuilt, plan)
    if each[1:]:
        answer += f"\nThis is {told.name} of {len(each)} in the log: --details lists them"
        details = f"{describe_runs(each)}\n\n{details}"
    if args.html is not None:
        keys = keys_as_yaml(prediction.rebuilt.job, plan) if prediction and plan else ""
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
