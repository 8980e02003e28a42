# Copyright (c) the d2_memfit developers.
import pytest
import torch
import yaml

from d2_memfit.measure.calibration import calibrate
from d2_memfit.measure.outside import _in_processes, constants_of
from d2_memfit.measure.results import Results
from d2_memfit.planner.device import DeviceModel

RECORDS = [
    {"after": "the first tensor", "mb": 310.0},
    {"after": "a convolution (cuDNN)", "mb": 350.0},
    {"workspace": "cuBLAS", "mb": 64.0},
    {"workspace": "cuBLASLt", "mb": 0.0},
    {"after": "training a Mask R-CNN", "mb": 470.0},
    {"after": "evaluating it", "mb": 466.0},
    {"ranks": 2, "mb": 500.0},
    {"ranks": 4, "mb": 650.0},
]
CONSTANTS = {
    **{"context_mb": 310.0, "kernels_mb": 160.0, "cublas_workspace_mb": 64.0},
    "nccl_mb": [500.0, 650.0],
}


@pytest.fixture(scope="module")
def cpu_values():
    return calibrate(torch.device("cpu"), seconds=0.01)


def test_constants_are_those_of_a_device_file():
    assert constants_of(RECORDS) == CONSTANTS


@pytest.mark.slow
@pytest.mark.parametrize(
    ("left_out", "without"),
    [
        ("the first tensor", {"context_mb", "kernels_mb"}),
        ("workspace", {"cublas_workspace_mb"}),
        ("ranks", {"nccl_mb"}),
    ],
)
def test_what_was_not_measured_is_no_constant(left_out, without):
    records = [r for r in RECORDS if left_out not in (*r, r.get("after"))]
    assert constants_of(records).keys() == CONSTANTS.keys() - without


def test_one_gpu_has_no_communicator():
    records = [*RECORDS[:6], {"ranks": 2, "not_measured": "NCCL needs 2 GPUs, not 1"}]
    assert "nccl_mb" not in constants_of(records)


def device_file(rows, calibration=None):
    results = Results()
    results.add({"stage": "measured", "item": "outside/", "rows": rows})
    if calibration is not None:
        results.add({"stage": "measured", "item": "calibration/", **calibration})
    return results.device_file()


@pytest.mark.slow
def test_a_cards_file_has_the_constants_of_a_process_of_its_own(tmp_path, cpu_values):
    path = tmp_path / "card.yaml"
    path.write_text(yaml.safe_dump(device_file(RECORDS, {**cpu_values, "is_gpu": True})))
    device = DeviceModel.load(path)
    assert {name: getattr(device, name) for name in CONSTANTS} == CONSTANTS
    assert device.bytes_per_s == cpu_values["bytes_per_s"]


def test_without_a_calibration_there_is_no_file(cpu_values):
    assert device_file(RECORDS) == {}
    assert device_file(RECORDS, {"error": "RuntimeError: CUDA error"}) == {}
    assert device_file(RECORDS, cpu_values) == cpu_values


@pytest.mark.slow
def test_a_process_that_fails_is_a_record():
    (record,) = _in_processes(int, 1)
    assert "TypeError" in record["error"]
