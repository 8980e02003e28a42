# Copyright (c) the d2_memfit developers.
"""torchvision's detectors in the loop of its references: memory, recovery and gradients."""

import pytest
import torch
from detectron2.utils.events import EventStorage
from injection import InjectedTrainer, Injector
from make_dataset import find_coins
from skimage import data, measure
from tiny import parameters, relative_difference
from torch.optim import SGD
from torch.optim.lr_scheduler import LinearLR
from torchvision.models import mobilenet_v3_small
from torchvision.models.detection import FasterRCNN, RetinaNet
from torchvision.models.detection.backbone_utils import BackboneWithFPN
from torchvision.models.detection.faster_rcnn import FastRCNNPredictor, TwoMLPHead
from torchvision.ops import FrozenBatchNorm2d
from train_detection import detection_losses, train_one_epoch

from d2_memfit import Job
from d2_memfit.engine.build import build_trainer
from d2_memfit.planner.steps import Session

pytestmark = pytest.mark.slow

SIDE, CHANNELS, NUM_IMAGES = 64, 32, 2


@pytest.fixture
def float64():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def coins(num):
    """Square parts of a photograph, and the boxes of the coins in them."""
    photograph, labels = data.coins(), find_coins(data.coins())
    samples = []
    for i in range(num):
        top, left = 43 * i % (303 - SIDE), 61 * i % (384 - SIDE)
        part = slice(top, top + SIDE), slice(left, left + SIDE)
        regions = measure.regionprops(labels[part])
        boxes = [(x0, y0, x1, y1) for y0, x0, y1, x1 in (r.bbox for r in regions)]
        dtype = torch.get_default_dtype()
        image = torch.tensor(photograph[part] / 255, dtype=dtype).expand(3, -1, -1)
        target = {
            "boxes": torch.tensor(boxes, dtype=dtype),
            "labels": torch.ones(len(boxes)).long(),
        }
        samples.append((image.contiguous(), target))
    return tuple(zip(*samples))  # the references' collate_fn


def build_model(kind):
    """A small detector of torchvision with random weights and frozen batch normalisation."""
    torch.manual_seed(0)
    body = mobilenet_v3_small(width_mult=0.25, norm_layer=FrozenBatchNorm2d).features
    levels = {str(place): str(level) for level, place in enumerate((1, 3, 8, 12))}
    channels = [body[int(place)].out_channels for place in levels]
    backbone = BackboneWithFPN(body, levels, channels, CHANNELS)
    options = {"min_size": SIDE, "max_size": SIDE}
    if kind is RetinaNet:
        return RetinaNet(backbone, num_classes=2, **options)
    options.update(box_batch_size_per_image=64, rpn_batch_size_per_image=64)
    options.update(box_head=TwoMLPHead(CHANNELS * 7 * 7, 32))
    return FasterRCNN(backbone, box_predictor=FastRCNNPredictor(32, 2), **options)


def job_of(kind, batch, **kwargs):
    return Job(
        model=lambda: build_model(kind),
        optimizer=lambda model: SGD(model.parameters(), lr=1e-3, momentum=0.9),
        images_per_batch=len(batch[0]),
        device="cpu",
        batch=batch,
        loss_fn=detection_losses,
        **kwargs,
    )


def test_the_estimate_has_the_bytes_of_a_computed_step(computing):
    job = job_of(FasterRCNN, coins(2))
    dry = Session(job).train(job.training_batch(2))
    computing()
    computed = Session(job).train(job.training_batch(2))
    peak, expected = sum(dry.peak().values()), sum(computed.peak().values())
    print(f"{peak:,} bytes estimated, {expected:,} computed")
    assert peak == pytest.approx(expected, rel=0.005)


def trained(kind, num_iterations=1, fail_at=(), **kwargs):
    """The references' loop: its own optimizer, scheduler and metrics."""
    batches = [coins(NUM_IMAGES)] * num_iterations
    model = build_model(kind)
    optimizer = SGD(model.parameters(), lr=1e-3, momentum=0.9)
    scheduler = LinearLR(optimizer, start_factor=0.1, total_iters=2)
    job = job_of(kind, batches[0], memfit={"oom": {"policy": "split"}}, **kwargs)
    trainer = build_trainer(job, model, data_loader=(), optimizer=optimizer)
    if fail_at:
        trainer.__class__ = InjectedTrainer
        trainer.injector = Injector(fail_at)
    torch.manual_seed(1)
    with EventStorage():
        losses = train_one_epoch(trainer, optimizer, batches, "cpu", scheduler)
    assert len(losses) == num_iterations
    return parameters(model), trainer


@pytest.mark.long
def test_an_injected_error_leaves_no_trace():
    kind = FasterRCNN
    expected, _ = trained(kind, micro_batch_size=1)
    _, counting = trained(kind, fail_at=[10**9])
    for where in (0.3, 0.9):  # in the forward and in the backward
        fail_at = int(counting.injector.num_allocations * where)
        weights, trainer = trained(kind, fail_at=[fail_at])
        assert (trainer.recovery.totals.oom_events, trainer.window_sizes) == (1, (1, 1))
        assert all(torch.equal(weights[name], expected[name]) for name in expected)


@pytest.mark.parametrize("kind", [FasterRCNN, pytest.param(RetinaNet, marks=pytest.mark.long)])
def test_micro_batches_have_the_gradients_of_the_full_batch(kind, monkeypatch, float64):
    """R-CNN samples anchors and proposals: here always the same ones of an image.

    In float64, because random weights enlarge the rounding of float32.
    """
    monkeypatch.setattr(torch, "randperm", lambda n, device=None: torch.arange(n, device=device))
    trainers = [trained(kind, **options)[1] for options in ({}, {"micro_batch_size": 1})]
    full, cut = (gradients(trainer.model) for trainer in trainers)
    distance = relative_difference(cut, full)
    print(f"{kind.__name__}: {distance:.0e} from the gradients of the full batch")
    assert distance < 1e-12


def gradients(model):
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
