# Copyright (c) the d2_memfit developers.
"""The largest batch run for real: what is measured, and what is left behind."""

import json
from itertools import repeat

import pytest
import torch
from detectron2.modeling import build_model
from detectron2.solver import build_optimizer
from detectron2.utils.events import EventStorage
from tiny import peak_of, sized, tiny_cfg

from d2_memfit import AccumulatingTrainer
from d2_memfit.cli.command_line import main
from d2_memfit.config.load import load_cfg
from d2_memfit.job import Job
from d2_memfit.memory import TensorMeter
from d2_memfit.planner.device import DeviceModel
from d2_memfit.planner.estimate import DryJob
from d2_memfit.planner.probe import run_for_real
from d2_memfit.planner.worst_outputs import worst_case

CASE = (320, 480), 10
ORIGINAL = 3 * 320 * 480  # bytes of an image that the job keeps: the meter sees what is copied
KEYPOINTS = ("keypoints_coco_2017_train",)

on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


@pytest.mark.parametrize(
    "family", ["mask_rcnn", "retinanet", pytest.param("keypoint_rcnn", marks=pytest.mark.slow)]
)
def test_a_real_run_has_the_peaks_of_the_dry_one(family):
    cfg = tiny_cfg(family)
    cfg.SOLVER.IMS_PER_BATCH = 4
    cfg.MEMFIT.MICRO_BATCH = 2
    if family == "keypoint_rcnn":
        cfg.DATASETS.TRAIN, cfg.MODEL.ROI_KEYPOINT_HEAD.NUM_KEYPOINTS = KEYPOINTS, 17
    dry_job = DryJob(Job.from_cfg(cfg, 1, **sized(cfg, *CASE)), DeviceModel.load("cpu"))
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    with TensorMeter() as meter:
        peaks = []
        for _ in run_for_real(dry_job.job, "cpu"):
            peaks.append(meter.peak_bytes)
            meter.peak_bytes = meter.live_bytes
    assert torch.rand(1) == expected
    timelines = dry_job.whole(), dry_job.evaluation
    training, evaluation = (peak_of(t) for t in timelines)
    assert peaks[0] == pytest.approx(training, abs=0.01 * training + ORIGINAL)
    assert peaks[1] == pytest.approx(evaluation, abs=0.01 * evaluation + 2 * ORIGINAL)


@pytest.mark.slow
def test_mixed_precision_steps_too():
    """The scaler of float16 would leave out first steps, and with them the optimizer's states."""
    cfg = tiny_cfg("retinanet")
    cfg.MODEL.RETINANET.NUM_CLASSES = 80
    cfg.SOLVER.IMS_PER_BATCH = 2
    cfg.SOLVER.AMP.ENABLED = True
    dry_job = DryJob(Job.from_cfg(cfg, 1, **sized(cfg, *CASE)), DeviceModel.load("cpu"))
    with TensorMeter() as meter:
        next(run_for_real(dry_job.job, "cpu"))
    training = peak_of(dry_job.whole())
    assert meter.peak_bytes == pytest.approx(training, abs=0.01 * training + ORIGINAL)


def test_a_trainer_has_the_peak_of_a_probe():
    cfg = tiny_cfg("mask_rcnn", fpn=False)
    cfg.SOLVER.IMS_PER_BATCH = 4
    cfg.MEMFIT.MICRO_BATCH = 2
    dry_job = DryJob(Job.from_cfg(cfg, 1, **sized(cfg, *CASE)), DeviceModel.load("cpu"))
    with TensorMeter() as meter, EventStorage():
        model = build_model(cfg)
        batch = dry_job.job.training_batch()
        trainer = AccumulatingTrainer(model, repeat(batch), build_optimizer(cfg, model), 2)
        with worst_case(model, lambda line: None):
            for _ in range(2):
                trainer.run_step()
    training = peak_of(dry_job.whole())
    assert meter.peak_bytes == pytest.approx(training, abs=0.01 * training + ORIGINAL)


@pytest.fixture
def cfg():
    """A job whose tensors outweigh what libraries take."""
    name = "COCO-InstanceSegmentation/mask_rcnn_R_50_FPN_3x.yaml"
    return load_cfg(name, ["SOLVER.IMS_PER_BATCH", 8])


@pytest.mark.gpu
@on_gpu
def test_the_command_probes(cfg, tmp_path, capsys):
    file = tmp_path / "tiny.yaml"
    file.write_text(cfg.dump())
    main(["estimate", "--config-file", str(file), "--probe", "--json"])
    assert "beyond the dry run" in json.loads(capsys.readouterr().out)["breakdown"]
