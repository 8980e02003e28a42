# Copyright (c) the d2_memfit developers.
"""Windows cut by predicted bytes: the cuts, their gradients, ranks, and what fails nevertheless."""

import random

import numpy as np
import pytest
import torch
import torch.distributed as dist
from criteria import Detector, Detr, Fcos, annotated_images, get_world_size
from injection import FailingTrainer, InjectedTrainer, iterate
from lazy_configs import lazy_config
from tiny import tiny_cfg, tiny_model
from torch import nn

from d2_memfit import AccumulatingTrainer, Job, compat, window_count
from d2_memfit.engine.window import ByteCutter, Window, count_objects
from d2_memfit.errors import ConfigError
from d2_memfit.iteration import CostModel, MicroBatchShape, Padding
from d2_memfit.settings import NormalizerOptions, RecoveryOptions, Settings, check_settings

# 100 bytes, one for each pixel, and ten for each object.
SUMS = ((100.0, 0.0, 1.0, 10.0, 0.0, 0.0),)


def image(height, width, objects=0):
    instances = [0] * objects
    return {"image": torch.zeros(3, height, width, dtype=torch.uint8), "instances": instances}


def cutter(limit_bytes, overhead_pixels=0.0, sums=SUMS, grow_after=2):
    return ByteCutter(CostModel(sums, limit_bytes, overhead_pixels), nn.Identity(), grow_after)


def shapes(parts):
    return [[(*x["image"].shape[1:], len(x["instances"])) for x in part] for part in parts]


def test_a_crowded_image_goes_alone_and_ordinary_ones_together():
    ordinary, crowded = image(10, 10, 2), image(10, 10, 60)
    parts = cutter(600, overhead_pixels=10).micro_batches([ordinary, crowded, ordinary, ordinary])
    assert shapes(parts) == [[(10, 10, 60)], [(10, 10, 2)] * 3]


def test_similar_sizes_go_together_so_that_less_is_padded():
    sizes = [(10, 20), (20, 10), (11, 20), (20, 11)]
    parts = cutter(10**6, overhead_pixels=30).micro_batches([image(*size) for size in sizes])
    assert sorted(sorted(part) for part in shapes(parts)) == [
        [(10, 20, 0), (11, 20, 0)],
        [(20, 10, 0), (20, 11, 0)],
    ]
    parts = cutter(10**6, overhead_pixels=10**4).micro_batches([image(*size) for size in sizes])
    assert len(parts) == 1  # padding costs less than another micro-batch


def test_each_image_is_in_one_micro_batch_that_fits_or_alone():
    numbers = random.Random(0)
    for _ in range(100):
        images = [
            image(numbers.randint(1, 20), numbers.randint(1, 20), numbers.randint(0, 40))
            for _ in range(numbers.randint(1, 9))
        ]
        cut = cutter(limit_bytes := numbers.randint(150, 1500), numbers.randint(0, 100))
        parts = cut.micro_batches(images)
        assert sorted(id(x) for part in parts for x in part) == sorted(map(id, images))
        for part in parts:
            pixels = max(x["image"].shape[1] for x in part) * max(x["image"].shape[2] for x in part)
            needs = 100 + len(part) * pixels + 10 * sum(len(x["instances"]) for x in part)
            assert len(part) == 1 or needs <= limit_bytes


def test_the_largest_of_the_sums_counts():
    sums = ((100.0, 0, 1.0, 0, 0, 0), (0.0, 0, 0, 0, 0, 2.0))  # the other is of the most crowded
    pair = MicroBatchShape.from_images(np.array([(10, 10, 3), (5, 20, 1)]))
    assert pair == MicroBatchShape(2, 10, 20, 4, 3)
    assert CostModel(sums, 0).bytes_of(pair, Padding()) == max(100 + 400, 2 * 200 * 3)


