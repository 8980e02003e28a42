# Copyright (c) the d2_memfit developers.
"""torchvision's detectors in the loop of its references: memory, recovery and gradients."""

import pytest
import torch
from detectron2.utils.events import EventStorage
from injection import InjectedTrainer, Injector
from tiny import parameters, peak_of, relative_difference
from torch.optim import SGD
from torch.optim.lr_scheduler import LinearLR
from torchvision.models import mobilenet_v3_small
from torchvision.models.detection import FasterRCNN
from torchvision.models.detection.backbone_utils import BackboneWithFPN
from torchvision.models.detection.faster_rcnn import FastRCNNPredictor, TwoMLPHead
from torchvision.ops import FrozenBatchNorm2d
from train_detection import detection_losses, train_one_epoch

from d2_memfit import Job
from d2_memfit.engine.build import build_trainer
from d2_memfit.planner.steps import Session

SIDE, CHANNELS = 64, 32


@pytest.fixture
def float64():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def samples(num):
    """Images, and the boxes in them, as the references' collate_fn gives them."""
    rng, targets = torch.Generator().manual_seed(0), []
    for number in range(1, num + 1):
        corner, size = torch.rand(2, number, 2, generator=rng) * 24 + 8
        boxes = torch.cat([corner, corner + size], dim=1).to(torch.get_default_dtype())
        targets.append({"boxes": boxes, "labels": torch.ones(number).long()})
    images = torch.rand(num, 3, SIDE, SIDE, generator=rng).to(torch.get_default_dtype())
    return tuple(images), tuple(targets)


def build_model():
    """A small detector of torchvision with random weights and frozen batch normalisation."""
    torch.manual_seed(0)
    body = mobilenet_v3_small(width_mult=0.25, norm_layer=FrozenBatchNorm2d).features
    levels = {str(place): str(level) for level, place in enumerate((1, 3, 8, 12))}
    channels = [body[int(place)].out_channels for place in levels]
    backbone = BackboneWithFPN(body, levels, channels, CHANNELS)
    options = {"min_size": SIDE, "max_size": SIDE, "box_head": TwoMLPHead(CHANNELS * 7 * 7, 32)}
    options.update(box_batch_size_per_image=64, rpn_batch_size_per_image=64)
    return FasterRCNN(backbone, box_predictor=FastRCNNPredictor(32, 2), **options)


def job_of(batch, **kwargs):
    return Job(
        model=build_model,
        optimizer=lambda model: SGD(model.parameters(), lr=1e-3, momentum=0.9),
        images_per_batch=len(batch[0]),
        device="cpu",
        batch=batch,
        loss_fn=detection_losses,
        **kwargs,
    )


def test_the_estimate_has_the_bytes_of_a_computed_step(computing):
    job = job_of(samples(2))
    dry = Session(job).train(job.training_batch(2))
    computing()
    computed = Session(job).train(job.training_batch(2))
    peak, expected = peak_of(dry), peak_of(computed)
    print(f"{peak:,} bytes estimated, {expected:,} computed")
    assert peak == pytest.approx(expected, rel=0.005)


def trained(fail_at=(), **kwargs):
    """The references' loop: its own optimizer, scheduler and metrics."""
    batches, model = [samples(2)], build_model()
    optimizer = SGD(model.parameters(), lr=1e-3, momentum=0.9)
    scheduler = LinearLR(optimizer, start_factor=0.1, total_iters=2)
    job = job_of(batches[0], memfit={"oom": {"policy": "split"}}, **kwargs)
    trainer = build_trainer(job, model, data_loader=(), optimizer=optimizer)
    if fail_at:
        trainer.__class__ = InjectedTrainer
        trainer.injector = Injector(fail_at)
    torch.manual_seed(1)
    with EventStorage():
        train_one_epoch(trainer, optimizer, batches, "cpu", scheduler)
    return parameters(model), trainer


@pytest.mark.slow
def test_an_injected_error_leaves_no_trace():
    expected, _ = trained(micro_batch_size=1)
    _, counting = trained(fail_at=[10**9])
    for where in (0.3, 0.9):  # in the forward and in the backward
        fail_at = int(counting.injector.num_allocations * where)
        weights, trainer = trained(fail_at=[fail_at])
        assert (trainer.recovery.totals.oom_events, trainer.window_sizes) == (1, (1, 1))
        assert all(torch.equal(weights[name], expected[name]) for name in expected)


def test_micro_batches_have_the_gradients_of_the_full_batch(monkeypatch, float64):
    """R-CNN samples anchors and proposals: here always the same ones of an image.

    In float64, because random weights enlarge the rounding of float32.
    """
    monkeypatch.setattr(torch, "randperm", lambda n, device=None: torch.arange(n, device=device))
    trainers = [trained(**options)[1] for options in ({}, {"micro_batch_size": 1})]
    full, cut = (gradients(trainer.model) for trainer in trainers)
    distance = relative_difference(cut, full)
    print(f"{distance:.0e} from the gradients of the full batch")
    assert distance < 1e-12


def gradients(model):
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
