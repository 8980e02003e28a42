# Copyright (c) the d2_memfit developers.
"""Explanations as text: the answer stands first."""

import pytest
from made_up_logs import OOM, TRACEBACK, headed, log

from d2_memfit.explain.records import read_parts
from d2_memfit.explain.text import answer_of_run, details_of
from d2_memfit.explain.verdict import explain_run

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
    assert both(run).startswith("It ran out of memory, on a card that the log does not name (10.00")
    assert "at once" not in both(run)
    (run,) = runs_in("Starting training\nKilled".splitlines())
    assert both(run).startswith("It ran out of memory of the host's RAM, not of the card's memory")


@pytest.mark.parametrize(
    ("end", "options", "first"),
    [
        ([], {}, ["It did not run out of memory (running): 2.93 GB at most, on Made Up GPU 9000."]),
        (
            [TRACEBACK + ALONE],
            {"iterations": ()},
            [
                "It ran out of memory at once, on Made Up GPU 9000 (10.00 GB): as it is, the job "
                "does not fit this card.",
            ],
        ),
        (
            [TRACEBACK + SHARED],
            {},
            [
                "It ran out of memory after some iterations, on Made Up GPU 9000 (10.00 GB): "
                "whether the job fits this card when nobody else uses it, the log does not tell.",
                "The card was shared: others held 5.00 GB of its 10.00 GB.",
            ],
        ),
        (
            ["Killed"],
            {},
            [
                "It ran out of memory of the host's RAM, not of the card's memory, on Made Up GPU "
                "9000.",
            ],
        ),
    ],
    ids=["no error", "at once", "shared", "host"],
)
def test_the_answer_stands_first(end, options, first):
    assert text_of(*end, **options).splitlines()[: len(first)] == first


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
    assert details_of([told], told) == (
        "run 2: running, 4 images per GPU, peak 2.93 GB, 0.25 s per iteration"
    )


def test_another_error_is_said():
    text = text_of(TRACEBACK + "KeyError: 'mine'")
    first = "It ended in an error, not for lack of memory: KeyError: 'mine'"
    assert text.splitlines()[0] == first
    assert "MICRO_BATCH" not in text


def test_a_run_that_diverged_is_not_told_to_save_memory():
    error = "FloatingPointError: Loss became infinite or NaN at iteration=41!"
    first, second, *_ = text_of(TRACEBACK + error).splitlines()
    assert first.startswith("It diverged by iteration 39: the loss is not finite, not for lack of")
    assert first.endswith(error)
    assert "SOLVER.BASE_LR" in second
    assert "MICRO_BATCH" not in text_of(TRACEBACK + error)


def test_what_the_context_may_hold_is_perhaps_of_others():
    old = (
        "RuntimeError: CUDA out of memory. Tried to allocate 1.50 GiB (GPU 0; 10.00 GiB total "
        "capacity; 7.00 GiB already allocated; 0 bytes free; 8.00 GiB reserved in total by PyTorch)"
    )
    assert "shared: 1.72 GB of its 10.00 GB were not PyTorch's" in text_of(TRACEBACK + old)
    assert "\nPerhaps the card was shared" in text_of(TRACEBACK + old)
