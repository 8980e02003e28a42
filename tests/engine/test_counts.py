# Copyright (c) the d2_memfit developers.
"""Gradients of a window against one forward over the same images, where losses are divided by
counts of their batch.
"""

import logging
from functools import partial

import pytest
import torch
import torch.distributed as dist
from criteria import ClassMeans, Detector, Detr, Fcos, annotated_images, get_world_size
from detectron2.utils.events import EventStorage, get_event_storage
from tiny import images, tiny_cfg, tiny_model
from torch import nn
from torch.utils.checkpoint import checkpoint

from d2_memfit import AccumulatingTrainer, window_count
from d2_memfit.common import compat
from d2_memfit.common.errors import ConfigError, OutOfMemoryError
from d2_memfit.config.settings import NormalizerOptions, RecoveryOptions

WINDOWS = [(10, 3, 0, 5), (1, 0, 0, 0), (0, 4, 4, 4), (2, 2, 7, 2)]  # objects in each image
NORMALIZERS = {policy: NormalizerOptions(policy) for policy in ("window", "exact", "off")}


class Counted(Detector):
    """A criterion of one's own that asks for its count."""

    def __init__(self):
        super().__init__()
        self.scores = nn.Conv2d(8, 1, 1)

    def forward(self, batch):
        scores = self.scores(self.features(batch))
        num_boxes = window_count(sum(len(image["instances"]) for image in batch))
        return {"loss": scores.abs().sum() / num_boxes + scores.sigmoid().mean((1, 2, 3)).mean()}


def gradients(kind, windows, forwards=None, **options):
    """Gradients and losses of some iterations that change nothing."""
    torch.manual_seed(0)
    model = compat.create_ddp_model(kind().double(), broadcast_buffers=False)
    if forwards is not None:
        model.register_forward_hook(lambda *_: forwards.append(1))
    sgd = torch.optim.SGD(model.parameters(), lr=0.0)
    loader = [batch for window in windows for batch in window]
    trainer = AccumulatingTrainer(model, loader, sgd, **options)
    results, losses = [], []
    with EventStorage() as storage:
        for storage.iter in range(len(windows)):
            trainer.run_step()
            own = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
            results.append(torch.cat([gradient.flatten() for gradient in own]))
            losses.append({k: v for k, (v, _) in storage.latest().items() if "loss" in k})
    return results, losses


def images_of(windows=WINDOWS):
    return [annotated_images(numbers, seed) for seed, numbers in enumerate(windows)]


def differences(ones, others):
    return [float((a - b).norm() / b.norm()) for a, b in zip(ones, others)]


CUTS = {
    "4 x 1": (lambda images: [[image] for image in images], {"accumulation_steps": 4}),
    "2 x 2": (lambda images: [images[:2], images[2:]], {"accumulation_steps": 2}),
    "3 + 1": (lambda images: [images], {"micro_batch_size": 3}),
}


def cut_gradients(kind, images=None, cut="4 x 1", **more):
    """Those of windows that are cut into micro-batches."""
    divide, options = CUTS[cut]
    return gradients(kind, list(map(divide, images or images_of())), **options, **more)


def assert_cut_as_full(kind, full_kind=None, images=None, limit=2e-7, **options):
    """Windows have the gradients of one forward over their images."""
    images = images or images_of()
    full, full_losses = gradients(full_kind or kind, [[window] for window in images])
    actual, losses = cut_gradients(kind, images, **options)
    assert max(differences(actual, full)) < limit
    for one, other in zip(losses, full_losses):
        assert one == pytest.approx(other, rel=1e-5)
    return full


@pytest.mark.parametrize("kind", [Detr, Fcos, Counted, ClassMeans])
@pytest.mark.parametrize("cut", CUTS)
def test_a_window_has_the_gradient_and_the_losses_of_one_forward(kind, cut):
    full = assert_cut_as_full(kind, cut=cut)
    off, _ = cut_gradients(kind, cut=cut, normalizers=NORMALIZERS["off"])
    assert max(differences(off, full)) > 0.01


def test_a_pattern_that_matches_no_loss_is_an_error():
    wrong = NormalizerOptions(losses=[["loss_maks", "objects"]])
    with pytest.raises(ConfigError, match=r"no loss matches 'loss_maks'.*loss_ce, loss_bbox"):
        cut_gradients(Detr, normalizers=wrong)


