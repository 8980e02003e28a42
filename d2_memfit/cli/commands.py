# Copyright (c) the d2_memfit developers.
"""The command d2-memfit.

It trains within the available memory. It also tells, without a GPU, what a job needs and how it
fits.
"""

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any, Optional
from unittest.mock import patch

from ..common.checks import check_positive_int
from ..common.files import check_outputs, output_file
from ..config.cards import find_card, settings_of_card
from ..config.files import find_config_file
from ..doctor.examination import answer_of_findings, examine
from ..engine.ending import signals_end_at_once
from ..engine.launch import world_size
from ..errors import ConfigError, exit_on_error
from ..explain import Explanation, Help
from ..explain.sources import read_runs
from ..explain.text import answer_of_run, describe_run, describe_runs
from ..explain.verdict import Predictions, explain_run, plan_for
from ..job import Job, find_function, load_lazy_config
from ..memory import use_expandable_segments
from ..planner.estimate import DryJob, dry_job_of
from ..planner.plan import Plan, plan_memory
from ..planner.plan_file import keys_as_yaml, lazy_file, planned_yaml
from ..planner.text import (
    answer_of_estimate,
    answer_of_plan,
    describe_estimate,
    describe_plan,
    first_of,
)
from ..report import write_page
from . import train
from .answers import print_text, put_together
from .command_line import command_parser, files_read
from .job_options import (
    Config,
    check_lazy_options,
    image_size_of,
    job_of,
    load_any_config,
)
from .next_step import (
    after_a_look,
    after_explain,
    after_no_plan,
    after_plan,
)
from .options import opts_of_budget
from .screen import end_progress, say, show, show_progress

__all__ = ["main"]

_DOES_NOT_FIT = 3  # exit status
_UNWELL = 3


def _explain(args: argparse.Namespace) -> None:

    help = Help(
        [find_function(name) for name in args.project],
        find_function(args.trainer, "--trainer") if args.trainer else None,
        args.coco,
        image_size_of(args.image_size),
        args.instances,
        partial(_lazy_job, args) if args.config_file else None,
    )
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
    next_step = after_explain(args, told, plan)
    if each[1:]:
        answer += f"\nThis is {told.name} of {len(each)} in the log: --details lists them"
        details = f"{describe_runs(each)}\n\n{details}"
    if args.html is not None:
        keys = keys_as_yaml(prediction.rebuilt.job, plan) if prediction and plan else ""
        steps = {"as it ran": prediction.dry_job} if prediction else {}
        texts = {"Answer": answer, "Keys": keys, "Next": next_step, "Details": details}
        limit_gb = None if plan is None else plan.budget_gb
        _write_page(args, f"A log explained: {told.name}", texts, steps, limit_gb)
    if args.json:
        print_text(as_json)
    else:
        show(put_together(args, answer, details, next_step))
    if args.output is not None and not writes:
        sys.exit(_DOES_NOT_FIT)


def _write_page(
    args: argparse.Namespace,
    title: str,
    texts: dict[str, str],
    steps: dict[str, DryJob],
    limit_gb: Optional[float],
) -> None:
    events = {name: dry_job.device.events(dry_job.training) for name, dry_job in steps.items()}
    write_page(args.html, title, texts, events, limit_gb)


def _planned_file(args: argparse.Namespace, job: Job, plan: Plan) -> str:
    if args.config_file is None:
        return planned_yaml(job.cfg, plan)
    cfg = load_lazy_config(find_config_file(args.config_file, ".py"), [])
    is_python = args.output.suffix == ".py"
    return lazy_file(args.config_file, [], plan) if is_python else planned_yaml(cfg, plan)


def _lazy_job(args: argparse.Namespace, ranks: int) -> Job:
    return Job.from_lazy(
        load_lazy_config(find_config_file(args.config_file, ".py"), []),
        ranks,
        image_size=image_size_of(args.image_size),
        num_instances=args.instances,
    )


def _examine(args: argparse.Namespace) -> None:

    job, trainer = _job_and_trainer(args)
    remake = partial(_job_and_trainer, args) if job.ranks > 1 else None
    findings = []
    for finding in examine(job, trainer, remake, lambda what: show_progress(f"Checking: {what}")):
        findings.append(finding)
    is_well = all(finding.is_well is not False for finding in findings)
    details = "\n".join(map(str, findings))
    next_step = after_a_look(args) if is_well else ""
    answer, details = _with_notes(args, answer_of_findings(findings), details)
    show(put_together(args, answer, details, next_step))
    if not is_well:
        sys.exit(_UNWELL)


def _with_notes(args: argparse.Namespace, answer: str, details: str) -> tuple[str, str]:
    """Add the lines about the config: one for the answer, and all of them for the details."""
    if args.json:
        for note in args.notes:
            say(note)
    if not args.notes:
        return answer, details
    lines = [*args.notes, "", details]
    return "\n".join([answer, first_of(args.notes, 200)]), "\n".join(lines)


def _job_and_trainer(args: argparse.Namespace) -> tuple[Job, Any]:
    cfg = load_any_config(args, opts_of_budget(args.card, None, args.opts), say)
    trainer = find_function(args.trainer, "--trainer") if args.trainer else None
    return job_of(args, cfg), trainer


