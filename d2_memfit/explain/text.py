# Copyright (c) the d2_memfit developers.
"""An explained run as text: the answer first."""

from collections.abc import Iterator, Sequence
from typing import Optional

from ..planner.search import Plan
from ..planner.writing import (
    describe_chance,
    describe_settings,
    describe_sources,
    first_of,
    what_would_tell,
)
from .explanation import ExplainedRun, Oom, Prediction, is_shared
from .printed_model import parameters_in
from .records import ERROR_ALONE, LoggedRun, Progress

__all__ = ["answer_of_run", "describe_run", "describe_runs", "rises_of", "table_of_run"]

_CASES = {
    "at once": " at once",
    "after some iterations": " after some iterations",
    "evaluation": " in evaluation",
    "host": " of the host's RAM, not of the card's memory",
}
_FIRST_KEYS = (
    "Keys to try first: MEMFIT.MICRO_BATCH 1 (the same gradients), MEMFIT.CHECKPOINT.MODULES "
    "\"['all']\" (the same), SOLVER.AMP.ENABLED True (another number format), "
    "MEMFIT.OOM.POLICY split (a batch that does not fit runs again in pieces)"
)


def answer_of_run(
    told: ExplainedRun, prediction: Optional[Prediction], plan: Optional[Plan]
) -> str:
    """The answer to the command explain: what happened, and what would have fitted."""
    lines = [*_answer(told), *_plan(plan, prediction)]
    if prediction is None:
        lines += [f"Not predicted: {told.not_rebuilt}", _FIRST_KEYS]
    else:
        lines.append(_predicted(told, prediction))
        lines += [f"Assumed: {first_of(told.assumed)}"] if told.assumed else []
    return "\n".join(lines)


def describe_run(run: LoggedRun, told: ExplainedRun, prediction: Optional[Prediction]) -> str:
    """All that is known of a run besides the answer."""
    lines = [*_what_ran(run, told, prediction), *_message(run, told)]
    lines += _about(told, prediction) if prediction else _log_alone(run)
    return "\n".join(lines)


def describe_runs(told: Sequence[ExplainedRun]) -> str:
    """One line for each run of a log."""
    return "\n".join(f"{one.name}: {_sentence(one)}" for one in told)


def table_of_run(told: ExplainedRun) -> list[list[str]]:
    """What was measured, beside what is predicted. The first row has the names."""
    peak = (
        "not predicted" if told.range_mib is None else "{} to {}".format(*map(_gb, told.range_mib))
    )
    measured = _gb(told.measured_mib) or "not in the log"
    if told.oom is not None and told.measured_mib is not None:
        measured += ", before the error"
    rows = [["", "measured", "predicted"], ["peak of allocated memory", measured, peak]]
    if told.seconds is not None:
        of_time = "not predicted"
        if told.predicted_s is not None:
            of_time = "{:.2f} to {:.2f} s, for the largest images".format(*told.predicted_s)
        rows.append(["time of an iteration", f"{told.seconds:.2f} s", of_time])
    return rows


def _sentence(told: ExplainedRun) -> str:
    peak = f", peak {_gb(told.measured_mib)}" if told.measured_mib is not None else ""
    images = f", {told.images_per_gpu} images per GPU" if told.images_per_gpu else ""
    how = told.ended
    if told.oom is not None:
        how = f"out of memory{_when(told, told.oom)}"
    return f"{how}{images}{peak}"


def _when(told: ExplainedRun, oom: Oom) -> str:
    return "" if ERROR_ALONE in told.assumed else _CASES[oom.case]


def _answer(told: ExplainedRun) -> Iterator[str]:
    """What happened and why, in one or two sentences."""
    card = told.card or "a card that the log does not name"
    if told.oom is None:
        measured = (
            "no max_mem" if told.measured_mib is None else f"{_gb(told.measured_mib)} at most"
        )
        yield f"It did not run out of memory ({told.ended}): {measured}, on {card}."
        return
    oom, total = told.oom, told.oom.total_mib
    if is_shared(oom.held_by_others_mib):
        yield f"The card was shared: others held {_gb(oom.held_by_others_mib)} of its {_gb(total)}."
    of = f" ({_gb(total)})" if total else ""
    yield f"It ran out of memory{_when(told, oom)}, on {card}{of}."
    if oom.case == "host":
        return
    if oom.fits is None:
        yield "The log does not tell whether the job fits this card when nobody else uses it."
    else:
        does = "fits" if oom.fits else "does not fit"
        yield f"As it is, the job {does} this card when nobody else uses it."


