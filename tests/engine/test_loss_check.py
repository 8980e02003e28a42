# Copyright (c) the d2_memfit developers.
"""The check of losses: each is like one forward over all images, or named by a warning."""

import copy
import logging
import re

import pytest
import torch
import torch.nn.functional as F
from criteria import ClassMeans, Detector, annotated_images
from detectron2.utils.events import EventStorage
from tiny import images, parameters, tiny_cfg, tiny_model
from torch import nn

from d2_memfit import AccumulatingTrainer
from d2_memfit.common.compat import create_ddp_model
from d2_memfit.config.settings import NormalizerOptions
from d2_memfit.engine.loss_check import check_losses
from d2_memfit.job import losses_of
from d2_memfit.techniques.registry import apply_techniques
from tests.engine.criteria_list import CRITERIA, WINDOWS, Sum, own_count

LIMIT = 1e-3


def gradient_of(model):
    return torch.cat(
        [torch.zeros(p.numel()) if p.grad is None else p.grad.flatten() for p in model.parameters()]
    )


def distances(criterion):
    """Relative distance of the gradient of some windows from that of one forward over them."""
    torch.manual_seed(0)
    model = criterion.kind().double().train()
    trained = [p for p in model.parameters() if p.requires_grad]
    caught = []

    def catch(parameters):
        caught.append(gradient_of(model))
        nn.utils.clip_grad_norm_(parameters, 1.0)

    trainer = AccumulatingTrainer(
        model,
        WINDOWS,
        torch.optim.SGD(trained, lr=0.01),
        micro_batch_size=1,
        normalizers=NormalizerOptions(**criterion.options),
        clip_gradients=catch,
    )
    found = []
    with EventStorage() as storage:
        for storage.iter in range(3):
            twin = copy.deepcopy(model)
            twin.zero_grad(set_to_none=True)
            sum(twin(copy.deepcopy(WINDOWS[storage.iter])).values()).backward()
            full = gradient_of(twin)
            try:
                trainer.run_step()
            except FloatingPointError:
                return [float("inf")]
            found.append(float((caught[-1] - full).norm() / full.norm()))
    return found


def warnings_of(log):
    return [r.getMessage() for r in log.records if r.levelno >= logging.WARNING]


@pytest.mark.parametrize("name", CRITERIA)
def test_what_is_wrong_is_named_and_what_is_right_is_not(name, log):
    criterion = CRITERIA[name]
    is_right = max(distances(criterion)) <= LIMIT or criterion.is_random
    lines = warnings_of(log)
    if is_right:
        assert not lines
        return
    words = "|".join(["loss_(?!image)", *criterion.names])
    assert any(re.search(words, line) for line in lines), log.text
    assert not any("loss_image" in line for line in lines)


def test_the_check_is_announced_and_bounded(log):
    distances(CRITERIA["ClassCountsOverRanks"])
    text = log.text
    assert text.count("Checking how the losses add up: about") == 1
    assert text.index("Checking how") < text.index("Losses of micro-batches, checked in")
    assert int(re.search(r"checked in (\d+) forwards", text)[1]) <= 24


@pytest.mark.parametrize("family", ["mask_rcnn", "keypoint_rcnn", "retinanet"])
def test_a_stock_model_gets_no_warning(family, log):
    """Its heads sample, take means over what was sampled, or keep a running mean."""
    model = tiny_model(tiny_cfg(family))
    sgd = torch.optim.SGD(model.parameters(), lr=0.0)
    with EventStorage():
        AccumulatingTrainer(model, [images(4)], sgd, micro_batch_size=1).run_step()
    assert "Losses of micro-batches, checked in" in log.text
    assert not warnings_of(log)


class Compiled(ClassMeans):
    cross_entropy = staticmethod(torch.compile(F.cross_entropy, backend="eager"))

    def forward(self, batch):
        right = self.features(batch).square().mean()
        return {**super().forward(batch), "loss_right": right}


def report_of(model, batch=None, losses=losses_of, **options):
    with EventStorage():
        batch = batch or annotated_images((10, 3, 0, 5))
        return check_losses(model, losses, batch, NormalizerOptions(**options))


@pytest.mark.parametrize("is_checkpointed", [False, True])
def test_means_of_heads_are_exact_with_policy_exact(is_checkpointed):
    cfg = tiny_cfg("mask_rcnn")
    cfg.MEMFIT.CHECKPOINT.MODULES = ["roi_heads.mask_head"] * is_checkpointed
    model = apply_techniques("model", tiny_model(cfg), cfg)
    for policy, unchecked in (("window", {"loss_mask"}), ("exact", set())):
        report = report_of(model, images(4), policy=policy)
        assert {*report.unchecked} == unchecked
        assert not report.off


def test_where_compiled_code_runs_nothing_is_called_exact_also_the_second_time():
    """Its weighted cross-entropy cannot be answered."""
    for _ in range(2):
        report = report_of(Compiled().double())
        assert "loss_cls" in {*report.off, *report.unchecked}
        assert "loss_right" in report.unchecked


