# Copyright (c) the d2_memfit developers.
"""`pytest -m gpu` runs the checks of `d2-memfit measure-gpu`."""

import pytest
import torch

from d2_memfit.engine import AccumulatingTrainer
from d2_memfit.measure import device_checks
from d2_memfit.measure.device_checks import CHECKS
from d2_memfit.measure.gpu_checks import GPU_CHECKS
from d2_memfit.measure.jobs import JOBS
from d2_memfit.measure.scale import Scale

CPU = torch.device("cpu")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("name", [*GPU_CHECKS, *CHECKS])
def test_the_gpu_passes(name):
    {**GPU_CHECKS, **CHECKS}[name](torch.device("cuda", 0))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("job", ["outside", "plans", "blocks", "crowded"])
def test_the_gpu_is_measured(job):
    records = list(JOBS[job](torch.device("cuda", 0), Scale.of(CPU)))
    assert not [record for record in records if "error" in record]
    for record in records:
        if "oom_events" in record and record["micro_batches"] == "by bytes":
            assert record["oom_events"] == 0
        if "micro_batch" in record:
            assert record["device_gb"] <= record["budget_gb"]


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", CHECKS)
def test_the_cpu_passes(name):
    CHECKS[name](CPU)


def test_a_trainer_that_is_not_detectron2s_is_found(monkeypatch):
    class Other(AccumulatingTrainer):
        def _backward(self, loss, weight):
            super()._backward(loss * (1 + 1e-6), weight)

    CHECKS["float32 is Detectron2's"](CPU)
    monkeypatch.setattr(device_checks, "AccumulatingTrainer", Other)
    with pytest.raises(AssertionError, match="weights differ by"):
        CHECKS["float32 is Detectron2's"](CPU)


def test_accumulation_that_weighs_micro_batches_alike_is_found(monkeypatch):
    class Alike(AccumulatingTrainer):
        def _backward(self, loss, weight):
            super()._backward(loss, 1 / self.accumulation_steps)

    CHECKS["accumulation in float32"](CPU)
    monkeypatch.setattr(device_checks, "AccumulatingTrainer", Alike)
    with pytest.raises(AssertionError, match="of weights that moved by"):
        CHECKS["accumulation in float32"](CPU)