def test_padding_is_that_of_the_model():
    assert Padding.from_model(tiny_model(tiny_cfg())).pixels(33, 64) == 64 * 64
    assert Padding.from_model(nn.Linear(1, 1)).pixels(33, 64) == 33 * 64
    square = nn.Module()
    square.padding_constraints = {"size_divisibility": 16, "square_size": 1024}
    assert Padding.from_model(square).pixels(33, 64) == 1024**2


def test_where_nothing_fits_each_image_goes_alone_and_a_warning_says_so(log):
    cut = cutter(50)
    assert "so each image goes through the model alone" in log.text
    assert [len(part) for part in cut.micro_batches([image(5, 5)] * 3)] == [1, 1, 1]


def test_data_whose_size_is_not_known_is_an_error():
    with pytest.raises(ConfigError, match="needs images whose size is known"):
        cutter(500).micro_batches([{"instances": []}])
    with pytest.raises(ConfigError, match="Tensor"):
        Window(iter([torch.zeros(2, 3, 4, 4)]), 1).cut(cutter(500).micro_batches)


def test_columns_are_cut_too():
    targets = [{"boxes": torch.zeros(n, 4)} for n in (1, 50, 2)]
    window = Window(iter([(torch.zeros(3, 3, 10, 10), targets)]), 1)
    window.cut(cutter(600, overhead_pixels=10).micro_batches)
    assert [count_objects(window.take().batch) for _ in range(2)] == [50, 3]


# Gradients

CUT = CostModel(((100.0, 0, 1.0, 300.0, 0, 0),), 5600)  # of images of 32 x 32
NUMBERS = [(10, 3, 0, 5), (1, 0, 0, 14), (0, 4, 4, 4), (2, 2, 7, 2)]


class Counted(Detector):
    """Objects that are counted over the window, and the images' means."""

    def forward(self, batch):
        scores = self.features(batch)
        num_boxes = window_count(sum(len(image["instances"]) for image in batch))
        return {"loss": scores.abs().sum() / num_boxes + scores.sigmoid().mean((1, 2, 3)).mean()}


class Means(Detector):
    def forward(self, batch):
        return {"loss": self.features(batch).square().mean()}


class Synchronised(Detr):
    """With a normalisation over all ranks."""

    def forward(self, batch):
        if get_world_size() > 1:
            dist.all_reduce(self.features(batch).mean((2, 3)).mean(0).detach().repeat(4))
        return super().forward(batch)


def train(trainer, num_iterations):
    """Gradients of iterations that change nothing."""
    results = []
    for i in range(num_iterations):
        iterate(trainer, first=i)
        results.append(torch.cat([p.grad.flatten() for p in trainer.model.parameters()]))
    return results


def gradients(kind, windows, dtype=torch.float64, **options):
    torch.manual_seed(0)
    model = kind().to(dtype)
    sgd = torch.optim.SGD(model.parameters(), lr=0.0)
    loader = [batch for window in windows for batch in window]
    return train(AccumulatingTrainer(model, loader, sgd, **options), len(windows))


def differences(ones, others):
    return [float((a - b).norm() / b.norm()) for a, b in zip(ones, others)]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", [Detr, Fcos, Counted])
def test_the_gradient_is_that_of_one_forward_in_any_order_of_the_images(kind, dtype, log):
    windows = [annotated_images(numbers, seed) for seed, numbers in enumerate(NUMBERS)]
    full = gradients(kind, [[window] for window in windows], dtype)
    shuffled = [[window[2:], window[1::-1]] for window in windows]
    for cut, steps in (([[window] for window in windows], 1), (shuffled, 2)):
        options = {"accumulation_steps": steps, "cost_model": CUT}
        actual = gradients(kind, cut, dtype, **options)
        off = differences(actual, full)
        if kind is Detr:  # has 12 queries, so 14 objects no longer tell its count
            assert log.text.count("no longer follows from the annotations") == 1
            assert off.pop(1) > 1e-3
            log.clear()
        assert max(off) < (2e-7 if dtype == torch.float64 else 1e-5)


