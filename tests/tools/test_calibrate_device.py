import sys

import pytest
import torch
import yaml
from tiny import ROOT, run_process

from d2_memfit.planner import calibration
from d2_memfit.planner.device_model import DeviceModel


def written(device, tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text(yaml.safe_dump(calibration.calibrate(torch.device(device))))
    return DeviceModel.load(file)


def test_what_is_measured_is_a_device(tmp_path, monkeypatch):
    monkeypatch.setattr(calibration, "_SECONDS", 0.01)
    device = written("cpu", tmp_path)
    assert device.flops_per_s["float32"] > 1e9
    assert device.bytes_per_s > 1e8
    assert 1e-7 < device.seconds_per_operator < 1e-3
    assert not device.is_gpu


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_gpu_is_known_by_its_name(tmp_path):
    device = written("cuda", tmp_path)
    assert device.device_name == torch.cuda.get_device_name()
    assert 100 < device.context_mb < 2000
    assert device.flops_per_s["float16"] > device.flops_per_s["float32"] / 2


def test_the_file_must_be_yaml(tmp_path):
    run = run_process(
        [sys.executable, ROOT / "tools" / "calibrate_device.py", tmp_path / "mine.txt"]
    )
    assert run.returncode == 2
    assert "must end in .yaml" in run.stderr