def _plan(plan: Optional[Plan], prediction: Optional[Prediction]) -> Iterator[str]:
    if plan is None:
        if prediction is not None:
            yield "To see what would fit a card: --card 8GB, or its name."
        return
    if not plan.fits:
        yield (
            f"Nothing makes it fit {plan.budget_gb:g} GB; "
            f"{plan.smallest_budget_gb:.2f} GB would do."
        )
    elif not plan.steps:
        yield f"It fits {plan.budget_gb:g} GB without a change."
    else:
        names = {key: value for step in plan.steps for key, value in step.settings.items()}
        low, high = plan.time_range
        yield f"It fits {plan.budget_gb:g} GB with {describe_settings(names)}"
        yield (
            f"({plan.estimate.device_total_gb:.1f} GB, time x {low:.2f} to {high:.2f}, the same "
            "effective batch)."
        )
        if plan.estimate.times:
            yield f"Times: {plan.estimate.times}."
    yield describe_chance(plan)


def _what_ran(
    run: LoggedRun, told: ExplainedRun, prediction: Optional[Prediction]
) -> Iterator[str]:
    software = ", ".join(f"{name} {version}" for name, version in run.software.items())
    yield f"Ran: {_sentence(told)}; ranks: {run.ranks or 1}; {software or 'software not said'}"
    if run.error and run.ended == "error":
        yield f"The error: {run.error:.300}"
    if prediction is not None:
        e = prediction.estimate
        yield f"Largest images: {e.image_size[0]} x {e.image_size[1]} pixels"
    if run.images is not None:
        objects = f", {run.objects} objects" if run.objects is not None else ""
        yield f"Data: {run.images} images{objects}"
    rises = rises_of(run.progress)
    if rises:
        rises = rises if len(rises) <= 4 else [*rises[:2], *rises[-2:]]
        yield "Memory: " + ", ".join(f"{_gb(mib)} at iteration {i:,}" for i, mib in rises)
    if told.seconds is not None:
        said = f"{told.seconds:.2f} s"
        if told.predicted_s is not None:
            said += " (predicted {:.2f} to {:.2f} for the largest images)".format(*told.predicted_s)
        yield f"Seconds of an iteration: {said}"


def rises_of(progress: Sequence[Progress]) -> list[tuple[int, float]]:
    """The iterations at which the peak rose by 0.5% or more, and the peak in MiB."""
    rises: list[tuple[int, float]] = []
    for p in progress:
        if p.peak_mib is not None and (not rises or p.peak_mib > 1.005 * rises[-1][1]):
            rises.append((p.iteration, p.peak_mib))
    return rises


def _message(run: LoggedRun, told: ExplainedRun) -> Iterator[str]:
    text = run.oom
    if text is None or text.tried is None:
        return
    parts = [f"{_gb(text.tried)} asked"]
    for words, mib in (
        ("free", text.free),
        ("allocated", text.allocated),
        ("held by others", told.oom.held_by_others_mib if told.oom else None),
    ):
        parts += [] if mib is None else [f"{_gb(mib)} {words}"]
    yield f"The message: {', '.join(parts)}"
    if text.held is not None and text.allocated is not None:
        in_pieces = text.held - text.allocated
        if in_pieces > text.tried:
            yield (
                f"{_gb(in_pieces)} were reserved and not allocated, in pieces too small: "
                "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, which a plan turns on, helps"
            )


def _predicted(told: ExplainedRun, prediction: Prediction) -> str:
    low, high = told.range_mib or prediction.range_mib
    against = ""
    if told.measured_mib is not None:
        places = {True: "inside", False: "outside", None: "what it had before the error"}
        against = f"; measured {_gb(told.measured_mib)}, {places[told.inside]}"
    return (
        f"Predicted: {_gb(told.predicted_mib)} allocated for the largest images, "
        f"range {_gb(low)} to {_gb(high)}{against}"
    )


def _about(told: ExplainedRun, prediction: Prediction) -> Iterator[str]:
    """What a prediction comes from."""
    if sources := describe_sources(prediction.estimate):
        yield f"By source: {sources}"
    if prediction.rebuilt.left_out:
        yield f"Keys that this Detectron2 does not have: {', '.join(prediction.rebuilt.left_out)}"
    yield from (f"Assumed: {line}" for line in told.assumed)
    yield from what_would_tell(prediction.estimate)


def _log_alone(run: LoggedRun) -> Iterator[str]:
    """What a log shows without the code of its model."""
    yield "What is missing can be named: --project, --trainer, --coco"
    if num := parameters_in(run.model_text):
        yield (
            f"The printed model has at least {num / 1e6:.1f} million parameters: "
            f"{_gb(num * 4 / 2**20)}, as much again for gradients and each state of the optimizer"
        )


def _gb(mib: Optional[float]) -> str:
    return "" if mib is None else f"{mib / 1024:.2f} GB"