def test_windows_are_cut_and_metrics_are_of_all_images():
    trainer = InjectedTrainer(*small(annotated_images((10, 3, 0, 5))), cost_model=CUT)
    storage = iterate(trainer)
    assert trainer.window_sizes == (3, 1)  # three are the larger micro-batch
    assert storage.latest()["effective_batch"][0] == 4


def small(*batches):
    torch.manual_seed(0)
    model = Means()
    return model, list(batches), torch.optim.SGD(model.parameters(), lr=0.01)


# What fails nevertheless


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_what_fails_is_cut_further_and_the_limit_is_lower_from_then_on(phase):
    batch = annotated_images((1, 1, 1, 1))
    options = RecoveryOptions(grow_after=3)
    cost_model = CostModel(((100.0, 0, 1.0, 0, 0, 0),), 4200)
    trainer = FailingTrainer(
        *small(*[batch] * 8),
        recovery=options,
        cost_model=cost_model,
        fails=lambda ids: len(ids) > 2,
    )
    trainer.phase = phase
    reference = AccumulatingTrainer(*small(*[batch] * 8))
    for i in range(2):
        iterate(trainer, first=i)
        iterate(reference, first=i)
    assert trainer.recovery.oom_events == 1
    assert [len(names.split(", ")) for names in trainer.forwards[-4:]] == [2, 2] * 2
    for one, other in zip(trainer.model.parameters(), reference.model.parameters()):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)

    resumed = FailingTrainer(
        *small(batch, batch),
        recovery=options,
        cost_model=cost_model,
        fails=lambda ids: len(ids) > 2,
    )
    resumed.recovery.load_state_dict(trainer.recovery.state_dict())
    iterate(resumed)
    assert len(resumed.forwards) == 2
    without = FailingTrainer(*small(batch), recovery=options, fails=lambda ids: False)
    without.recovery.load_state_dict(trainer.recovery.state_dict())
    assert without.cutter.images is None

    trainer.fails = lambda ids: False
    trainer.forwards.clear()
    for i in range(2, 6):
        iterate(trainer, first=i)
    assert len(trainer.forwards) < 8  # it has grown again


class CountsAlone(Detr):
    """Runs out of memory in a count of several images, from a while on."""

    fails = False

    def forward(self, batch):
        if self.fails and not torch.is_grad_enabled() and len(batch) > 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return super().forward(batch)


@pytest.mark.slow
def test_a_count_that_fails_is_cut_further():
    windows = [annotated_images(numbers, seed) for seed, numbers in enumerate(NUMBERS)]
    full = gradients(Detr, [[window] for window in windows])
    torch.manual_seed(0)
    model = CountsAlone().double()
    sgd = torch.optim.SGD(model.parameters(), lr=0.0)
    trainer = AccumulatingTrainer(model, windows, sgd, cost_model=CUT, recovery=RecoveryOptions())
    train(trainer, 2)  # in the second one, annotations no longer tell the count
    model.fails = True
    assert max(differences(train(trainer, 2), full[2:])) < 2e-7
    assert trainer.cutter.limit_bytes == CUT.limit_bytes


def test_small_images_that_fail_together_end_alone():
    """A loop without end, if the lowest limit had room for several."""
    cut = cutter(2**30)
    window = Window(iter([[image(8, 8)] * 4]), 1)
    cut.cut(window)
    sizes = []
    while (micro_batch := cut.take(window)).can_be_split:
        sizes.append(micro_batch.num_images)
        window.put_back()
        cut.lower(micro_batch, window)
    assert sizes == [4]


# Ranks


