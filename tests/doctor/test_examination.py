# Copyright (c) the d2_memfit developers.
"""What the doctor says of jobs that work, and of those that have something wrong."""

import itertools
import re

import pytest
import torch
import torch.distributed as dist
from tiny import tiny_cfg
from torch import nn

from d2_memfit import Job
from d2_memfit.cli.command_line import main
from d2_memfit.doctor.examination import accumulates, examine
from d2_memfit.doctor.patient import Patient


class Model(nn.Module):
    """A detector of one layer, whose loss is a mean over images."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Conv2d(3, 4, 3)

    def forward(self, batch):
        losses = [self.layer(d["image"].float() / 255).mean() for d in batch]
        return {"loss": torch.stack(losses).mean()}


class PerObject(Model):
    """Divides by the objects of its batch, as DETR-likes do."""

    def forward(self, batch):
        counts = torch.tensor([float(len(d["instances"])) for d in batch])
        losses = [self.layer(d["image"].float() / 255).mean() for d in batch]
        return {"loss": (torch.stack(losses) * counts).sum() / counts.sum()}


class Counting(Model):
    """As :class:`PerObject`, but other ranks are told."""

    def forward(self, batch):
        counts = torch.tensor([float(len(d["instances"])) for d in batch])
        losses = [self.layer(d["image"].float() / 255).mean() for d in batch]
        total, ranks = counts.sum(), 1
        if dist.is_available() and dist.is_initialized():
            dist.all_reduce(total)
            ranks = dist.get_world_size()
        return {"loss": (torch.stack(losses) * counts).sum() / torch.clamp(total / ranks, min=1)}


class Remembering(Model):
    def __init__(self):
        super().__init__()
        self.seen = itertools.count()
        self.num_forwards = 0

    def forward(self, batch):
        next(self.seen)
        self.num_forwards += 1
        return super().forward(batch)


class Ticking(Model):
    def __init__(self):
        super().__init__()
        self.num = 0

    def forward(self, batch):
        self.num += 1
        return super().forward(batch)


class Broken(Model):
    def forward(self, batch):
        return {"loss": self.layer(batch[0]["depth"])}


@pytest.fixture(scope="module")
def images():
    return Job.from_cfg(tiny_cfg("faster_rcnn"), 1).training_batch(2)


def findings(model, images):
    job = Job(
        model=model,
        optimizer=lambda m: torch.optim.AdamW(m.parameters()),
        images_per_batch=2,
        device="cpu",
        batch=images,
    )
    return {f.what: f for f in examine(job)}


def test_a_job_that_works(images):
    found = findings(Model, images)
    assert list(found) == ["iteration 0", "accumulation", "recovery", "resume"]
    assert not any(f.is_well is False for f in found.values()), [str(f) for f in found.values()]
    assert found["resume"].is_well is None  # a job of pieces has no dataset
    assert "bit by bit" in found["iteration 0"].text
    assert "bit by bit" in found["recovery"].text


@pytest.mark.parametrize(
    ("model", "what", "text"),
    [
        (PerObject, "accumulation", "loss: "),
        (Remembering, "recovery", "Remembering.seen, which a retry does not"),
        (Broken, "iteration 0", "KeyError: 'depth', in tests/doctor/test_examination.py"),
    ],
)
def test_what_is_wrong_is_named(images, model, what, text):
    finding = findings(model, images)[what]
    assert not finding.is_well
    assert text in finding.text
    assert "\n" not in str(finding)


def test_counts_that_losses_are_divided_by_are_named(images):
    found = findings(Counting, images)["accumulation"]
    assert found.is_well
    assert "counted over the window: " in found.text
    assert "doctor/test_examination.py:" in found.text


def test_a_counter_of_forwards_is_told(images):
    finding = findings(Ticking, images)["accumulation"]
    assert finding.is_well
    assert "Ticking.num counts forwards, not iterations" in finding.text


def test_a_loss_that_is_zero_is_not_called_exact(images):
    class Later(Model):
        def forward(self, batch):
            losses = super().forward(batch)
            return {**losses, "loss_later": 0 * losses["loss"]}

    text = findings(Later, images)["accumulation"].text
    assert "like one forward over all images: loss;" in text
    assert "not checked: loss_later (it is zero for these images)" in text


def test_a_stock_model_is_well():
    """Its heads take means over sampled proposals, for which images are nearly the weights."""
    job = Job.from_cfg(tiny_cfg("mask_rcnn", fpn=False), 1, num_instances=10)
    text = accumulates(Patient(job))
    assert "loss_rpn_cls, loss_rpn_loc" in text
    assert "not checked: loss_mask (0." in text


def test_a_model_that_needs_objects_is_tested_without_the_image_that_has_none(images):
    class NeedsObjects(Model):
        def forward(self, batch):
            return {"loss": torch.stack([self.of_one(d) for d in batch]).mean()}

        def of_one(self, d):
            return self.layer(d["image"].float() / 255).mean() * (1 + d["instances"].gt_classes[0])

    found = findings(NeedsObjects, images)["accumulation"]
    assert found.is_well


def test_batch_normalisation_that_is_trained_is_named(images):
    class Normalised(Model):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm2d(4)

        def forward(self, batch):
            brightness = [1.0 + len(d["instances"]) for d in batch]
            pixels = torch.stack([d["image"] / 255 * b for d, b in zip(batch, brightness)])
            return {"loss": self.norm(self.layer(pixels))[..., 0, 0].abs().mean()}

    found = findings(Normalised, images)["accumulation"]
    assert not found.is_well
    assert "loss: " in found.text


def test_the_command_prints_a_line_for_each_and_its_status_tells(tmp_path, monkeypatch, capsys):
    (tmp_path / "broken_project.py").write_text(
        "from detectron2.engine import DefaultTrainer\n"
        "class Trainer(DefaultTrainer):\n"
        "    @classmethod\n"
        "    def build_optimizer(cls, cfg, model):\n"
        "        raise ValueError('no such optimizer')\n"
    )
    (tmp_path / "tiny.yaml").write_text(tiny_cfg("proposal_network", fpn=False).dump())
    monkeypatch.chdir(tmp_path)
    config = ["--config-file", "tiny.yaml"]
    with pytest.raises(SystemExit) as e:
        main(["doctor", "--details", "--trainer", "broken_project:Trainer", *config])
    assert e.value.code == 3
    printed = capsys.readouterr().out
    assert re.match(
        r"Does not work: \d+ of \d+ checks passed, \d+ failed, \d+ could not run", printed
    )
    assert "ok  accumulation:" in printed
    assert "NO  recovery: the model of this job does not run (ValueError: no such opt" in printed
    assert "--  resume: not tested: the training dataset" in printed
