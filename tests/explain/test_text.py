# Copyright (c) the d2_memfit developers.
"""Explanations as text: the answer stands first."""

import pytest
from made_up_logs import OOM, TRACEBACK, headed, log

from d2_memfit.explain.records import read_parts
from d2_memfit.explain.text import answer_of_run, details_of
from d2_memfit.explain.verdict import explain_run

NAN = "FloatingPointError: Loss became infinite or NaN at iteration=41!"
ALONE = OOM.replace("this process has 8.50", "this process has 9.50")
SHARED = OOM.replace("this process has 8.50 GiB", "this process has 4.50 GiB").replace(
    "7.00 GiB is allocated", "3.00 GiB is allocated"
)


def runs_in(lines):
    return read_parts([({}, lines)], "the log")


def text_of(*end, **options):
    (run,) = runs_in(headed(log(*end, **options)).splitlines())
    return both(run)


def both(run):
    """The answer and its details."""
    explained = explain_run("run 1", run, None, "its code is not here")
    return f"{answer_of_run(run, explained, None)}\n\n{details_of([explained], explained)}"


def test_an_error_alone_does_not_tell_when_it_happened(prose):
    (run,) = runs_in((TRACEBACK + ALONE).splitlines())
    prose(both(run))


@pytest.mark.parametrize(
    ("end", "options"),
    [
        ([], {}),
        ([TRACEBACK + ALONE], {"iterations": ()}),
        ([TRACEBACK + SHARED], {}),
        (["Killed"], {}),
        ([TRACEBACK + "KeyError: 'mine'"], {}),
        ([TRACEBACK + NAN], {}),
    ],
    ids=["running", "at once", "shared", "host", "error", "diverged"],
)
def test_the_verdict_stands_first(prose, end, options):
    text = text_of(*end, **options)
    assert ("MICRO_BATCH" in text) == (OOM[:50] in "".join(end))
    assert ("SOLVER.BASE_LR" in text) == (NAN in "".join(end))
    prose(text)


@pytest.mark.parametrize("free", ["0.50", "1.50"])
def test_fragments_are_named_and_without_a_models_code_the_log_alone_is_shown(prose, free):
    prose(text_of(TRACEBACK + OOM.replace("1.50 GiB. GPU", f"{free} GiB. GPU")))


def test_several_runs_show_the_peak_by_batch(prose):
    config = "Running with full config:\nSOLVER:\n  IMS_PER_BATCH: 8\n"
    (run,) = runs_in(headed(log(config=config)).splitlines())
    explained = explain_run("run 2", run, None)
    prose(details_of([explained], explained))


def test_what_the_context_may_hold_is_perhaps_of_others(prose):
    old = (
        "RuntimeError: CUDA out of memory. Tried to allocate 1.50 GiB (GPU 0; 10.00 GiB total "
        "capacity; 7.00 GiB already allocated; 0 bytes free; 8.00 GiB reserved in total by PyTorch)"
    )
    prose(text_of(TRACEBACK + old))
