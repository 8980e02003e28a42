# Copyright (c) the d2_memfit developers.
"""The command explain."""

from argparse import Namespace
from functools import partial
from typing import Optional

from ..config.cards import settings_of_card
from ..config.files import find_config_file
from ..explain import Explanation, Help
from ..explain.sources import read_runs
from ..explain.text import answer_of_run, details_of
from ..explain.verdict import explain_run, plan_for, predict_run
from ..job import Job, load_lazy_config
from ..planner.plan import Plan
from .options import check_lazy_options, is_lazy, project_functions, trainer_of
from .plan import check_plan_file, give_answer, next_train, write_plan
from .screen import next_step


def explain(args: Namespace) -> None:
    lazy = partial(_lazy_job, args) if args.config_file else None
    known = args.coco, args.image_size, args.instances, lazy, args.config_file
    help = Help(project_functions(args), trainer_of(args), *known)
    check_plan_file(args.config_file, args.output)
    if args.card is not None:
        settings_of_card(args.card)  # raises at once if there is none
    runs = read_runs(args.log)
    if args.config_file and any(run.is_lazy for run in runs):
        check_lazy_options(args)
    elif args.config_file:
        find_config_file(args.config_file)  # raises at once if there is none
    # The last run that died, or else the last.
    number = max(range(len(runs)), key=lambda i: (runs[i].oom is not None, i))
    predictions = [
        predict_run(run, help) if args.json or i == number else (None, "")
        for i, run in enumerate(runs)
    ]
    each = [explain_run(f"run {i + 1}", run, *predictions[i]) for i, run in enumerate(runs)]
    run, (prediction, _), result = runs[number], predictions[number], each[number]
    is_on_card = run.oom.case != "host" if run.oom else run.ended not in ("diverged", "error")
    wants_plan = args.card or args.output or (is_on_card and not args.json)
    plan = plan_for(run, prediction, args.card) if prediction and wants_plan else None
    dry, writes = prediction.dry_job if prediction else None, args.output and plan and plan.fits
    if dry and plan and writes:
        write_plan(args, dry.job.cfg, plan)
    answer = answer_of_run(run, result, plan)
    if each[1:]:
        answer += f"\nThis is {result.name} of {len(each)} in the log: --details lists them"
    explanation, details = Explanation(tuple(each)), details_of(each, result)
    step = _next_step(args, plan) if (plan.fits if plan else dry and is_on_card) else ""
    is_good = bool(writes or not args.output)
    give_answer(args, explanation, answer, details, step, "as it ran", dry, plan, is_good)


def _next_step(args: Namespace, plan: Optional[Plan]) -> str:
    if plan and args.output:
        return next_train(args, plan.estimate.num_gpus)
    card = args.card if plan else "8GB"
    file = "plan.py" if is_lazy(args.config_file) else "plan.yaml"
    return next_step("write a plan to a file", "explain", args, card=card, output=file)


def _lazy_job(args: Namespace, ranks: int) -> Job:
    cfg = load_lazy_config(find_config_file(args.config_file, ".py"), [])
    return Job.from_lazy(cfg, ranks, image_size=args.image_size, num_instances=args.instances)
