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
    told = explain_run("run 1", run, None, "its code is not here")
    return f"{answer_of_run(run, told, None)}\n\n{details_of([told], told)}"


def test_an_error_alone_does_not_tell_when_it_happened():
    (run,) = runs_in((TRACEBACK + ALONE).splitlines())
    assert both(run).startswith("It ran out of memory, on a card that the log does not name")
    assert "at once" not in both(run)


@pytest.mark.parametrize(
    ("end", "options", "verdict"),
    [
        ([], {}, "It did not run out of memory (running): 2.93 GB at most"),
        ([TRACEBACK + ALONE], {"iterations": ()}, "It ran out of memory at once"),
        ([TRACEBACK + SHARED], {}, "It ran out of memory after some iterations"),
        (["Killed"], {}, "It ran out of memory of the host's RAM"),
        ([TRACEBACK + "KeyError: 'mine'"], {}, "It ended in an error, not for lack of memory: Key"),
        ([TRACEBACK + NAN], {}, "It diverged by iteration 39"),
    ],
)
def test_the_verdict_stands_first(end, options, verdict):
    text = text_of(*end, **options)
    assert text.startswith(verdict)
    assert ("MICRO_BATCH" in text) == (OOM[:50] in "".join(end))
    assert ("SOLVER.BASE_LR" in text) == verdict.startswith("It diverged")
    assert ("does not fit this card" in text) == (end == [TRACEBACK + ALONE])
    assert ("others held 5.00 GB of its 10.00 GB" in text) == (end == [TRACEBACK + SHARED])


def test_fragments_are_named():
    pieces = OOM.replace("1.50 GiB. GPU", "0.50 GiB. GPU")
    assert "1.00 GB were reserved and not allocated" in text_of(TRACEBACK + pieces)
    assert "reserved and not" not in text_of(TRACEBACK + OOM)


def test_without_a_models_code_the_log_alone_is_shown():
    lines = text_of(TRACEBACK + OOM).splitlines()
    assert "Not predicted: its code is not here" in lines
    assert any("MEMFIT.MICRO_BATCH 1" in line for line in lines)
    assert not any(line.startswith("Predicted") for line in lines)


def test_several_runs_show_the_peak_by_batch():
    config = "Running with full config:\nSOLVER:\n  IMS_PER_BATCH: 8\n"
    (run,) = runs_in(headed(log(config=config)).splitlines())
    told = explain_run("run 2", run, None)
    said = "run 2: running, 4 images per GPU, peak 2.93 GB, 0.25 s per iteration"
    assert details_of([told], told) == said


def test_what_the_context_may_hold_is_perhaps_of_others():
    old = (
        "RuntimeError: CUDA out of memory. Tried to allocate 1.50 GiB (GPU 0; 10.00 GiB total "
        "capacity; 7.00 GiB already allocated; 0 bytes free; 8.00 GiB reserved in total by PyTorch)"
    )
    assert "shared: 1.72 GB of its 10.00 GB were not PyTorch's" in text_of(TRACEBACK + old)
    assert "\nPerhaps the card was shared" in text_of(TRACEBACK + old)
