# Copyright (c) the d2_memfit developers.
"""The commands estimate and plan."""

import json
import sys
from argparse import Namespace
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
from .options import Config, budgets_in, is_lazy, job_of, load_config
from .screen import next_step, say, show, show_progress


def estimate(args: Namespace) -> None:
    _, job, device = _asked(args)
    if args.inference_only:
        inference = estimate_inference(job, device)
        give_answer(args, inference, str(inference))
        return
    dry_job = DryJob(job, device, not args.training_only, show_progress, args.run)
    if args.probe:
        dry_job.probe()
    estimate, budget_gb = dry_job.estimate(), job.budget_gb
    if budget_gb is not None and not args.probe:
        estimate = replace(estimate, objects_that_fit=dry_job.objects_that_fit(budget_gb))
    fits = budget_gb is not None and dry_job.fits(budget_gb)
    answer = text.answer_of_estimate(estimate, budget_gb, fits)
    details, step = text.describe_estimate(estimate), next_plan(args, budget_gb)
    give_answer(args, estimate, answer, details, step, "training", dry_job, limit_gb=budget_gb)


def plan(args: Namespace) -> None:
    check_plan_file(args.config_file, args.output)
    cfg, job, device = _asked(args)
    if job.budget_gb is None:
        raise ConfigError("a plan needs a budget: --budget 5.2, --budget auto, or --card 6GB")
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
    dry_job = DryJob(job.with_settings(plan.settings), device, evaluates=False, run=args.run)
    if args.output is not None and plan.fits:
        write_plan(args, cfg, plan)
        step = next_train(args, args.num_gpus)
    else:
        step = next_plan(args, plan.budget_gb, **_what_fits(args, plan))
    answer, details = text.answer_of_plan(plan), text.describe_plan(plan)
    give_answer(args, plan, answer, details, step, "with the plan", dry_job, plan, plan.fits)


def write_plan(args: Namespace, cfg: Config, plan: Plan) -> None:
    """Write ``--output``, which ``train`` takes: yaml, or a LazyConfig for one."""
    is_py, opts = args.output.suffix == ".py", getattr(args, "opts", [])
    planned = lazy_file(args.config_file, opts, plan) if is_py else planned_yaml(cfg, plan)
    with output_file(args.output, "w") as file:
        file.write(planned)


def give_answer(
    args: Namespace,
    result: Any,
    answer: str,
    details: str = "",
    next_step: str = "",
    name: str = "",
    dry_job: Optional[DryJob] = None,
    plan: Optional[Plan] = None,
    is_good: bool = True,
    limit_gb: Optional[float] = None,
) -> None:
    """Print the result of a command, as text or JSON, with its notes, and write its page.

    In a text the answer comes first, what to type last.

    Args:
        result: a dataclass, for ``--json``.
        name, dry_job: a dry run whose step the page draws, with the name of that step.
        plan: its keys, to copy, are in the page, and its budget as a line through the picture.
        is_good: whether the command has done what was asked for. If not, it ends with status 3.
        limit_gb: that line without a plan.
    """
    if args.notes:  # one for the answer, and all of them for the details
        answer += f"\n{text.first_of(args.notes, 200)}"
        details = "\n".join([*args.notes, "", details])
    if getattr(args, "html", None) is not None:
        keys = keys_as_yaml(dry_job.job, plan) if dry_job and plan else ""
        texts = {"Answer": answer, "Keys": keys, "Next": next_step, "Details": details}
        steps = {name: dry_job.device.events(dry_job.whole())} if dry_job else {}
        limit_gb = plan.budget_gb if plan else limit_gb
        write_page(args.html, f"d2-memfit {args.command}", texts, steps, limit_gb)
    if getattr(args, "json", False):
        for note in args.notes:
            say(note)
        shown = json.dumps(asdict(result), indent=2)
    else:
        options = ["--details", *(["--json", "--html FILE"] if hasattr(args, "html") else [])]
        more = f"\n\n{details}" if args.details else f"\nMore: {', '.join(options)}"
        shown = "\n\n".join(filter(None, [answer + more, next_step]))
    show(shown)
    if not is_good:
        sys.exit(3)


def _what_fits(args: Namespace, plan: Plan) -> dict[str, Any]:
    """Other options, with which there is a plan that fits."""
    if plan.fits:
        return {}
    if plan.must_allow:
        return {"allow": ",".join(plan.must_allow)}
    size = 1 if is_lazy(args.config_file) else 2
    pairs = [args.opts[i : i + size] for i in range(0, len(args.opts), size)]
    opts = [word for pair in pairs if not budgets_in(pair[:1]) for word in pair]
    return {"card": None, "budget": plan.smallest_budget_gb, "opts": opts}


def next_plan(args: Namespace, budget_gb: Optional[float], **values: Any) -> str:
    """The line that plans for the job of a command. Without a budget, for its card, or for 6 GB."""
    values["output"] = "plan.py" if is_lazy(args.config_file) else "plan.yaml"
    if budget_gb is None:
        device = str(getattr(args, "device", None))
        values["card"] = device if find_card(device) else "6GB"
    return next_step("plan, and write the plan to a file", "plan", args, **values)


def next_train(args: Namespace, num_gpus: int) -> str:
    """The lines after a plan was written."""
    program = "python YOUR_SCRIPT.py" if args.trainer or args.project else ""
    options = Namespace(config_file=args.output, num_gpus=num_gpus, coco=args.coco)
    return f"Written: {args.output}\n{next_step('train it', 'train', options, program)}"


def check_plan_file(config_file: str, output: Optional[Path]) -> None:
    """Raise :class:`ConfigError` for a file of a plan that ``train`` would not take."""
    suffix = ".py" if is_lazy(config_file) else ".yaml"
    if output is not None and (output.suffix == ".py") != (suffix == ".py"):
        kind = f"the plan of this config is a {suffix} file"
        raise ConfigError(f"--output {output}: {kind}, use {output.with_suffix(suffix)}")


def _asked(args: Namespace) -> tuple[Config, Job, Optional[str]]:
    """The config, job and device of a command."""
    cfg = load_config(args)
    if args.probe:
        use_expandable_segments()  # as in training under a budget, and before CUDA is started
    card = find_card(args.card or "")
    return cfg, job_of(args, cfg), args.device or (card.device if card else None)
