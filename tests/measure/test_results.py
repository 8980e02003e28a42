# Copyright (c) the d2_memfit developers.
import json

import pytest

from d2_memfit.measure.results import MACHINE, Results, markdown, summary

FAILED = "OutOfMemoryError: CUDA out of memory (steps.py:99)"
RPN = "zoo/COCO-Detection/rpn_R_50_FPN_1x"
RECORDS = [
    {"stage": "measured", "item": MACHINE, "date": "2026-11-23", "rehearsal": False}
    | {"card": "Some Card", "memory_mb": 3904, "pytorch": "2.14.1"},
    {"stage": "measured", "item": "outside/"}
    | {
        "rows": [
            {"after": "the first tensor", "mb": 310.0},
            {"after": "a convolution (cuDNN)", "mb": 352.25},
            {"workspace": "cuBLAS", "mb": 16.25},
            {"ranks": 2, "not_measured": "NCCL needs 2 GPUs, not 1"},
        ]
    },
    {"stage": "expected", "item": RPN, "allocated_gb": 2.0, "device_gb": 3.3, "seconds": 0.5}
    | {"settings": {}},
    {"stage": "measured", "item": RPN, "images": 2, "allocated_gb": 1.9, "active_gb": 1.95}
    | {"reserved_gb": 2.25, "outside_gb": 0.75, "device_gb": 3.0, "retries": 4, "seconds": 0.75},
    {"stage": "expected", "item": "plans/4GB", "steps": ["ChunkedHeads"], "allocated_gb": 3.0},
    {"stage": "measured", "item": "plans/4GB", "error": FAILED},
    {"stage": "measured", "item": "fragments/4GB", "oom_events": 2, "last_micro_batches": [1, 1]},
    {"stage": "measured", "item": "recovery/", "images": 8, "oom_events": 1},
]


def results_of(records):
    results = Results()
    for record in records:
        results.add(record)
    return results


def row(table, *names):
    """The cells of the only row that has all of these."""
    lines = [[c.strip() for c in line.split("|")[1:-1]] for line in table.splitlines()]
    (found,) = [line for line in lines if set(names) <= set(line)]
    return found


def test_tables_have_what_was_expected_and_what_was_measured():
    table = markdown(results_of(RECORDS))
    assert "3904 MB, PyTorch 2.14.1, 2026-11-23." in table
    cells = dict(zip(row(table, "zoo"), row(table, RPN.partition("/")[2])))
    assert cells["allocated GB, expected"] == "2.000"
    assert cells["allocated GB"] == "1.900"
    assert cells["allocated GB, x"] == "1.05"
    assert cells["active gb"] == "1.950"
    assert cells["reserved GB"] == "2.250"
    assert cells["outside gb"] == "0.750"
    assert cells["of the device GB, x"] == "1.10"
    assert cells["retries"] == "4"
    assert cells["s, x"] == "0.67"
    assert row(table, "4GB", "ChunkedHeads")[-1] == FAILED
    assert row(table, "4GB", "1, 1")
    assert row(table, "8", "1")
    assert row(table, "NCCL needs 2 GPUs, not 1", "2")
    assert row(table, "the first tensor", "310.000")
    assert row(table, "cuBLAS", "16.250")


def test_the_line_to_send_has_what_the_card_showed():
    line = json.loads(json.dumps(summary(results_of(RECORDS))))
    assert line["machine"]["card"] == "Some Card"
    assert line["expected_over_measured"]["zoo"]["device_gb"] == [1.1, 1.1, 1.1]
    assert line["errors"] == {"plans/4GB": FAILED}
    assert line["constants"]["kernels_mb"] == 42.25


@pytest.mark.parametrize("number", [1, 4, len(RECORDS)])
def test_what_was_not_measured_is_left_out(number):
    assert markdown(results_of(RECORDS[:number])).startswith("## Some Card\n")


def test_a_line_that_was_cut_off_is_left_out(tmp_path):
    log = tmp_path / "measured.jsonl"
    log.write_text("\n".join(map(json.dumps, RECORDS)) + '\n{"stage": "measu')
    assert Results.read(log).stages == results_of(RECORDS).stages