@pytest.mark.parametrize(("kind", "per_window"), [(Detr, 4), (Counted, 4), (Fcos, 8)])
def test_only_counts_that_no_rule_tells_cost_a_forward(kind, per_window):
    images, forwards = images_of([(9, 3, 1, 5), (1, 8, 2, 6), (3, 7, 4, 9), (2, 1, 7, 2)]), []
    cut_gradients(kind, images, forwards=forwards)
    first = len(forwards)
    cut_gradients(kind, [*images, images[-1]], forwards=forwards)
    assert len(forwards) - 2 * first == per_window


class LaterCount(Detector):
    """Its count is that of the objects at first. Later a crowded image counts once more."""

    def forward(self, batch):
        is_late = get_event_storage().iter >= 2
        numbers = [len(image["instances"]) for image in batch]
        count = window_count(sum(n + (is_late and n > 3) for n in numbers))
        sums = self.features(batch).flatten(1).abs().sum(1)
        return {"loss": sum(n * s for n, s in zip(numbers, sums)) / count}


def test_a_count_that_no_longer_follows_from_the_annotations_is_counted(log):
    """From the next window on. A warning says that this one was divided by another count."""
    windows = images_of([(7, 3, 5, 2), (1, 0, 7), (4, 4, 0, 5), (2, 6, 9), (0, 3, 8)])
    full, cut = (
        gradients(LaterCount, [[window] for window in windows], **options)[0]
        for options in ({}, {"micro_batch_size": 1})
    )
    off = differences(cut, full)
    assert max(off[:2] + off[3:]) < 1e-5
    assert off[2] > 1e-3
    assert log.text.count("no longer follows from annotations") == 1


def test_retinanet_is_divided_by_a_running_mean_of_windows():
    cfg = tiny_cfg("retinanet", fpn=False)
    batch = images(4)
    results, normalizers = [], []
    for options in ({}, {"micro_batch_size": 1}, {"micro_batch_size": 3}):
        model = tiny_model(cfg).double()
        sgd = torch.optim.SGD(model.parameters(), lr=0.0)
        trainer = AccumulatingTrainer(model, [batch] * 3, sgd, **options)
        with EventStorage() as storage:
            for storage.iter in range(3):
                trainer.run_step()
        results.append(
            torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        )
        normalizers.append(model.loss_normalizer)
    assert normalizers[1:] == pytest.approx([normalizers[0]] * 2, rel=1e-6)
    assert max(differences(results[1:], [results[0]] * 2)) < 0.1
    plain = AccumulatingTrainer(model, [batch], sgd, micro_batch_size=1)  # once more
    with EventStorage():
        plain.run_step()


def on_ranks(rank, kind, parts, policy, options):
    """Gradients of this rank's images; ``parts`` are all ranks' batches of each iteration."""
    windows = [iteration[rank] for iteration in parts]
    return gradients(kind, windows, normalizers=NORMALIZERS[policy], **options)[0]


@pytest.mark.parametrize("kind", [Detr, Fcos, Counted, ClassMeans])
@pytest.mark.parametrize(("ranks", "recovery"), [("two_ranks", None), ("three_ranks", True)])
def test_ranks_with_different_cuts_have_the_gradient_of_one_forward(ranks, kind, recovery, request):
    ranks = request.getfixturevalue(ranks)
    images = [annotated_images((10, 3, 0, 5, 1, 7, 2), seed) for seed in range(3)]
    cuts = [[0, 2, 4], [4, 5, 7]] if ranks.num_ranks == 2 else [[0, 1, 2], [2, 4, 5], [5, 6, 7]]
    parts = [[[w[a:b], w[b:c]] for a, b, c in cuts] for w in images]
    full, _ = gradients(kind, [[window] for window in images])
    options = {"accumulation_steps": 2, "recovery": recovery and RecoveryOptions()}
    for actual in ranks.run(on_ranks, kind, parts, "window", options):
        assert max(differences(actual, full)) < 2e-7