def on_ranks(rank, num_ranks, kind, windows, policy, options):
    """Gradients of this rank's part of each window, and the micro-batches that it ran."""
    torch.manual_seed(0)
    model = compat.create_ddp_model(kind().double(), broadcast_buffers=False)
    sgd = torch.optim.SGD(model.parameters(), lr=0.0)
    parts = [window[rank] for window in windows]
    normalizers = NormalizerOptions(policy)
    trainer = AccumulatingTrainer(model, parts, sgd, normalizers=normalizers, **options)
    sizes = []
    model.register_forward_hook(lambda _, batch, __: sizes.append(len(batch[0])))
    return train(trainer, len(windows)), sizes


@pytest.mark.slow
@pytest.mark.parametrize("recovery", [None, RecoveryOptions()])
@pytest.mark.parametrize("kind", [Detr, Fcos])
def test_ranks_with_different_cuts_agree(two_ranks, kind, recovery):
    windows = [annotated_images((10, 3, 12, 5, 1, 0, 0, 2), seed) for seed in range(3)]
    parts = [[w[:4], w[4:]] for w in windows]
    full = gradients(kind, [[window] for window in windows])
    options = {"cost_model": CUT, "recovery": recovery}
    (one, sizes), (other, other_sizes) = two_ranks.run(on_ranks, 2, kind, parts, "window", options)
    torch.testing.assert_close(one, other, rtol=0, atol=0)
    assert max(differences(one, full)) < 2e-7
    assert len(sizes) > len(other_sizes)


def refused(rank, num_ranks, parts, policy):
    with pytest.raises(ConfigError) as error:
        on_ranks(rank, num_ranks, Synchronised, parts, policy, {"cost_model": CUT})
    return str(error.value)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["window", "off"])
def test_ranks_that_communicate_in_the_forward_are_not_cut_by_bytes(two_ranks, policy):
    images = annotated_images((10, 3, 12, 5, 1, 0, 0, 2))
    errors = two_ranks.run(refused, 2, [[images[:4], images[4:]]] * 2, policy)
    assert errors[0] == errors[1]
    assert "COST_MODEL.BYTES cuts the images of each rank alone, and the model comm" in errors[0]


# Config


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"BYTES": [[1.0, 2.0]]}, "must be lists of 6 numbers"),
        ({"BYTES": [[1.0] * 5 + [-1.0]]}, "must be lists of 6 numbers"),
        ({"BYTES": "many"}, "must be lists of 6 numbers"),
        ({"ERROR_GB": -1.0}, "ERROR_GB must be a number from 0"),
        ({"BYTES": [[1.0] * 6]}, "needs a MEMFIT.BUDGET_GB"),
    ],
)
def test_values_that_cannot_work_are_errors(settings, message):
    cfg = tiny_cfg()
    for key, value in settings.items():
        cfg.MEMFIT.COST_MODEL[key] = value
    with pytest.raises(ConfigError, match=message):
        check_settings(cfg)


def test_a_lazy_config_has_a_cost_model_too():
    keys = {"bytes": [[1, 2, 3, 4, 5, 6.5], [6, 5, 4, 3, 2, 1]], "error_gb": 0.5}
    job = Job.from_lazy(lazy_config(budget_gb=10.0, memfit={"cost_model": keys}))
    assert job.settings.cost_model.sums == ((1, 2, 3, 4, 5, 6.5), (6, 5, 4, 3, 2, 1))


def test_a_config_makes_the_limit_and_the_default_has_none(tmp_path):
    cfg = tiny_cfg()
    assert Settings.from_cfg(cfg).cost_model is None
    cfg.MEMFIT.BUDGET_GB, cfg.MEMFIT.PLAN.MARGIN = 10.0, 0.1
    cfg.MEMFIT.COST_MODEL.BYTES = [[1, 2, 3, 4, 5, 6.5]]
    cfg.MEMFIT.COST_MODEL.ERROR_GB = 0.5
    cost_model = Settings.from_cfg(cfg).cost_model
    assert cost_model.limit_bytes == int(8.5 * 2**30)
    assert cost_model.sums == ((1, 2, 3, 4, 5, 6.5),)
