# Copyright (c) the d2_memfit developers.
"""A job whose step is not ``model(batch)``: a student with a teacher, in two forwards."""

import copy

import pytest
import torch
from detectron2.modeling import build_model
from detectron2.structures import Boxes, Instances
from detectron2.utils.events import get_event_storage
from tiny import (
    every_anchor_counts,
    image,
    parameters,
    peak_of,
    relative_difference,
    tiny_cfg,
    tiny_model,
)
from torch import nn

from d2_memfit import Job
from d2_memfit.doctor.examination import accumulates, recovers, same_as_detectron2
from d2_memfit.doctor.patient import Patient
from d2_memfit.engine.build import build_trainer
from d2_memfit.planner.steps import Session

NUM_IMAGES, MAX_ITER = 4, 9
ITERATIONS = []  # in which the losses were computed


class StudentAndTeacher(nn.Module):
    """The teacher is a part of the model, so estimates and budgets count it."""

    def __init__(self, student):
        super().__init__()
        self.student, self.teacher = student, copy.deepcopy(student).requires_grad_(False)

    def train(self, mode=True):
        super().train(mode)
        self.teacher.eval()
        return self

    def forward(self, images, by="student"):
        return getattr(self, by)(images)


def semi_supervised(model, batch):
    ITERATIONS.append(get_event_storage().iter)
    labelled, unlabelled = batch
    losses = dict(model(labelled))
    with torch.no_grad():
        found = [output["proposals"] for output in model(unlabelled, by="teacher")]
    images = [{**i, "instances": pseudo_labels(f)} for i, f in zip(unlabelled, found)]
    losses.update({f"{name}_pseudo": 4 * loss for name, loss in model(images).items()})
    return losses


def pseudo_labels(proposals):
    boxes = Boxes(proposals.proposal_boxes.tensor[:3].round())
    boxes = boxes[boxes.nonempty()]
    classes = torch.zeros(len(boxes), dtype=torch.int64)
    return Instances(proposals.image_size, gt_boxes=boxes, gt_classes=classes)


def columns(num=NUM_IMAGES, size=64):
    unlabelled = [image(100 + i, size) for i in range(num)]
    for without in unlabelled:
        del without["instances"]
    return [image(i, size) for i in range(num)], unlabelled


def job_of(cfg, batch, **kwargs):
    return Job(
        model=lambda: StudentAndTeacher(build_model(cfg)),
        optimizer=lambda m: torch.optim.SGD(m.student.parameters(), lr=0.01, momentum=0.9),
        train_loader=lambda: [batch] * 2,
        images_per_batch=len(batch[0]),
        device="cpu",
        batch=batch,
        max_iter=MAX_ITER,
        loss_fn=semi_supervised,
        **kwargs,
    )


def test_its_estimate_has_the_bytes_of_a_computed_step(computing):
    job = job_of(tiny_cfg("proposal_network"), columns(2, size=160))
    dry = Session(job).train(job.training_batch(2))
    computing()
    computed = Session(job).train(job.training_batch(2))
    peak, expected = peak_of(dry), peak_of(computed)
    print(f"{peak:,} bytes estimated, {expected:,} computed")
    assert peak == pytest.approx(expected, rel=0.005)
    assert ITERATIONS[-2:] == [MAX_ITER - 1] * 2, "a burn-in is over"


def small_cfg():
    return every_anchor_counts(tiny_cfg("proposal_network", fpn=False))


def trained(**kwargs):
    torch.manual_seed(0)
    trainer = build_trainer(job_of(small_cfg(), columns(), **kwargs))
    trainer.train(0, 2)
    return parameters(trainer.model)


def test_micro_batches_have_the_gradients_of_the_full_batch():
    full, cut = trained(), trained(micro_batch_size=1)
    start = parameters(StudentAndTeacher(tiny_model(small_cfg())))
    moved = relative_difference(full, start)
    print(f"{relative_difference(cut, full) / moved:.0e} of the way from the full batch")
    assert relative_difference(cut, full) < 1e-5 * moved


def test_an_injected_error_leaves_no_trace():
    patient = Patient(job_of(small_cfg(), columns(2)))
    assert "bit by bit" in same_as_detectron2(patient)
    assert "bit by bit" in recovers(patient)


def test_the_doctor_tests_its_losses_row_by_row():
    patient = Patient(job_of(small_cfg(), columns(2)))
    text = accumulates(patient)
    assert "like one forward over all images: " in text
    assert "loss_rpn_cls_pseudo" in text