def test_a_mean_is_that_of_each_rank_if_no_batches_are_accumulated(two_ranks):
    """As in Detectron2."""
    images = [annotated_images((10, 3, 0, 5, 1, 7, 2), seed) for seed in range(2)]
    parts = [[[w[:3]], [w[3:]]] for w in images]
    options = {"recovery": RecoveryOptions()}
    plain = two_ranks.run(on_ranks, ClassMeans, parts, "off", options)
    outcomes = two_ranks.run(on_ranks, ClassMeans, parts, "window", options)
    for actual, expected in zip(outcomes, plain):
        assert max(differences(actual, expected)) < 2e-7


def without_memory(rank, place):
    """The outcome of a window in which a rank has no memory for a snapshot of the model."""

    def run_out(*args):
        raise torch.OutOfMemoryError("CUDA out of memory")

    parts = [[[w[:4]], [w[4:]]] for w in [annotated_images((10, 3, 0, 5, 1, 7, 2))]]
    with pytest.MonkeyPatch.context() as patch:
        if rank == 0:  # which checks, because it has the most objects
            patch.setattr(f"d2_memfit.engine.{place}.Snapshot", run_out)
        try:
            return on_ranks(rank, Fcos, parts, "window", {"recovery": RecoveryOptions()})
        except OutOfMemoryError as e:
            return str(e)


def test_ranks_hear_of_one_that_has_no_memory_to_check_or_to_count(two_ranks):
    checked, other = two_ranks.run(without_memory, "loss_check")
    assert max(differences(checked, other)) < 1e-12
    counted, other = two_ranks.run(without_memory, "counts")
    assert counted == other
    assert "CUDA out of memory" in counted


COLLECTIVES = {
    "all_reduce": lambda mean: dist.all_reduce(mean.detach().repeat(32)),
    "all_gather": lambda _: dist.all_gather([torch.zeros(1), torch.zeros(1)], torch.ones(1)),
    "broadcast": lambda _: dist.broadcast(torch.ones(1), 0),
    "SyncBatchNorm": torch.distributed.nn.all_reduce,  # which itself needs GPUs
}


class Communicates(Detr):
    """With a collective of its own in each forward, as a normalisation over all ranks has one."""

    def __init__(self, name):
        super().__init__()
        self.name = name

    def forward(self, batch):
        losses = super().forward(batch)
        if get_world_size() > 1:
            result = COLLECTIVES[self.name](self.features(batch).mean())
            if self.name == "SyncBatchNorm":
                losses["loss_bbox"] = losses["loss_bbox"] + 0 * result
        return losses


def expected_error(*arguments):
    with pytest.raises(ConfigError) as error:
        on_ranks(*arguments)
    return str(error.value)


@pytest.mark.parametrize("policy", ["window", "off"])
@pytest.mark.parametrize("name", COLLECTIVES)
def test_split_with_a_model_that_communicates_is_an_error_on_all_ranks(name, policy, two_ranks):
    parts = [[[annotated_images((2, 3))]] * 2]
    kind, options = partial(Communicates, name), {"recovery": RecoveryOptions()}
    errors = two_ranks.run(expected_error, kind, parts, policy, options)
    assert errors[0] == errors[1]
    assert " in engine/test_counts.py:" in errors[0]
    assert "MEMFIT.OOM.POLICY raise" in errors[0]


def with_warnings(*arguments):
    with pytest.MonkeyPatch.context() as patch:
        logs = []
        logger = logging.getLogger("d2_memfit.engine.counts")
        patch.setattr(logger, "warning", lambda text, *args: logs.append(text % args))
        return on_ranks(*arguments), logs


def test_equal_cuts_of_a_model_that_communicates_are_trained(two_ranks):
    images = annotated_images((10, 3, 0, 5))
    parts = [[[images[:1], images[1:2]], [images[2:3], images[3:]]]]
    full, _ = gradients(Detr, [[images]])
    kind, options = partial(Communicates, "all_reduce"), {"accumulation_steps": 2}
    for actual, (log,) in two_ranks.run(with_warnings, kind, parts, "window", options):
        assert max(differences(actual, full)) < 2e-7
        assert "all_reduce in engine/test_counts.py:" in log


class SetCriterionDynamicK(nn.Module):
    """The part of DiffusionDet's that divides."""

    def get_loss(self, loss, outputs, targets, indices, num_boxes, **kwargs):
        matched = torch.cat([outputs[i][queries] for i, (queries, _) in enumerate(indices)])
        return {loss: matched.abs().sum() / max(len(matched), 1)}


