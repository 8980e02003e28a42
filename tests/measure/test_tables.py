# Copyright (c) the d2_memfit developers.
import pytest

from d2_memfit.measure.tables import draw, markdown

FAILED = "OutOfMemoryError: CUDA out of memory (steps.py:99)"
RESULTS = {
    **{"date": "2026-11-23", "minutes": 8, "errors": {}},
    "machine": [{"card": "Some Card", "rehearsal": False, "total_gb": 3.81, "pytorch": "2.14.1"}],
    "outside": [
        {"after": "the first tensor", "mb": 310.0},
        {"after": "a convolution (cuDNN)", "mb": 352.25},
        {"workspace": "cuBLAS", "mb": 16.25},
        {"ranks": 2, "not_measured": "NCCL needs 2 GPUs, not 1"},
        {"file": "h100", "context_mb": 500.0, "kernels_mb": 200.0, "cublas_workspace_mb": 64.0}
        | {"nccl_mb": [544.0, 688.0]},
    ],
    "plans": [
        {
            **{"precision": "float32", "budget_gb": 3.5, "images": 4, "micro_batch": 2},
            **{"techniques": ["ChunkedHeads"], "estimated_gb": 3.0, "gb": 2.9},
            **{"estimated_device_gb": 3.4, "device_gb": 3.3, "predicted_seconds": 0.5},
            **{"predicted_by_own_speeds": 0.75, "seconds": 0.875},
        },
        {"precision": "mixed", "budget_gb": 3.5, "error": FAILED},
    ],
    "blocks": [
        {
            **{"blocks": "saved", "images": 8, "estimated_gb": 9.0, "gb": 9.1, "seconds": 1.0},
            **{"predicted_seconds": 0.8, "predicted_time_factor": 1, "time_factor": 1},
            **{"ActivationCheckpointing": [], "ActivationOffload": []},
        },
        {"blocks": "some recomputed", "images": 8, "estimated_gb": 7.0}
        | {"ActivationCheckpointing": [f"backbone.res{n}" for n in range(2, 7)]},
        {"blocks": "all recomputed", "images": 8, "error": FAILED},
    ],
    "crowded": [
        {"micro_batches": "by bytes", "budget_gb": 2.5, "oom_events": 0, "retried_images": 0}
        | {"last_micro_batches": [4, 3, 1]},
        {"micro_batches": "4 images", "budget_gb": 2.5, "oom_events": 2, "retried_images": 6}
        | {"last_micro_batches": [1, 1, 2, 4]},
    ],
    "techniques": [
        {"technique": "none", "gb": 2.0, "seconds": 1.0, "predicted_seconds": 0.9},
        {"technique": "ChunkedHeads", "gb": 1.9, "seconds": 1.1, "predicted_seconds": 1.0}
        | {"time_factor": 1.1},
    ],
}


def row(table, *names):
    """The cells of the only row that has all of these."""
    lines = [[c.strip() for c in line.split("|")[1:-1]] for line in table.splitlines()]
    (found,) = [line for line in lines if set(names) <= set(line)]
    return found


def test_tables_have_what_was_predicted_and_what_was_measured():
    table = markdown(RESULTS)
    assert row(table, "float32", "ChunkedHeads")[-4:] == ["0.500", "0.750", "0.875", ""]
    assert row(table, "mixed")[-1] == FAILED
    assert row(table, "saved")[:3] == ["saved", "8", "9.000"]
    assert "backbone.res2, backbone.res3, backbone.res4 and 2 more" in row(table, "some recomputed")
    assert row(table, "by bytes") == ["by bytes", "2.500", "0", "0", "4 + 3 + 1"]
    assert row(table, "4 images")[2] == "2"
    assert row(table, "NCCL between 2 ranks")[-1] == "NCCL needs 2 GPUs, not 1"
    assert row(table, "constant", "measured", "in h100.yaml")
    assert row(table, "context_mb") == ["context_mb", "310.000", "500.000"]
    assert row(table, "kernels_mb")[1] == "42.250"
    assert "nccl_mb" not in table


@pytest.mark.slow
@pytest.mark.parametrize("left_out", [(), ("outside", "plans"), ("blocks", "crowded"), RESULTS])
def test_what_was_not_measured_leaves_its_panel_empty(left_out, tmp_path):
    results = {k: v for k, v in RESULTS.items() if k not in left_out or k == "machine"}
    draw(results, tmp_path / "card.png")
    assert (tmp_path / "card.png").read_bytes().startswith(b"\x89PNG")
