# Copyright (c) the d2_memfit developers.
"""An explained run as text: the verdict first."""

from collections.abc import Iterator, Sequence
from typing import Optional

from ..planner.plan import Plan
from ..planner.text import first_of, lines_of_plan
from .records import ERROR_ALONE, LoggedRun, Oom
from .verdict import ExplainedRun, is_shared

_CASES = {"evaluation": "in evaluation", "host": "of the host's RAM, not of the card's memory"}
_TO_TRY = {
    "host": "DATALOADER.NUM_WORKERS 0, MEMFIT.HOST.BUDGET_GB, MEMFIT.HOST.SHARED_DATASET True",
    "evaluation": "MEMFIT.EVALUATION.ON_HOST True, MEMFIT.OOM.POLICY split",
    "training": "MEMFIT.MICRO_BATCH 1 (the same gradients), MEMFIT.CHECKPOINT.MODULES \"['all']\" "
    "(the same), SOLVER.AMP.ENABLED True (another number format), MEMFIT.OOM.POLICY split",
    "diverged": "a lower SOLVER.BASE_LR, a longer SOLVER.WARMUP_ITERS, "
    "SOLVER.CLIP_GRADIENTS.ENABLED True",
}


def answer_of_run(run: LoggedRun, result: ExplainedRun, plan: Optional[Plan]) -> str:
    """The answer to the command explain: why the run ended, and what would have fitted."""
    lines = [_verdict(run, result), *(_about_memory(result.oom) if result.oom else [])]
    lines += _plan(plan) if plan else []
    case = result.oom.case if result.oom else result.ended
    if case in _TO_TRY or (result.oom and not (plan and plan.fits)):
        lines.append(f"To try first: {_TO_TRY.get(case, _TO_TRY['training'])}")
    if result.range_mib is not None:
        measured = "" if result.measured_mib is None else f"; measured {_gb(result.measured_mib)}"
        largest = f"{_gb(result.predicted_mib)} allocated for the largest images"
        lines.append(f"Predicted: {largest}, range {_gbs(result.range_mib)}{measured}")
        lines += [f"Assumed: {first_of(result.assumed)}"] if result.assumed else []
    elif result.not_rebuilt:
        lines.append(f"Not predicted: {result.not_rebuilt}")
    return "\n".join(lines)


def details_of(each: Sequence[ExplainedRun], result: ExplainedRun) -> str:
    """A line for each run of a log, and what is assumed of the one that is explained."""
    lines = []
    for one in each:
        images = f", {one.images_per_gpu} images per GPU" if one.images_per_gpu else ""
        peak = f", peak {_gb(one.measured_mib)}" if one.measured_mib is not None else ""
        seconds = f", {one.seconds:.2f} s per iteration" if one.seconds is not None else ""
        lines.append(f"{one.name}: {one.ended}{_when(one)}{images}{peak}{seconds}")
    return "\n".join([*lines, *(f"Assumed: {line}" for line in result.assumed)])


def _when(result: ExplainedRun) -> str:
    if result.oom is None or ERROR_ALONE in result.assumed:
        return ""
    return f" {_CASES.get(result.oom.case, result.oom.case)}"


def _verdict(run: LoggedRun, result: ExplainedRun) -> str:
    card, oom = result.card or "a card that the log does not name", result.oom
    if oom is not None:
        of = f" ({_gb(oom.total_mib)})" if oom.total_mib else ""
        what = "" if oom.case == "host" else f": {_fits(result, oom)}"
        return f"It ran out of memory{_when(result)}, on {card}{of}{what}."
    if result.ended == "diverged":
        at = "" if run.iteration is None else f" by iteration {run.iteration:,}"
        return f"It diverged{at}: the loss is not finite, not for lack of memory. {run.error:.200}"
    if result.ended == "error":
        return f"It ended in an error, not for lack of memory: {run.error:.300}"
    peak = "no max_mem" if result.measured_mib is None else f"{_gb(result.measured_mib)} at most"
    return f"It did not run out of memory ({result.ended}): {peak}, on {card}."


def _fits(result: ExplainedRun, oom: Oom) -> str:
    if oom.fits is not None:
        return f"as it is, the job {'fits' if oom.fits else 'does not fit'} this card"
    if result.range_mib is None or oom.total_mib is None:
        return "whether the job fits this card when nobody else uses it, the log does not tell"
    return f"perhaps the job fits it when nobody else uses it, with {_gbs(result.range_mib)}"


def _about_memory(oom: Oom) -> Iterator[str]:
    """Who else held the card, and what lay in pieces."""
    of = f"{_gb(oom.held_by_others_mib)} of its {_gb(oom.total_mib)}"
    if is_shared(oom.held_by_others_mib):
        perhaps = f"Perhaps the card was shared: {of} were not PyTorch's. A context takes up to "
        is_certain = oom.process_mib is not None
        yield f"The card was shared: others held {of}." if is_certain else f"{perhaps}0.8 GB."
    pieces = (oom.reserved_mib or 0.0) - (oom.allocated_mib or 0.0)
    if oom.tried_mib is not None and pieces > oom.tried_mib:
        helps = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, which a plan turns on, helps"
        yield f"{_gb(pieces)} were reserved and not allocated, in pieces too small: {helps}"


def _plan(plan: Plan) -> list[str]:
    (_, _, first), *more = (line.partition(": ") for line in lines_of_plan(plan))
    does = "It fits" if plan.fits else "Nothing makes it fit"
    return [f"{does} {plan.budget_gb:g} GB: {first}", *map("".join, more)]


def _gb(mib: Optional[float]) -> str:
    return "" if mib is None else f"{mib / 1024:.2f} GB"


def _gbs(range_mib: tuple[float, float]) -> str:
    return " to ".join(map(_gb, range_mib))