def _estimate(args: argparse.Namespace) -> None:
    _, job, device = _asked(args)
    if args.inference_only:
        from ..predict.estimate import estimate_inference

        inference = estimate_inference(job, device)
        text, _ = _with_notes(args, str(inference), "")
        if args.json:
            text = json.dumps(asdict(inference), indent=2)
        show(text)
        return
    evaluates, budget_gb = not args.training_only, job.budget_gb
    progress = show_progress if sys.stderr.isatty() else str  # its output has nothing else
    dry_job = dry_job_of(job, device, evaluates, args.probe, args.run, progress)
    fits = budget_gb is not None and dry_job.fits(budget_gb)
    estimate = dry_job.estimate()
    if budget_gb is not None and not args.probe:
        estimate = replace(estimate, objects_that_fit=dry_job.objects_that_fit(budget_gb))
    answer = answer_of_estimate(estimate, budget_gb, fits)
    text, details = _with_notes(args, answer, describe_estimate(estimate))
    next_step = after_a_look(args)
    if args.html is not None:
        texts = {"Answer": text, "Next": next_step, "Details": details}
        _write_page(args, "What a job needs", texts, {"training": dry_job}, job.budget_gb)
    _print(args, estimate, text, details, next_step)


def _plan(args: argparse.Namespace) -> None:
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
    text, details = _with_notes(args, answer_of_plan(plan), describe_plan(plan))
    next_step = after_plan(args) if plan.fits else after_no_plan(args, plan)
    # Files first: who reads what is printed may end early.
    if args.html is not None:
        before, after = (
            dry_job_of(j, device, evaluates=False, run=args.run)
            for j in (job, job.with_settings(plan.settings))
        )
        keys = keys_as_yaml(job, plan)
        texts = {"Answer": text, "Keys": keys, "Next": next_step, "Details": details}
        steps = {"without the plan": before, "with the plan": after}
        _write_page(args, f"A plan for {plan.budget_gb:.4g} GB", texts, steps, plan.budget_gb)
    if args.output is not None and plan.fits:
        is_lazy_file = args.config_file.endswith(".py") and args.output.suffix == ".py"
        file_text = lazy_file(args.config_file, args.opts, plan) if is_lazy_file else None
        with output_file(args.output, "w") as file:
            file.write(file_text or planned_yaml(cfg, plan))
    _print(args, plan, text, details, next_step)
    if not plan.fits:
        sys.exit(_DOES_NOT_FIT)


def _asked(args: argparse.Namespace) -> tuple[Config, Job, Optional[str]]:
    """The config, job and device of the commands estimate and plan."""
    cfg = load_any_config(args, _opts_of_budget(args), say)
    if args.probe:
        use_expandable_segments()  # as in training under a budget, and before CUDA is started
    return cfg, job_of(args, cfg), args.device or _device_of_card(args.card)


def _measure(args: argparse.Namespace) -> None:
    from ..measure import measure_gpu

    for text in measure_gpu(args.device, args.seconds, args.output, args.items, args.small):
        show(text)


def _device_of_card(card: Optional[str]) -> Optional[str]:
    """The device with a card's name; None if there is no card, or if it is a size."""
    found = find_card(card or "")
    return found.device if found else None


def _opts_of_budget(args: argparse.Namespace) -> list[str]:
    budget = getattr(args, "budget", None)
    is_on_cpu = getattr(args, "device", None) == "cpu"
    here = ["MODEL.DEVICE", "cpu"] if budget == "auto" and is_on_cpu else []
    return [*opts_of_budget(args.card, budget, args.opts), *here]


def _print(
    args: argparse.Namespace, result: Any, answer: str, details: str, next_step: str
) -> None:
    if args.json:
        end_progress()
        print_text(json.dumps(asdict(result), indent=2))
    else:
        show(put_together(args, answer, details, next_step))


def _predict(args: argparse.Namespace) -> None:
    from .trained_model import predict_files

    predict_files(args, _opts_of_budget(args))


def _train(args: argparse.Namespace) -> None:

    train.run(args)


_RUN: dict[str, Callable[[argparse.Namespace], None]] = {
    "doctor": _examine,
    "explain": _explain,
    "estimate": _estimate,
    "measure-gpu": _measure,
    "plan": _plan,
    "predict": _predict,
    "train": _train,
}


@exit_on_error
@signals_end_at_once()
def main(argv: Optional[Sequence[str]] = None) -> None:
    """Run a command.

    Args:
        argv: its arguments; None for those of the process.
    """
    argv = sys.argv[1:] if argv is None else argv
    training = None
    if [*argv[:1]] == ["train"]:
        from .train import argument_parser

        training = argument_parser()
    args = command_parser(training).parse_args(argv)
    if args.command != "train" and world_size(1) > 1:
        raise ConfigError(f"{args.command} runs in one process: start it without torchrun")
    if args.command in ("estimate", "explain", "plan"):
        named = (getattr(args, option, None) for option in ("output", "html"))
        outputs = [path for path in named if path is not None]
        check_outputs(outputs, files_read(args), args.overwrite)
    try:
        with patch.object(sys, "path", [os.getcwd(), *sys.path]):  # as for ``python -m``
            _RUN[args.command](args)
    finally:
        end_progress()
