# Copyright (c) the d2_memfit developers.
"""What the doctor says of jobs that work, and of those that have something wrong."""

import itertools
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from tiny import tiny_cfg
from torch import nn

from d2_memfit import Job
from d2_memfit.cli.command_line import main
from d2_memfit.common.errors import DataError
from d2_memfit.doctor.examination import _found, accumulates, examine
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


class Later(Model):
    def forward(self, batch):
        losses = super().forward(batch)
        return {**losses, "loss_later": 0 * losses["loss"]}


class Broken(Model):
    def forward(self, batch):
        return {"loss": self.layer(batch[0]["depth"])}


@pytest.fixture(scope="module")
def images():
    return Job.from_cfg(tiny_cfg("faster_rcnn"), 1).training_batch(2)


def findings(model, images, optimizer=torch.optim.AdamW):
    job = Job(
        model=model,
        optimizer=lambda m: optimizer(m.parameters()),
        images_per_batch=2,
        device="cpu",
        batch=images,
    )
    return {f.what: f for f in examine(job)}


def test_a_finding_is_one_line_also_of_a_worker():
    lines = ["Caught DataError in DataLoader worker process 0.", "Original Traceback (most recent"]
    error = DataError("\n".join([*lines, f"{DataError.__module__}.DataError: the image x"]))
    assert _found(str, "resume", mock.Mock(side_effect=error)).text == "the image x"


def test_a_job_that_works(images):
    found = findings(Model, images)
    assert list(found) == ["iteration 0", "accumulation", "recovery", "resume"]
    assert not any(f.is_well is False for f in found.values()), [str(f) for f in found.values()]
    assert found["resume"].is_well is None  # a job of pieces has no dataset
    assert "bit by bit" in found["iteration 0"].text
    assert "bit by bit" in found["recovery"].text


@pytest.mark.parametrize(
    ("model", "what", "is_well"),
    [
        (PerObject, "accumulation", False),
        (Remembering, "recovery", False),
        (Broken, "iteration 0", False),
        (Counting, "accumulation", True),
        (Ticking, "accumulation", True),
        (Later, "accumulation", True),
    ],
)
def test_what_is_wrong_or_counted_or_not_checked_is_named(prose, images, model, what, is_well):
    finding = findings(model, images)[what]
    assert finding.is_well is is_well
    assert "\n" not in str(finding)
    prose(str(finding))


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
def test_numbers_that_no_module_has_are_known_by_their_effect(images, optimizer):
    numbers = itertools.count(1)

    class Global(Model):
        def forward(self, batch):
            return {"loss": super().forward(batch)["loss"] * next(numbers)}

    found = findings(Global, images, optimizer)
    assert all("differ from those" in found[what].text for what in ("iteration 0", "recovery"))


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


def test_the_command_prints_a_line_for_each_and_its_status_tells(
    prose, tmp_path, monkeypatch, capsys
):
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
    prose(capsys.readouterr().out)
