# Copyright (c) the d2_memfit developers.
"""A student that learns from a teacher's pseudo labels, as in unbiased-teacher, with accumulation.

https://github.com/facebookresearch/unbiased-teacher: batches of four lists, labelled and unlabelled
images in two augmentations; burn-in without the teacher; then its boxes are the unlabelled images'
labels, and its weights follow the student's.
"""

import copy
import inspect
import json

import pytest
import torch
from detectron2.engine import HookBase
from detectron2.structures import Boxes, Instances
from detectron2.utils.events import get_event_storage
from injection import InjectedTrainer, Injector
from tiny import (
    every_anchor_counts,
    image,
    parameters,
    relative_difference,
    tiny_cfg,
    tiny_model,
)

from d2_memfit import AccumulatingTrainer
from d2_memfit.config.settings import RecoveryOptions

pytestmark = pytest.mark.slow

BURN_IN, KEEP_RATE, UNSUPERVISED_WEIGHT = 2, 0.5, 4.0
NUM_IMAGES, MAX_ITER = 4, 5


class SemiSupervised:
    """All that a project has to write."""

    def __init__(self, teacher):
        self.teacher = teacher.eval()

    def __call__(self, student, batch):
        label_strong, label_weak, unlabel_strong, unlabel_weak = batch
        losses = dict(student(label_strong + label_weak))
        if get_event_storage().iter >= BURN_IN:
            pseudo_labels = boxes_of(self.teacher, unlabel_weak)
            images = [{**i, "instances": p} for i, p in zip(unlabel_strong, pseudo_labels)]
            for name, loss in student(images).items():
                losses[f"{name}_pseudo"] = UNSUPERVISED_WEIGHT * loss
        return losses


class UpdateTeacher(HookBase):
    """Once per iteration, whatever the number of micro-batches."""

    def __init__(self, teacher):
        self.teacher = teacher
        self.num_updates = 0

    @torch.no_grad()
    def before_step(self):
        if self.trainer.iter >= BURN_IN:
            keep_rate = KEEP_RATE if self.trainer.iter > BURN_IN else 0.0
            for p, new in zip(self.teacher.parameters(), self.trainer.model.parameters()):
                p.copy_(keep_rate * p + (1 - keep_rate) * new)
            self.num_updates += 1


@torch.no_grad()
def boxes_of(teacher, images):
    """The teacher's best boxes of each image, as instances of its only class."""
    instances = []
    for proposals in (output["proposals"] for output in teacher(images)):
        boxes = Boxes(proposals.proposal_boxes.tensor[:3].round())  # far from rounding errors
        kept = boxes.nonempty()
        classes = torch.zeros(int(kept.sum()), dtype=torch.int64)
        instances.append(Instances(proposals.image_size, gt_boxes=boxes[kept], gt_classes=classes))
    return instances


def batch_of(first, num):
    """Labelled images, and unlabelled ones without their instances, in two augmentations."""

    def augmented(index, is_strong):
        made = image(index)
        pixels = made["image"] // 2 if is_strong else made["image"]
        return {**made, "image": pixels}

    labelled, unlabelled = range(first, first + num), range(1000 + first, 1000 + first + num)
    columns = [[augmented(i, strong) for i in labelled] for strong in (True, False)]
    for strong in (True, False):
        images = [augmented(i, strong) for i in unlabelled]
        columns.append([{k: v for k, v in i.items() if k != "instances"} for i in images])
    return tuple(columns)


def new_model():
    return tiny_model(every_anchor_counts(tiny_cfg("proposal_network", fpn=False)))


def trained(cut=NUM_IMAGES, kind=AccumulatingTrainer, **kwargs):
    """A trainer and its teacher's updates, after the run."""
    student = new_model()
    teacher = copy.deepcopy(student)
    loader = (
        batch_of(NUM_IMAGES * i + j, cut)
        for i in range(MAX_ITER)
        for j in range(0, NUM_IMAGES, cut)
    )
    optimizer = torch.optim.SGD(student.parameters(), lr=0.01, momentum=0.9)
    loss_fn = SemiSupervised(teacher)
    trainer = kind(student, loader, optimizer, NUM_IMAGES // cut, loss_fn=loss_fn, **kwargs)
    update = UpdateTeacher(teacher)
    trainer.register_hooks([update])
    trainer.train(0, MAX_ITER)
    return trainer, update


def moved(trained):
    """How far the parameters are from where they began."""
    return relative_difference(trained, parameters(new_model()))


@pytest.fixture(scope="module")
def full():
    return trained()


def test_it_takes_a_few_lines():
    assert len(inspect.getsource(SemiSupervised.__call__).splitlines()) <= 15


@pytest.mark.parametrize(
    ("cut", "options"),
    [(1, {}), (2, {}), (4, {"micro_batch_size": 3}), (2, {"micro_batch_size": 4})],
)
def test_accumulation_computes_what_the_full_batch_computes(full, cut, options):
    trainer, update = trained(cut, **options)
    expected = parameters(full[0].model)
    assert relative_difference(parameters(trainer.model), expected) < 1e-5 * moved(expected)
    assert relative_difference(parameters(update.teacher), parameters(full[1].teacher)) < 1e-6
    assert update.num_updates == MAX_ITER - BURN_IN
    for name in ("loss_rpn_cls", "loss_rpn_cls_pseudo", "loss_rpn_loc_pseudo"):
        histories = [t.storage.history(name).values() for t in (trainer, full[0])]
        iterations = [[i for _, i in history] for history in histories]
        assert (
            iterations[0]
            == iterations[1]
            == list(range(BURN_IN if "pseudo" in name else 0, MAX_ITER))
        )
        actual, wanted = ([v for v, _ in history] for history in histories)
        assert actual == pytest.approx(wanted, rel=1e-4)
    assert trainer.storage.latest()["effective_batch"][0] == NUM_IMAGES


def test_the_pseudo_labels_matter(full, monkeypatch):
    monkeypatch.setitem(globals(), "UNSUPERVISED_WEIGHT", 0.0)
    without, _ = trained()
    assert relative_difference(parameters(without.model), parameters(full[0].model)) > 1e-4


class FailingInBoth(InjectedTrainer):
    """Runs out of memory in the forward of one iteration and in the backward of another."""

    def run_step(self):
        self.injector = Injector({1: [400], 3: [1350]}.get(get_event_storage().iter, []))
        super().run_step()


def test_recovery_from_running_out_of_memory_leaves_no_trace(full, tmp_path):
    options = RecoveryOptions(output_dir=str(tmp_path))
    trainer, update = trained(kind=FailingInBoth, recovery=options)
    events = [json.loads(line) for line in (tmp_path / "memfit_oom.jsonl").open()]
    assert [(e["iteration"], e["phase"]) for e in events] == [(1, "forward"), (3, "backward")]
    assert trainer.storage.latest()["memfit/micro_batch"][0] < NUM_IMAGES
    expected = parameters(full[0].model)
    assert relative_difference(parameters(trainer.model), expected) < 1e-5 * moved(expected)
    assert update.num_updates == MAX_ITER - BURN_IN