class Noisy(Detector):
    """One draw for the whole batch."""

    def forward(self, batch):
        features = self.features(batch).mean((1, 2, 3))
        noise = torch.empty(len(batch), dtype=features.dtype).log_normal_()
        return {"loss": (features.square() * noise / noise.sum()).sum()}


def test_what_draws_at_random_is_never_called_exact():
    report = report_of(Noisy().double())
    assert "loss" in {*report.off, *report.unchecked}


class Sensitive(Detector):
    """What is rounded otherwise for another number of images is multiplied, as heads in turn do."""

    def forward(self, batch):
        features = self.features(batch).flatten(1) * (1 + 1e-7 * len(batch))
        return {"loss": (1e5 * features).sin().mean()}


def test_what_rounding_may_make_is_not_off():
    torch.manual_seed(0)
    report = report_of(Sensitive().double())
    assert "loss" in report.unchecked
    assert not report.off


def test_a_difference_that_does_not_come_twice_is_not_off():
    for jumps, off in (({8}, []), ({8, 12}, ["loss"])):  # in the first part of each pass
        calls = iter(range(1, 99))
        loss = lambda model, batch: model.features(batch).square().mean()  # noqa: E731
        losses = lambda *args: {"loss": loss(*args) * (1 + (next(calls) in jumps))}  # noqa: B023, E731
        assert [*report_of(Detector().double(), losses=losses).off] == off


class FastRCNNOutputLayers(nn.Linear):
    """A project's, as in few-shot-object-detection: Detectron2's has a method for its losses."""


class SemSegFPNHead(nn.Linear):
    """A project's, whose method returns more than its losses."""

    def losses(self, features, targets):
        return {"loss": self(features).square().mean()}, features


class Namesake(Detector):
    def __init__(self):
        super().__init__()
        self.classes, self.pixels = FastRCNNOutputLayers(8, 3), SemSegFPNHead(3, 3)

    def forward(self, batch):
        return self.pixels.losses(self.classes(self.features(batch).mean((2, 3))), batch)[0]


def test_a_class_with_the_name_of_a_known_one_is_checked_too():
    report = report_of(Namesake().double())
    assert report.names == ["loss"]
    assert not report.off


def train_namesake(rank):
    """Weights after two iterations: of one run, and of one that is resumed after the first."""
    found = []
    for ends in ((2,), (1, 2)):
        torch.manual_seed(0)
        model, start, saved = create_ddp_model(Namesake().double()), 0, {}
        for end in ends:
            windows = [annotated_images((3, 1, 2), 2 * i + rank) for i in range(start, end)]
            sgd = torch.optim.SGD(model.parameters(), lr=0.1)
            summed = NormalizerOptions(losses=[["loss", "sum"]])
            trainer = AccumulatingTrainer(
                model, windows, sgd, micro_batch_size=2, normalizers=summed
            )
            if start:
                trainer.load_state_dict(saved)
            trainer.train(start, end)
            start, saved = end, trainer.state_dict()
        found.append(parameters(model))
    return found


def test_a_class_with_the_name_of_a_known_one_is_trained_on_ranks_and_in_resumed_runs(two_ranks):
    for straight, resumed in (train_namesake(0), *two_ranks.run(train_namesake)):
        assert all(torch.equal(resumed[name], weight) for name, weight in straight.items())


class Drifting(Detector):
    def __init__(self):
        super().__init__()
        self.teacher = nn.Linear(8, 8)
        self.teacher.requires_grad_(False)
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("steps", torch.zeros(1))
        self.forwards = 0

    def forward(self, batch):
        features = self.features(batch).mean((2, 3))
        with torch.no_grad():
            self.teacher.weight.add_(1)
            self.mean.copy_(features.mean(0))
        self.forwards += 1
        self.steps += 1
        return {"loss": features.square().mean()}


def test_what_a_forward_changes_is_named_and_put_back():
    model = Drifting().double()
    before = copy.deepcopy(model.state_dict())
    numbers = torch.get_rng_state()
    report = report_of(model)
    counters = {"Drifting.forwards", "Drifting.steps"}
    assert {*report.changed} == {"teacher.weight", "Drifting.mean", *counters}
    assert {line.split()[0] for line in report.complaints()} == counters
    assert not report.off
    assert model.forwards == 0
    assert torch.equal(torch.get_rng_state(), numbers)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


class Student(Sum):
    def losses(self, batch):
        off = [self.boxes(rows) - self.teacher(rows).detach() for rows in self.rows(batch)]
        return {"loss_bbox": torch.cat(off).square().sum() / self.divisor(batch)}


def test_a_teacher_that_starts_as_its_student_hides_nothing():
    model = Student(own_count).double()
    model.teacher = copy.deepcopy(model.boxes)
    assert [*report_of(model, WINDOWS[0]).off] == ["loss_bbox"]


class Fails(Detector):
    def forward(self, batch):
        raise ValueError("no such field")


def test_a_model_that_cannot_be_checked_is_named():
    report = report_of(Fails())
    assert "ValueError: no such field" in report.complaints()[0]


def test_without_counts_all_are_checked_by_images():
    assert "loss_bbox" in report_of(CRITERIA["WindowCount"].kind(), WINDOWS[0], policy="off").off