class Matches(Detector):
    def __init__(self):
        super().__init__()
        self.criterion = SetCriterionDynamicK()

    def forward(self, batch):
        outputs = self.features(batch).flatten(1)
        indices = [
            (torch.arange(n), torch.arange(n)) for n in (2 * len(x["instances"]) + 1 for x in batch)
        ]
        return self.criterion.get_loss("loss", outputs, batch, indices, 1, log=False)


def test_a_known_criterion_is_divided_by_the_count_of_the_window():
    assert_cut_as_full(Matches, limit=1e-12)


class Checkpointed(Detector):
    """Its criterion is computed again in the backward, and limits its count in place."""

    def forward(self, batch):
        scores = self.features(batch).flatten(1).abs()
        return {"loss": checkpoint(self.criterion, scores, batch, use_reentrant=False)}

    def criterion(self, scores, batch):
        count = torch.tensor([float(sum(len(x["instances"]) for x in batch))])
        if dist.is_initialized():
            dist.all_reduce(count)
            count /= dist.get_world_size()
        count.clamp_(min=1)
        return scores.square().sum() / count[0]


@pytest.mark.parametrize("fails", [1, 4, 9, 13])
def test_an_error_while_counts_are_taken_changes_nothing(fails):
    """One forward after another of the first window, of which some are only for its counts."""
    forwards = []

    class Fails(Detr):
        def forward(self, batch):
            forwards.append(1)
            if len(forwards) == fails:
                raise torch.OutOfMemoryError("CUDA out of memory. injected")
            return super().forward(batch)

    assert_cut_as_full(Fails, Detr, recovery=RecoveryOptions())


def test_forwards_that_only_count_leave_no_trace():
    class Steps(ClassMeans):
        steps, seen = 0, []

        def forward(self, batch):
            self.steps += 1
            self.seen.append(self.steps)
            return super().forward(batch)

    cut_gradients(Steps, images_of()[:2])
    assert Steps.seen[-4:] == [5, 6, 7, 8]


def test_a_criterion_that_is_computed_again_in_the_backward_has_the_same_counts():
    assert_cut_as_full(Checkpointed, images=images_of([(10, 3, 0, 5), (4, 2, 0, 5)]))


def test_a_resumed_run_does_not_check_again(log):
    windows = images_of()
    divide, options = CUTS["4 x 1"]

    class Resumed(AccumulatingTrainer):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            if state:
                self.counts.load_state_dict(state)

    torch.manual_seed(0)
    state = {}
    for policy, checks in (("window", 1), ("window", 1), ("exact", 2)):
        model = Fcos().double()
        loader = [batch for window in map(divide, windows) for batch in window]
        sgd = torch.optim.SGD(model.parameters(), lr=0.0)
        trainer = Resumed(model, loader, sgd, normalizers=NORMALIZERS[policy], **options)
        with EventStorage():
            trainer.run_step()
        state = trainer.counts.state_dict()
        assert log.text.count("Checking how the losses add up") == checks


def count_on_rank(rank, counts, is_tensor):
    own = torch.tensor(counts[rank]) if is_tensor else counts[rank]
    return float(window_count(own, minimum=2.0)), float(own)


@pytest.mark.parametrize("is_tensor", [False, True])
def test_a_count_is_the_mean_over_ranks_and_not_below_the_minimum(two_ranks, is_tensor):
    assert two_ranks.run(count_on_rank, (1, 5), is_tensor) == [(3.0, 1.0), (3.0, 5.0)]
    assert two_ranks.run(count_on_rank, (1, 2), is_tensor) == [(2.0, 1.0), (2.0, 2.0)]
    assert [count_on_rank(0, (n,), is_tensor)[0] for n in (0, 7)] == [2.0, 7.0]


def test_nothing_stays_replaced():
    """A forward replaces methods of ProcessGroup and criteria, a function and a property."""
    owners = (dist.ProcessGroup, type(dist.GroupMember), torch._C._nn, SetCriterionDynamicK)
    before = [dict(vars(owner)) for owner in owners]
    cut_gradients(Matches)
    cut_gradients(Detr)
    assert [dict(vars(owner)) for owner in owners] == before
