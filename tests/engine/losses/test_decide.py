# Copyright (c) the d2_memfit developers.
"""Counts are declared, and tested on the job's own images before they are used."""

from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from criteria import (
    CHANNELS,
    CLASSES,
    Detector,
    Detr,
    Fcos,
    annotated_images,
    get_world_size,
    is_initialized,
)
from detectron2.utils.events import EventStorage
from torch import nn
from torch.utils.checkpoint import checkpoint

from d2_memfit import AccumulatingTrainer, compat, window_count
from d2_memfit.engine.losses import EXACT, NOT_KNOWN, OTHER, schedule
from d2_memfit.engine.losses.sites import IN_FULL
from d2_memfit.errors import ConfigError
from d2_memfit.settings import NormalizerOptions, RecoveryOptions

pytestmark = pytest.mark.slow

WINDOWS = [(10, 3, 0, 5), (1, 0, 0, 0), (0, 4, 4, 4), (2, 2, 7, 2)]
WRONG = "of the gradient in micro-batches"


def windows_of(numbers=WINDOWS):
    return [annotated_images(of_window, seed) for seed, of_window in enumerate(numbers)]


def train(kind, windows, steps=1, trainer=AccumulatingTrainer, **options):
    """Train on windows of ``steps`` batches; return the gradient of each, and the trainer."""
    torch.manual_seed(0)
    model = kind().double()
    size = -(-len(windows[0]) // steps)
    loader = [w[i : i + size] for w in windows for i in range(0, len(w), size)]
    sgd = torch.optim.SGD(model.parameters(), lr=0.0)
    trainer = trainer(model, loader, sgd, steps, **options)
    gradients = []
    with EventStorage() as storage:
        for storage.iter in range(len(windows)):
            trainer.run_step()
            gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    return gradients, trainer


def worst(kind, numbers=WINDOWS, **options):
    """The largest relative distance of a window's gradient, one by one, from one forward's."""
    full, _ = train(kind, windows_of(numbers))
    cut, trainer = train(kind, windows_of(numbers), steps=len(numbers[0]), **options)
    return max(float((c - f).norm() / f.norm()) for c, f in zip(cut, full)), trainer


def reduced(count):
    """A count that is added up over ranks, as DETR does."""
    count = torch.tensor([float(count)])
    if is_initialized():
        dist.all_reduce(count)
    return torch.clamp(count / get_world_size(), min=1).item()


def objects_of(batch):
    return sum(len(image["instances"]) for image in batch)


class PerImageClasses(Detector):
    """Weighted cross entropies of each image, and boxes of the batch."""

    def __init__(self):
        super().__init__()
        self.classes = nn.Linear(CHANNELS, CLASSES)

    def forward(self, batch):
        features = self.features(batch).flatten(2).transpose(1, 2)
        weights = torch.tensor([1.0, 5.0, 0.3], dtype=features.dtype)
        losses = []
        for rows, image in zip(features, batch):
            labels = (torch.arange(len(rows)) < len(image["instances"])).long()
            losses.append(F.cross_entropy(self.classes(rows), labels, weights))
        boxes = features.abs().sum() / reduced(objects_of(batch))
        return {"loss_ce": torch.stack(losses).mean(), "loss_bbox": boxes}


class Contrastive(Detr):
    """As OneFormer: its contrastive loss gathers from all ranks, and raises without any."""

    def contrast(self, features):
        if is_initialized():
            gathered = [torch.zeros_like(features) for _ in range(get_world_size())]
            dist.all_gather(gathered, features.detach())
            raise RuntimeError("needs a process group")
        return features.mean((1, 2, 3)).mean()

    def forward(self, batch):
        contrast = self.contrast(self.features(batch))
        return {**super().forward(batch), "loss_contrastive": contrast}


class FiltersObjects(Detector):
    """Counts only objects of a class, which follows from no annotation count."""

    def forward(self, batch):
        kept = sum(int((image["instances"].gt_classes == 1).sum()) for image in batch)
        return {"loss": self.features(batch).abs().sum() / reduced(kept)}


class Later(Detr):
    """Has another loss from the third window on."""

    forwards = 0

    def forward(self, batch):
        losses = super().forward(batch)
        warm_up = 0.0 if get_iteration() < 2 else 1.0
        mask = self.features(batch).abs().sum() / reduced(objects_of(batch) + len(batch))
        return {**losses, "loss_mask": mask * warm_up}


def get_iteration():
    from detectron2.utils.events import get_event_storage

    return get_event_storage().iter


class MeanOverObjects(Detector):
    """Divided by a count that nobody is told."""

    def forward(self, batch):
        features = self.features(batch)
        return {
            "loss_mask": features.abs().sum() / max(objects_of(batch), 1),
            "loss": features.mean((1, 2, 3)).mean(),
        }


def forwards_of(kind, windows, trainer=AccumulatingTrainer, **options):
    """The number of forwards in each window."""
    counts = []

    def count(*_):
        counts[-1] += 1

    class Trainer(trainer):
        def run_step(self):
            counts.append(0)
            super().run_step()

    model = kind().double()
    model.register_forward_pre_hook(count)
    sgd = torch.optim.SGD(model.parameters(), lr=0.0)
    loader = [[image] for window in windows for image in window]
    trainer = Trainer(model, loader, sgd, len(windows[0]), **options)
    with EventStorage() as storage:
        for storage.iter in range(len(windows)):
            trainer.run_step()
    return counts


@pytest.mark.parametrize(("kind", "later"), [(MeanOverObjects, 4), (Detr, 4), (Fcos, 8)])
def test_the_test_is_made_once(kind, later):
    """FCOS counts positives, which only a forward can tell."""
    counts = forwards_of(kind, windows_of([(9, 3, 1, 5), (1, 8, 2, 6), (3, 7, 4, 9)]))
    assert counts[0] <= 60
    assert counts[1:] == [later, later]


@pytest.mark.parametrize("kind", [PerImageClasses, Contrastive, FiltersObjects])
def test_one_count_does_not_take_the_others_with_it(kind, log):
    distance, _ = worst(kind)
    assert distance < 2e-7
    assert WRONG not in log.text


def test_a_loss_that_is_new_is_tested_before_the_next_window(log):
    full, _ = train(Later, windows_of())
    cut, trainer = train(Later, windows_of(), steps=4)
    off = [float((c - f).norm() / f.norm()) for c, f in zip(cut, full)]
    assert max(off[:2]) < 2e-7
    assert off[3] < 2e-7
    assert trainer.loss_rules.rules.terms["loss_mask"].word == EXACT
    assert WRONG not in log.text


class Untrained(Detector):
    """Its class loss is the same for every object before it has learned, and nearly for others."""

    def __init__(self):
        super().__init__()
        self.classes = nn.Linear(CHANNELS, CLASSES)
        nn.init.zeros_(self.classes.weight)
        nn.init.zeros_(self.classes.bias)

    def forward(self, batch):
        features = self.features(batch).mean((2, 3))
        objects = [len(image["instances"]) for image in batch]
        logits = self.classes(features.repeat_interleave(torch.tensor(objects), 0))
        labels = torch.cat([image["instances"].gt_classes for image in batch])
        count = reduced(sum(objects))
        loss_cls = F.cross_entropy(logits, labels, reduction="sum") / count
        constant = sum(objects) / count
        return {"loss_cls": loss_cls, "loss_nearly": constant + 1e-3 * loss_cls}


def test_what_is_right_only_before_a_model_has_learned_is_not_taken(log):
    distance, _ = worst(Untrained, [(10, 3, 2, 5), (1, 0, 4, 2)])
    assert distance < 1e-12
    assert WRONG not in log.text


class UntrainedWeighted(Detector):
    """A weighted mean over all pixels, by a head that starts at zero."""

    def __init__(self):
        super().__init__()
        self.classes = nn.Conv2d(CHANNELS, CLASSES, 1)
        self.register_buffer("class_weights", torch.tensor([1.0, 5.0, 0.3]))
        nn.init.zeros_(self.classes.weight)
        nn.init.zeros_(self.classes.bias)

    def forward(self, batch):
        logits = self.classes(self.features(batch)).flatten(2)
        labels = torch.zeros(len(batch), logits.shape[2], dtype=torch.long)
        for own, image in zip(labels, batch):
            classes = image["instances"].gt_classes
            own[: len(classes)] = classes[: len(own)]
        return {"loss": self.mean(logits, labels)}

    def mean(self, logits, labels):
        return F.cross_entropy(logits, labels, self.class_weights.to(logits.dtype))


class UntrainedWeightedPerImage(UntrainedWeighted):
    def mean(self, logits, labels):
        ones = zip(logits.split(1), labels.split(1))
        return torch.stack([UntrainedWeighted.mean(self, *one) for one in ones]).mean()


@pytest.mark.parametrize("kind", [UntrainedWeighted, UntrainedWeightedPerImage])
def test_a_head_that_starts_at_zero_does_not_hide_weights_of_classes(kind):
    distance, _ = worst(kind)
    assert distance < 1e-7  # the weights are float32


class UntrainedWithIgnored(UntrainedWeighted):
    """Its mean is over some pixels. All losses are alike at first, and their gradients are not."""

    def mean(self, logits, labels):
        labels[:, -1] = 1
        return F.cross_entropy(logits, labels, ignore_index=0)


class LaterOverObjects(Detector):
    """Its mean over images becomes one over objects."""

    def forward(self, batch):
        sums = self.features(batch).mean((1, 2, 3))
        objects = torch.tensor([float(len(image["instances"])) for image in batch])
        is_late = get_iteration() >= 2
        over_objects = (sums * objects).sum() / objects.sum().clamp(min=1)
        return {"loss": over_objects if is_late else sums.mean()}


def test_a_head_that_starts_at_zero_hides_nothing(log):
    train(UntrainedWithIgnored, windows_of([(10, 3, 4, 5)]), steps=4)
    assert log.text.count(WRONG) == 1


def test_what_a_first_test_cannot_see_is_told_later(log, monkeypatch):
    numbers = [(10, 3, 4, 5), (1, 8, 2, 2), (6, 4, 4, 4), (2, 2, 7, 2)]
    train(LaterOverObjects, windows_of(numbers), steps=4)
    assert WRONG not in log.text
    monkeypatch.setattr(schedule, "_AGAIN_AT", (2, 3))
    train(LaterOverObjects, windows_of(numbers), steps=4)
    assert log.text.count(WRONG) == 1


def test_a_loss_that_is_not_right_is_named_once_with_its_distance(log):
    distance, _ = worst(MeanOverObjects)
    assert distance > 0.05
    [message] = [r.getMessage() for r in log.records if WRONG in r.getMessage()]
    assert message.startswith("loss_mask: other, ")
    assert 'MEMFIT.NORMALIZERS.LOSSES [["loss_mask", "objects"]]' in message


def test_the_remedies_in_that_message_help(log):
    class Asks(MeanOverObjects):
        def forward(self, batch):
            features = self.features(batch)
            count = window_count(objects_of(batch))
            return {"loss_mask": features.abs().sum() / count, "loss": features.mean()}

    told = NormalizerOptions(losses=[["loss_mask", "objects"]])
    assert worst(MeanOverObjects, normalizers=told)[0] < 1e-12
    assert worst(Asks)[0] < 1e-12
    assert WRONG not in log.text


class Metric(Detr):
    """As DETR, it has a figure for the log among its losses."""

    def forward(self, batch):
        error = torch.tensor(100.0 / max(objects_of(batch), 1))
        return {**super().forward(batch), "class_error": error}


def test_a_loss_without_gradient_is_not_named(log):
    distance, _ = worst(Metric)
    assert distance < 2e-7
    assert WRONG not in log.text


class Total(Detr):
    """Returns one loss, of which only a part is divided by the count."""

    def forward(self, batch):
        return sum(super().forward(batch).values())


def test_losses_that_are_added_up_cannot_be_told_apart(log):
    worst(Total)
    assert "total_loss: other, " in log.text


class Noisy(Detr):
    """Its boxes are moved by random numbers that no test can fix."""

    generator = np.random.default_rng(0)

    def forward(self, batch):
        losses = super().forward(batch)
        noise = 1 + 0.3 * self.generator.normal()
        return {**losses, "loss_bbox": losses["loss_bbox"] * float(noise)}


def test_noise_that_hides_a_distance_is_neither_right_nor_wrong(log):
    _, trainer = train(Noisy, windows_of([(10, 3, 0, 5)] * 2), steps=4)
    assert trainer.loss_rules.rules.terms["loss_bbox"].word == NOT_KNOWN
    assert "loss_bbox: not known (noise 0." in log.text


class NoisyOnEqualRows(Detr):
    """Its boxes are moved by random numbers that do not depend on the batch."""

    def forward(self, batch):
        losses = super().forward(batch)
        return {**losses, "loss_bbox": losses["loss_bbox"] * (0.5 + torch.rand(()))}


def test_random_numbers_that_can_be_fixed_hide_nothing(log):
    _, trainer = train(NoisyOnEqualRows, windows_of([(10, 3, 0, 5)] * 2), steps=4)
    assert trainer.loss_rules.rules.terms["loss_bbox"].word == EXACT
    assert WRONG not in log.text


def test_a_resumed_run_goes_on_with_the_rules(tmp_path):
    windows = windows_of([(10, 3, 0, 5), (2, 9, 1, 0), (4, 4, 8, 3)])
    _, whole = train(Detr, windows, steps=4)
    _, ended = train(Detr, windows[:1], steps=4)
    torch.save(ended.loss_rules.state_dict(), tmp_path / "state.pth")

    class Resumed(AccumulatingTrainer):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.loss_rules.load_state_dict(torch.load(tmp_path / "state.pth", weights_only=True))

    windows = windows[1:]
    counts = forwards_of(Detr, windows, trainer=Resumed)
    _, resumed = train(Detr, windows, steps=4, trainer=Resumed)
    assert counts == [4, 4]
    assert resumed.loss_rules.rules == whole.loss_rules.rules


class LogsASum(Detr):
    """Adds up a loss over ranks, for its log."""

    def forward(self, batch):
        losses = super().forward(batch)
        if is_initialized():
            dist.all_reduce(losses["loss_bbox"].detach().clone())
        return losses


def test_a_sum_that_no_loss_depends_on_costs_no_forward(log):
    windows = windows_of([(9, 3, 1, 5), (1, 8, 2, 6), (3, 7, 4, 9)])
    assert forwards_of(LogsASum, windows)[1:] == [4, 4]
    assert WRONG not in log.text


def test_nothing_stands_around_a_forward_whose_losses_are_means_over_images():
    functions = []

    class Means(Detector):
        def forward(self, batch):
            functions.append((torch._C._nn.cross_entropy_loss, dist.ProcessGroup.allreduce))
            return {"loss": self.features(batch).mean((1, 2, 3)).mean()}

    train(Means, windows_of(), steps=4)
    now = (torch._C._nn.cross_entropy_loss, dist.ProcessGroup.allreduce)
    assert functions[0] != now, "the test looks"
    assert functions[-12:] == [now] * 12


# Bad input


class DeclaresToo(MeanOverObjects):
    def forward(self, batch):
        features = self.features(batch)
        count = window_count(objects_of(batch))
        return {"loss_mask": features.abs().sum() / count, "loss": features.mean()}


class VectorLoss(Detector):
    def forward(self, batch):
        return {"loss": self.features(batch).abs().mean((1, 2, 3))}


class OneAtATime(Detector):
    def forward(self, batch):
        if len(batch) > 1:
            raise ValueError("one image at a time")
        return {"loss": self.features(batch).abs().mean()}


def steps_by_itself(model, batch):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = model(batch)["loss"]
    loss.backward()
    optimizer.step()
    return loss.detach()


OBJECTS = NormalizerOptions(losses=[["loss_mask", "objects"]])
BOTH = NormalizerOptions(losses=[["loss_mask", "objects"], ["loss_*", "sum"]])


@pytest.mark.parametrize(
    ("kind", "options", "text"),
    [
        (DeclaresToo, {"normalizers": OBJECTS}, r"loss_mask is divided by is declared twice, by"),
        (MeanOverObjects, {"normalizers": BOTH}, r"declared twice, by objects, sum\. Leave one"),
        (VectorLoss, {}, r"loss must be a tensor with one number, got \[3\]"),
        (MeanOverObjects, {"loss_fn": steps_by_itself}, r"steps by itself \(SGD.step\)"),
    ],
)
def test_losses_that_cannot_be_weighted_are_an_error_before_the_first_step(kind, options, text):
    windows = windows_of([(10, 3, 0, 5)])
    with pytest.raises(ConfigError, match=text) as error:
        train(kind, windows, steps=4, **options)
    assert "\n" not in str(error.value)


def test_a_model_that_takes_one_image_at_a_time_is_not_known(log):
    train(OneAtATime, windows_of([(10, 3, 0, 5)]), steps=4)
    [line] = [r.getMessage() for r in log.records if r.levelname == "WARNING"]
    assert line.startswith("not known: what losses are divided by could not be tested (ValueError")


def test_a_sum_over_images_is_declared_by_a_key(log):
    class Sum(Detector):
        def forward(self, batch):
            return {"loss_sum": self.features(batch).abs().mean((1, 2, 3)).sum()}

    assert worst(Sum)[0] > 0.5
    assert 'Set MEMFIT.NORMALIZERS.LOSSES [["loss_sum", "sum"]]' in log.text
    told = NormalizerOptions(losses=[["loss_sum", "sum"]])
    assert worst(Sum, normalizers=told)[0] < 1e-12


def test_a_pattern_that_matches_no_loss_is_an_error_with_the_names():
    told = NormalizerOptions(losses=[["loss_masks", "objects"]])
    with pytest.raises(ConfigError, match=r"no loss matches 'loss_masks'.* loss_ce, loss_bbox"):
        train(Detr, windows_of(), steps=4, normalizers=told)


class AsksInVain(MeanOverObjects):
    def forward(self, batch):
        window_count(objects_of(batch))
        return super().forward(batch)


def test_a_window_count_that_never_sees_its_loss_is_an_error():
    with pytest.raises(ConfigError, match=r"window_count in .*test_decide.py:\d+: no loss depends"):
        train(AsksInVain, windows_of(), steps=4)


class NeedsObjects(Detr):
    def forward(self, batch):
        if not objects_of(batch):
            raise ValueError("there is nothing to match")
        return super().forward(batch)


def test_a_criterion_that_needs_objects_keeps_its_counts(log):
    distance, _ = worst(NeedsObjects, [(3, 1, 2, 5), (4, 4, 1, 7)])
    assert distance < 2e-7
    assert "could not be tested" not in log.text


class NeedsTwo(Detr):
    least = 2

    def forward(self, batch):
        if len(batch) < self.least:
            raise ValueError("one image has no other to be compared with")
        return super().forward(batch)


class NeedsFive(NeedsTwo):
    least = 5


def test_a_criterion_that_needs_two_images_is_tested_with_pairs(log):
    numbers = [(10, 3, 0, 5), (1, 8, 0, 0), (2, 2, 7, 2)]
    full, _ = train(NeedsTwo, windows_of(numbers))
    cut, _ = train(NeedsTwo, windows_of(numbers), steps=2)
    assert max(float((c - f).norm() / f.norm()) for c, f in zip(cut, full)) < 2e-7
    assert WRONG not in log.text


def test_a_criterion_that_cannot_be_tested_keeps_image_weights_and_one_line_says_so(log):
    train(NeedsFive, windows_of([(10, 3, 0, 5, 1) * 2]), steps=2)
    messages = [r.getMessage() for r in log.records if "could not be tested" in r.getMessage()]
    assert len(messages) == 1
    assert "ValueError: one image has no other to be compared with in losses/" in messages[0]


class Thirsty(Detr):
    """Has no memory for three images at once."""

    def forward(self, batch):
        if len(batch) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory. injected")
        return super().forward(batch)


def test_out_of_memory_in_the_test_is_survived():
    full, _ = train(Detr, windows_of())
    cut, _ = train(Thirsty, windows_of(), steps=4)
    assert max(float((c - f).norm() / f.norm()) for c, f in zip(cut, full)) < 2e-7


class FailsLater(Detr):
    """Cannot work with a second rank, but that shows only in the second window."""

    def forward(self, batch):
        if get_iteration() == 1 and get_world_size() > 1:
            raise RuntimeError("told of a rank that is not there")
        return super().forward(batch)


def test_an_error_of_what_a_model_is_told_does_not_end_the_run():
    _, trainer = train(FailsLater, windows_of()[:3], steps=4)
    assert "loss_bbox" not in trainer.loss_rules.rules.weights


class Fails(Detr):
    """Has an error of its own in the second window, which has no object."""

    def forward(self, batch):
        if get_iteration() == 1:
            raise ValueError("its own")
        return super().forward(batch)


def test_an_error_of_the_models_own_ends_the_run():
    with pytest.raises(ValueError, match="its own"):
        train(Fails, windows_of([(10, 3, 0, 5), (0, 0, 0, 0)]), steps=4)


class NewLossWithoutMemory(Detr):
    """Has a loss more in the second window, and no memory to test it."""

    def forward(self, batch):
        is_first = get_iteration() == 0
        if not is_first and len(batch) > 1:
            raise torch.OutOfMemoryError("CUDA out of memory. injected")
        losses = super().forward(batch)
        return {**losses, "loss_more": losses["loss_ce"] * (0.0 if is_first else 0.5)}


def test_a_test_without_memory_leaves_what_is_known():
    windows = windows_of([(10, 3, 0, 5), (1, 0, 2, 0)])
    full, _ = train(Detr, windows)
    cut, trainer = train(NewLossWithoutMemory, windows, steps=4)
    assert "loss_bbox" in trainer.loss_rules.rules.weights
    assert float((cut[0] - full[0]).norm() / full[0].norm()) < 2e-7


class NormOverImages(Detector):
    """Trained batch normalisation of one vector per image, which refuses a single image."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(CHANNELS)

    def forward(self, batch):
        return {"loss": self.norm(self.features(batch).mean((2, 3))).relu().pow(3).mean()}


class NormOverThree(NormOverImages):
    def forward(self, batch):
        if self.norm.training and len(batch) < 3:
            raise ValueError("needs three images")
        return super().forward(batch)


@pytest.mark.parametrize(("kind", "word"), [(NormOverImages, OTHER), (NormOverThree, NOT_KNOWN)])
def test_batch_normalisation_that_needs_several_images_is_not_called_exact(kind, word, log):
    size = 2 if kind is NormOverImages else 3
    windows = windows_of([(10, 3, 4, 5, 2, 1)])
    full, _ = train(kind, windows)
    cut, trainer = train(kind, windows, steps=6 // size)
    assert float((cut[0] - full[0]).norm() / full[0].norm()) > 0.1
    assert trainer.loss_rules.rules.terms["loss"].word == word
    assert "atch normalisation" in log.text


class DetrWithNorm(Detr):
    """With batch normalisation that is trained, whose statistics are of a micro-batch."""

    def __init__(self):
        super().__init__()
        self.backbone.insert(1, nn.BatchNorm2d(CHANNELS))
        self.attention.dropout = 0.1


def test_batch_normalisation_does_not_hide_what_losses_are_divided_by(log):
    _, trainer = train(DetrWithNorm, windows_of([(10, 3, 0, 5)]), steps=4)
    assert "loss_bbox" in trainer.loss_rules.rules.weights
    assert "batch normalisation takes the statistics of a micro-batch" in log.text
    assert "depends on" not in log.text
    assert "dropout" not in log.text


class CountsPredictions(Detector):
    """What it counts depends on the statistics of a micro-batch, as it does in YOLOF."""

    def __init__(self):
        super().__init__()
        self.backbone.insert(1, nn.BatchNorm2d(CHANNELS))

    def forward(self, batch):
        scores = self.features(batch).sigmoid()
        number = (scores > 0.55).sum().float()
        if dist.is_initialized():
            dist.all_reduce(number)
            number = number / dist.get_world_size()
        return {"loss_found": scores.pow(2).sum() / number.clamp(min=1)}


def test_counts_that_depend_on_batch_normalisation_are_counts():
    _, trainer = train(CountsPredictions, windows_of([(10, 3, 0, 5)]), steps=4)
    assert trainer.loss_rules.rules.counts
    assert trainer.loss_rules.rules.terms["loss_found"].word == OTHER


class AlternatesDatasets(Detr):
    """Each loss is of one of two datasets, which take turns."""

    def forward(self, batch):
        losses = super().forward(batch)
        zero = "loss_bbox" if get_iteration() % 4 > 1 else "loss_other"
        losses["loss_other"] = 0.3 * losses["loss_bbox"]
        return {**losses, zero: losses[zero] * 0}


def test_losses_that_take_turns_keep_their_counts():
    numbers = [(10, 3, 0, 5), (1, 8, 2, 6), (3, 7, 0, 9), (1, 3, 7, 2), (9, 4, 1, 0)]
    full, _ = train(AlternatesDatasets, windows_of(numbers))
    cut, trainer = train(AlternatesDatasets, windows_of(numbers), steps=4)
    off = [float((c - f).norm() / f.norm()) for c, f in zip(cut, full)]
    new = 2  # a loss is tested after the window in which it appears
    assert max(off[:new] + off[new + 1 :]) < 2e-7
    assert trainer.loss_rules.rules.weights.keys() == {"loss_bbox", "loss_other"}


class KeepsMemory(Detector):
    """Has a large tensor that is no buffer, and that each forward changes."""

    def __init__(self):
        super().__init__()
        self.memory = torch.zeros(300_000)

    def forward(self, batch):
        self.memory += 1
        return {"loss": self.features(batch).mean((1, 2, 3)).mean()}


class OddImages(Detector):
    """Its dataset dicts are not Detectron2's."""

    def forward(self, batch):
        return {"loss": self.features(batch).mean((1, 2, 3)).mean()}


def test_the_test_leaves_no_change_of_a_large_tensor():
    _, trainer = train(KeepsMemory, windows_of([(3, 1, 2, 4)]), steps=4)
    assert trainer.model.memory[0] == 4


@pytest.mark.parametrize("policy", ["off", "window"])
def test_dicts_that_cannot_be_resized_are_trained(policy, log):
    images = [
        {"image": torch.rand(3, 300, 300) * 255, "instances": {"boxes": torch.rand(2, 4)}}
        for _ in range(4)
    ]
    train(OddImages, [images], steps=4, normalizers=NormalizerOptions(policy))
    assert ("could not be tested" in log.text) == (policy == "window")


def test_a_resumed_run_with_other_options_is_tested_again():
    class Sum(Detector):
        def forward(self, batch):
            return {"loss_sum": self.features(batch).abs().mean((1, 2, 3)).sum()}

    windows = windows_of([(10, 3, 0, 5)])
    state = train(Sum, windows, steps=4)[1].loss_rules.state_dict()

    class Resumed(AccumulatingTrainer):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.loss_rules.load_state_dict(state)

    told = NormalizerOptions(losses=[["loss_sum", "sum"]])
    _, trainer = train(Sum, windows, steps=4, trainer=Resumed, normalizers=told)
    assert trainer.loss_rules.rules.weights == {"loss_sum": IN_FULL}
    wrong = NormalizerOptions(losses=[["loss_sums", "sum"]])
    with pytest.raises(ConfigError, match="no loss matches 'loss_sums'"):
        train(Sum, windows, steps=4, trainer=Resumed, normalizers=wrong)


class CountsForwards(Detr):
    """A function that asks for ranks fails from the second iteration on."""

    def __init__(self):
        super().__init__()
        self.register_buffer("forwards", torch.zeros(()))

    def forward(self, batch):
        self.forwards += 1
        return {**super().forward(batch), "loss_more": self.more(batch)}

    def more(self, batch):
        if get_iteration() > 0 and get_world_size() > 1:
            raise RuntimeError("told of a rank that is not there")
        return self.features(batch).mean((1, 2, 3)).mean()


def test_a_forward_that_is_told_the_truth_counts_once():
    windows = windows_of([(10, 3, 0, 5), (1, 2, 2, 6)])
    _, trainer = train(CountsForwards, windows, steps=4)
    assert trainer.model.forwards == 8


def test_windows_that_begin_without_objects_are_tested_when_there_are_some(log):
    distance, trainer = worst(Detr, [(0, 0, 0, 0), (0, 0, 0, 0), (10, 3, 0, 5), (1, 0, 2, 4)])
    assert distance < 2e-7
    assert "loss_bbox" in trainer.loss_rules.rules.weights


class MeanOverLabels(Detector):
    """A mean over pixels with a label; an image may have none."""

    def __init__(self):
        super().__init__()
        self.classes = nn.Conv2d(CHANNELS, CLASSES, 1)

    def forward(self, batch):
        logits = self.classes(self.features(batch))
        labels = torch.full((len(batch), *logits.shape[-2:]), 255)
        for own, image in zip(labels, batch):
            own[: len(image["instances"])] = 1
        return {"loss_sem_seg": F.cross_entropy(logits, labels, ignore_index=255)}


class Compiled(MeanOverObjects):
    """Its backward runs once."""

    def __init__(self):
        super().__init__()
        self.backbone = torch.compile(self.backbone, backend="aot_eager")


class Recomputed(MeanOverObjects):
    def features(self, batch):
        images = torch.stack([image["image"] for image in batch]).double().requires_grad_()
        return checkpoint(self.backbone, images, use_reentrant=True)


@pytest.mark.parametrize("kind", [Compiled, Recomputed])
def test_each_loss_has_its_own_word_however_the_backward_is_made(kind):
    _, trainer = train(kind, windows_of([(10, 3, 0, 5)]), steps=4)
    words = {name: term.word for name, term in trainer.loss_rules.rules.terms.items()}
    assert words == {"loss_mask": OTHER, "loss": EXACT}


class NeedsMultiples(MeanOverObjects):
    """Takes images of some sizes only, if they are alone."""

    def features(self, batch):
        sides = [side for image in batch for side in image["image"].shape[1:]]
        if max(sides) % 8:
            raise ValueError("the size must be a multiple of 8")
        least = min(sides)
        return super().features([{"image": i["image"][:, :least, :least]} for i in batch])


def test_a_size_that_a_model_does_not_take_hides_no_word():
    images = annotated_images([10, 3, 0, 5], size=40)  # the test's other size is 28
    _, trainer = train(NeedsMultiples, [images], steps=4)
    words = {name: term.word for name, term in trainer.loss_rules.rules.terms.items()}
    assert words == {"loss_mask": OTHER, "loss": EXACT}


class HidesALoss(MeanOverObjects):
    """One loss has a gradient so large that another one hides in the gradient of both."""

    def forward(self, batch):
        losses = super().forward(batch)
        return {"loss_mask": losses["loss_mask"], "loss": losses["loss"] * 1e12}


def test_a_small_loss_is_not_hidden_by_a_large_one():
    _, trainer = train(HidesALoss, windows_of([(10, 3, 0, 5)]), steps=4)
    words = {name: term.word for name, term in trainer.loss_rules.rules.terms.items()}
    assert words == {"loss_mask": OTHER, "loss": EXACT}


class RootOfObjects(Detector):
    """Its gradient is NaN for an image without objects, and its value is not."""

    def forward(self, batch):
        features = self.features(batch).mean((1, 2, 3))
        objects = torch.tensor([float(len(image["instances"])) for image in batch])
        roots = (features * objects).square().sqrt()
        return {"loss_root": roots.mean(), "loss": features.square().mean()}


def test_a_gradient_that_is_not_finite_is_named_and_hides_no_other(log):
    _, trainer = train(RootOfObjects, windows_of([(3, 1, 2, 4)]), steps=4)
    terms = trainer.loss_rules.rules.terms
    assert {name: term.word for name, term in terms.items()} == {"loss_root": OTHER, "loss": EXACT}
    assert "loss_root: other, not finite in micro-batches: its gradient is infinite" in log.text


def test_a_loss_that_needs_labels_is_named_before_it_ends_the_run(log):
    with pytest.raises(FloatingPointError, match="Likely a micro-batch without labels, for which"):
        train(MeanOverLabels, windows_of([(3, 1, 2, 4), (3, 1, 0, 4)]), steps=4)
    assert "loss_sem_seg: not finite for an image without labels" in log.text


class Padded(Detector):
    """A mean over padded maps, of features that see far into the padding, as in a deep model."""

    def __init__(self):
        super().__init__()
        self.backbone = nn.Conv2d(3, CHANNELS, 3, 4, 1)
        self.deep = nn.Conv2d(CHANNELS, CHANNELS, 7, padding=3)

    def forward(self, batch):
        images = [image["image"] for image in batch]
        height, width = (max(image.shape[d] for image in images) for d in (1, 2))
        pads = [(0, width - i.shape[2], 0, height - i.shape[1]) for i in images]
        padded = torch.stack([F.pad(i, pad) for i, pad in zip(images, pads)]).double()
        maps = (self.deep(F.gelu(self.backbone(padded))) - 0.5).abs()
        return {"loss_depth": self.loss(maps, batch)}

    def loss(self, maps, batch):
        return maps.mean()


class OverObjects(Padded):
    """A sum over objects, each of which has a cell of its image, divided by their number."""

    def loss(self, maps, batch):
        objects = [len(image["instances"]) for image in batch]
        total = sum(own[:, 2, :number].sum() for own, number in zip(maps, objects))
        return total / window_count(sum(objects))


class OneOverObjects(OverObjects):
    """Each image has the same value, such as of boxes that are all empty, but needs objects."""

    def loss(self, maps, batch):
        if not all(len(image["instances"]) for image in batch):
            raise IndexError("an image without objects")
        return super().loss(maps - maps.detach() + 1, batch)


class SumWithPadding(Padded):
    def loss(self, maps, batch):
        return maps.sum() / len(batch)


@pytest.mark.parametrize(
    ("kind", "word"),
    [(Padded, NOT_KNOWN), (OverObjects, EXACT), (OneOverObjects, EXACT), (SumWithPadding, OTHER)],
)
def test_features_that_see_the_padding_are_not_taken_for_a_mean_over_it(kind, word):
    window = [*annotated_images([3], size=32), *annotated_images([2], size=20)]
    full, _ = train(kind, [window])
    cut, trainer = train(kind, [window], steps=2)
    assert (cut[0] - full[0]).norm() > 0.05 * full[0].norm()
    assert trainer.loss_rules.rules.terms["loss_depth"].word == word


# Ranks


def make_on_ranks(rank, num_ranks, kind, windows, recovery):
    torch.manual_seed(0)
    model = compat.create_ddp_model(kind().double(), broadcast_buffers=False)
    sgd = torch.optim.SGD(model.parameters(), lr=0.0)
    parts = [w[rank * len(w) // num_ranks : (rank + 1) * len(w) // num_ranks] for w in windows]
    loader = [[image] for part in parts for image in part]
    return AccumulatingTrainer(model, loader, sgd, len(parts[0]), recovery=recovery)


def on_ranks(rank, num_ranks, kind, windows, recovery):
    trainer = make_on_ranks(rank, num_ranks, kind, windows, recovery)
    gradients = []
    with EventStorage() as storage:
        for storage.iter in range(len(windows)):
            trainer.run_step()
            parameters = trainer.model.parameters()
            gradients.append(torch.cat([p.grad.flatten() for p in parameters]))
    return gradients, dict(trainer.loss_rules.rules.weights)


class RaisesOnOneRank(Detr):
    """Its test fails on the second rank."""

    def forward(self, batch):
        if not torch.is_grad_enabled() and is_initialized() and dist.get_rank() == 1:
            raise ValueError("only here")
        return super().forward(batch)


def state_of_ranks(rank, num_ranks, kind, windows):
    trainer = make_on_ranks(rank, num_ranks, kind, windows, None)
    with EventStorage():
        trainer.run_step()
    return trainer.loss_rules.state_dict()


def test_a_run_of_two_ranks_is_resumed_on_one(two_ranks):
    windows = windows_of([(4, 3, 0, 0), (1, 0, 0, 2)])
    state, _ = two_ranks.run(state_of_ranks, 2, Detr, windows)

    class Resumed(AccumulatingTrainer):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.loss_rules.load_state_dict(state)

    full, _ = train(Detr, windows)
    cut, _ = train(Detr, windows, steps=4, trainer=Resumed)
    assert max(float((c - f).norm() / f.norm()) for c, f in zip(cut, full)) < 2e-7


def test_counts_that_depend_on_batch_normalisation_are_counts_on_two_ranks(two_ranks):
    windows = windows_of([(10, 3, 4, 5), (1, 2, 6, 3)])
    first, second = two_ranks.run(state_of_ranks, 2, CountsPredictions, windows)
    assert first == second
    assert first["rules"]["counts"]


class LaterOnOneRank(Later):
    def forward(self, batch):
        losses = super().forward(batch)
        return {**losses, "loss_mask": losses["loss_mask"] * dist.get_rank()}


def test_a_loss_that_is_new_on_one_rank_is_tested_on_all(two_ranks):
    windows = windows_of([(4, 3, 1, 5), (1, 2, 4, 2), (3, 4, 2, 4), (3, 4, 2, 4)])
    (_, weights), (_, others) = two_ranks.run(on_ranks, 2, LaterOnOneRank, windows, None)
    assert weights == others
    assert weights["loss_mask"] == IN_FULL


@pytest.mark.parametrize("recovery", [None, RecoveryOptions()])
@pytest.mark.parametrize("kind", [Detr, PerImageClasses, RaisesOnOneRank])
def test_ranks_decide_the_same(kind, recovery, two_ranks):
    """Also if one has no object in the first window, or its test fails."""
    windows = windows_of([(4, 3, 0, 0), (1, 0, 0, 2), (0, 4, 4, 4)])
    full, _ = train(kind, windows)
    (first, weights), (second, others) = two_ranks.run(on_ranks, 2, kind, windows, recovery)
    assert weights == others
    for one, other, whole in zip(first, second, full):
        assert torch.equal(one, other)
        assert float((one - whole).norm() / whole.norm()) < 2e-7


def on_ranks_tested_again(rank, num_ranks, windows):
    """Train; after the second window go on with another trainer, as a resumed run does."""
    trainers = [
        make_on_ranks(rank, num_ranks, LaterOverObjects, part, RecoveryOptions())
        for part in (windows[:2], windows[2:])
    ]
    with mock.patch.object(schedule, "_AGAIN_AT", (2, 3)), EventStorage() as storage:
        for storage.iter in range(len(windows)):
            trainer = trainers[storage.iter // 2]
            if storage.iter == 2:
                trainer.loss_rules.load_state_dict(trainers[0].loss_rules.state_dict())
            trainer.run_step()
    words = [{k: t.word for k, t in x.loss_rules.rules.terms.items()} for x in trainers]
    return words, trainer.loss_rules.state_dict()


def test_ranks_and_a_resumed_run_test_again_together(two_ranks):
    windows = windows_of([(10, 3, 4, 5), (0, 8, 1000, 2), (6, 4, 0, 4), (2, 2, 7, 2)])
    one, other = two_ranks.run(on_ranks_tested_again, 2, windows)
    assert one == other
    (before, after), _ = one
    assert before == {"loss": EXACT}
    assert after == {"loss": OTHER}
