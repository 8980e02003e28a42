# Copyright (c) the d2_memfit developers.
import pytest
import torch
import yaml
from forks import run_forked
from tiny import ROOT

from d2_memfit.measure.calibration import calibrate
from d2_memfit.planner.device import DeviceModel

pytestmark = pytest.mark.slow


def test_what_is_measured_is_a_device(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text(yaml.safe_dump(calibrate(torch.device("cpu"), seconds=0.01)))
    device = DeviceModel.load(file)
    assert device.flops_per_s["float32"] > 1e9
    assert device.bytes_per_s > 1e8
    assert 1e-7 < device.seconds_per_operator < 1e-3
    assert not device.is_gpu


def test_the_file_must_be_yaml(tmp_path):
    run = run_forked(ROOT / "tools" / "calibrate_device.py", tmp_path / "mine.txt")
    assert run.returncode == 2
    assert "must end in .yaml" in run.stderr
