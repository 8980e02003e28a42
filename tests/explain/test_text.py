# Copyright (c) the d2_memfit developers.
"""Explanations as text: the answer stands first."""

import pytest
from made_up_logs import OOM, TRACEBACK, headed, log
from torch import nn

from d2_memfit.explain.explanation import explain_run
from d2_memfit.explain.records import runs_in
from d2_memfit.explain.text import answer_of_run, describe_run, describe_runs

ALONE = OOM.replace("this process has 8.50", "this process has 9.50")
SHARED = OOM.replace("this process has 8.50 GiB", "this process has 4.50 GiB").replace(
    "7.00 GiB is allocated", "3.00 GiB is allocated"
)


def text_of(*end, **options):
    (run,) = runs_in(headed(log(*end, **options)).splitlines())
    return both(run)


def both(run):
    """The answer and its details."""
    told = explain_run("run 1", run, None, "its code is not here")
    return f"{answer_of_run(told, None, None)}\n\n{describe_run(run, told, None)}"


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
                "It ran out of memory at once, on Made Up GPU 9000 (10.00 GB).",
                "As it is, the job does not fit this card when nobody else uses it.",
            ],
        ),
        (
            [TRACEBACK + SHARED],
            {},
            [
                "The card was shared: others held 5.00 GB of its 10.00 GB.",
                "It ran out of memory after some iterations, on Made Up GPU 9000 (10.00 GB).",
                "The log does not tell whether the job fits this card when nobody else uses it.",
            ],
        ),
        (
            [TRACEBACK + "  File 'x.py', line 9, in inference_on_dataset\n" + ALONE],
            {},
            ["It ran out of memory in evaluation, on Made Up GPU 9000 (10.00 GB)."],
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
    ids=["no error", "at once", "shared", "evaluation", "host"],
)
def test_the_answer_stands_first(end, options, first):
    assert text_of(*end, **options).splitlines()[: len(first)] == first


def test_fragments_are_named():
    pieces = OOM.replace("1.50 GiB. GPU", "0.50 GiB. GPU")
    assert "1.00 GB were reserved and not allocated" in text_of(TRACEBACK + pieces)
    assert "reserved and not" not in text_of(TRACEBACK + OOM)


def test_without_a_models_code_the_log_alone_is_shown():
    model = nn.Sequential(nn.Linear(1000, 999), nn.Linear(1000, 1000))
    messages = [
        m if not m.startswith("Model:") else f"Model:\n{model}" for m in log(TRACEBACK + OOM)
    ]
    (run,) = runs_in(headed(messages).splitlines())
    lines = both(run).splitlines()
    assert "Not predicted: its code is not here" in lines
    assert any("at least 2.0 million parameters: 0.01 GB" in line for line in lines)
    assert any("MEMFIT.MICRO_BATCH 1" in line for line in lines)
    assert not any(line.startswith("Predicted") for line in lines)


def test_several_runs_show_the_peak_by_batch():
    texts = [headed(log(config=f"Running with full config:\nSOLVER:\n  IMS_PER_BATCH: {n}\n"))
             for n in (2, 8)]  # fmt: skip
    runs = runs_in("".join(texts).splitlines())
    told = [explain_run(f"run {i}", run, None) for i, run in enumerate(runs, 1)]
    assert describe_runs(told).splitlines() == [
        "run 1: running, 1 images per GPU, peak 2.93 GB",
        "run 2: running, 4 images per GPU, peak 2.93 GB",
    ]


def test_another_error_is_said():
    text = text_of(TRACEBACK + "KeyError: 'mine'")
    assert "It did not run out of memory (error)" in text.splitlines()[0]
    assert "\nThe error: KeyError: 'mine'\n" in text
