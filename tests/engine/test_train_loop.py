# Copyright (c) the d2_memfit developers.
"""Iterations of real and toy models, against Detectron2's and a plain loop."""

import copy
import inspect
from contextlib import suppress
from functools import partial

import pytest
import torch
from detectron2.engine import SimpleTrainer
from detectron2.layers import FrozenBatchNorm2d
from detectron2.solver.build import maybe_add_gradient_clipping
from detectron2.utils.events import EventStorage, get_event_storage
from injection import iterate
from tiny import every_anchor_counts, images, parameters, relative_difference, tiny_cfg, tiny_model

from d2_memfit import AccumulatingTrainer
from d2_memfit.common.errors import DataError
from d2_memfit.engine.ranks import RankReport, write_metrics
from d2_memfit.engine.window import WindowStorage
from d2_memfit.memory import TensorMeter

NUM_ITERATIONS = 3


def sgd(model, lr=0.01):
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, weight_decay=1e-4)


run = partial(iterate, num_iterations=NUM_ITERATIONS)


def values(storage, name):
    return [value for value, _ in storage.history(name).values()]


def cut(batches, sizes):
    """Cut each batch into smaller ones of these sizes."""
    for batch in batches:
        start = 0
        for size in sizes:
            yield batch[start : start + size]
            start += size


BATCHES = [images(8, first=8 * i) for i in range(NUM_ITERATIONS)]


class ToyModel(torch.nn.Module):
    """One parameter; the loss is its mean product with the images' values."""

    def __init__(self, weight=1.0):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor(weight))

    def forward(self, batch):
        mean = torch.stack([x["value"] for x in batch]).mean()
        storage = get_event_storage()
        storage.put_scalar("toy/mean", mean.item())
        with storage.name_scope("stage1"):
            storage.put_scalar("count", len(batch), smoothing_hint=False)
        return {"loss_a": self.weight * mean, "loss_b": 2 * self.weight * mean}


def toys(*numbers):
    return [
        {"value": torch.tensor(float(n)), "file_name": f"toy_{n}.png", "image_id": n}
        for n in numbers
    ]


@pytest.mark.parametrize("family", ["proposal_network", "faster_rcnn", "mask_rcnn", "retinanet"])
def test_one_forward_per_iteration_is_detectron2_to_the_last_bit(family):
    cfg = tiny_cfg(family)
    results = []
    # The first backward of its kind in a process may round otherwise than all later ones, hence
    # one run before the two that count.
    for make_trainer in (SimpleTrainer, SimpleTrainer, AccumulatingTrainer):
        model = tiny_model(cfg)
        storage = run(make_trainer(model, BATCHES, sgd(model)))
        results.append((parameters(model), storage))
    _, (expected, plain), (actual, ours) = results
    assert all(torch.equal(actual[name], expected[name]) for name in expected)
    for name in plain.histories():
        if "data_time" not in name:
            assert ours.history(name).values() == plain.history(name).values(), name
    assert set(ours.histories()) == {*plain.histories(), "effective_batch"}


@pytest.mark.parametrize(
    ("sizes", "micro_batch", "dtype", "tolerance"),
    [
        pytest.param((2, 5, 1), None, torch.float32, 1e-5, id="2+5+1"),
        pytest.param((4, 4), 3, torch.float32, 1e-5, id="4+4-cut-as-3+3+2"),
        pytest.param((8,), 3, torch.float64, 1e-12, id="8-cut-as-3+3+2-float64"),
    ],
)
def test_accumulated_steps_equal_those_of_the_full_batch(sizes, micro_batch, dtype, tolerance):
    cfg = every_anchor_counts(tiny_cfg("proposal_network", fpn=False))
    start = tiny_model(cfg, dtype=dtype)
    # The proposals are not in the loss, and torchvision's NMS takes no float64.
    start.proposal_generator.predict_proposals = lambda *args: None
    full, accumulated = copy.deepcopy(start), copy.deepcopy(start)
    seen = []
    accumulated.register_forward_pre_hook(lambda module, args: seen.append(len(args[0])))
    expected = run(AccumulatingTrainer(full, BATCHES, sgd(full)))
    loader = cut(BATCHES, sizes)
    actual = run(
        AccumulatingTrainer(
            accumulated, loader, sgd(accumulated), len(sizes), micro_batch_size=micro_batch
        )
    )
    expected_sizes = ([3, 3, 2] if micro_batch else list(sizes)) * NUM_ITERATIONS
    assert seen[-len(expected_sizes) :] == expected_sizes
    before, full, accumulated = map(parameters, (start, full, accumulated))
    moved = relative_difference(full, before)
    assert moved > 1e-4
    assert relative_difference(accumulated, full) < tolerance * moved
    assert values(actual, "total_loss") == pytest.approx(values(expected, "total_loss"), rel=1e-5)
    assert values(actual, "effective_batch") == [8] * NUM_ITERATIONS


@pytest.mark.parametrize(("clip_type", "value"), [("value", 1e-3), ("norm", 0.01)])
def test_clipping_sees_the_complete_gradient(clip_type, value):
    cfg = every_anchor_counts(tiny_cfg("proposal_network", fpn=False))
    clip = cfg.SOLVER.CLIP_GRADIENTS
    clip.ENABLED, clip.CLIP_TYPE, clip.CLIP_VALUE = True, clip_type, value
    results = []
    for sizes, steps in (((8,), 1), ((2, 2, 2, 2), 4)):
        model = tiny_model(cfg)
        optimizer = maybe_add_gradient_clipping(cfg, sgd(model))
        run(AccumulatingTrainer(model, cut(BATCHES, sizes), optimizer, steps))
        results.append(parameters(model))
    unclipped = tiny_model(cfg)
    run(AccumulatingTrainer(unclipped, BATCHES, sgd(unclipped)))
    effect = relative_difference(parameters(unclipped), results[0])
    assert effect > 1e-4  # clipping was active
    assert relative_difference(results[1], results[0]) < 1e-4 * effect


def test_the_time_of_the_data_is_that_of_the_slowest_rank():
    with EventStorage() as storage:
        write_metrics([RankReport(1, {"loss": 1.0}, seconds) for seconds in (1.0, 3.0, 2.0)])
    assert storage.latest()["data_time"][0] == 3.0


def test_metrics_are_means_over_images_with_one_entry_per_iteration():
    model = ToyModel()
    loader = [toys(1, 2, 3), toys(10), toys(4, 5, 6), toys(20)]
    storage = iterate(
        AccumulatingTrainer(model, loader, torch.optim.SGD(model.parameters(), 0.0), 2), 2
    )
    assert values(storage, "loss_a") == [4.0, 35 / 4]
    assert values(storage, "loss_b") == [8.0, 70 / 4]
    assert values(storage, "total_loss") == [12.0, 105 / 4]
    assert values(storage, "effective_batch") == [4, 4]
    # what the model's own code logs: the mean of its values, weighted by images
    assert values(storage, "toy/mean") == [4.0, 35 / 4]
    assert values(storage, "stage1/count") == [2.5, 2.5]
    assert storage.smoothing_hints()["stage1/count"] is False
    assert [iteration for _, iteration in storage.history("toy/mean").values()] == [0, 1]
    assert storage.smoothing_hints()["effective_batch"] is False


def test_the_loader_is_asked_for_a_batch_only_when_it_is_needed():
    """So that its workers prepare the next one during a forward."""
    order = []

    def loader():
        for i in range(6):
            order.append("batch")
            yield toys(i)

    model = ToyModel()
    model.register_forward_hook(lambda *_: order.append("forward"))
    iterate(AccumulatingTrainer(model, loader(), sgd(model), 3), 2)
    assert order[-6:] == ["batch", "forward"] * 3, "in all windows but the first"


@pytest.mark.parametrize("steps", [1, 2])
def test_old_gradients_are_gone_before_the_forward(steps):
    model, gradients = ToyModel(), []
    model.register_forward_pre_hook(lambda module, args: gradients.append(module.weight.grad))
    iterate(AccumulatingTrainer(model, [toys(1), toys(2)] * steps, sgd(model), steps), 2)
    assert gradients[0] is gradients[-steps] is None
    assert model.weight.grad.item() == (4.5 if steps == 2 else 6)  # of the second iteration alone


def test_a_loss_that_is_not_finite_raises_before_the_step_and_names_the_images():
    model = ToyModel()
    trainer = AccumulatingTrainer(
        model, [toys(1, 2), toys(3, float("nan")), toys(4)], sgd(model), accumulation_steps=3
    )
    with pytest.raises(FloatingPointError, match=r"iteration=0") as e:
        run(trainer)
    assert "toy_3.png (image_id 3), toy_nan.png" in str(e.value)
    assert "toy_1.png" not in str(e.value)
    assert model.weight.item() == 1.0


@pytest.mark.parametrize(
    ("weight", "norm", "bad", "cause"),
    [
        (2e38, FrozenBatchNorm2d(3), "loss_b", "does not normalise the activations of ran"),
        (float("inf"), None, "loss_a", "The weights are not finite"),
        (2e38, None, "loss_b", "The weights are finite"),
    ],
)
def test_the_images_of_a_loss_that_is_not_finite_and_what_can_be_seen_are_named(
    weight, norm, bad, cause
):
    """Of 2e38, float32 can hold the first loss, and not the second one."""
    model = ToyModel(weight)
    model.norm = norm
    trainer = AccumulatingTrainer(model, [toys(1)], sgd(model))
    with EventStorage(5), pytest.raises(FloatingPointError) as e:
        trainer.run_step()
    assert f"iteration=5! rank 0: {bad} inf" in str(e.value)
    assert "toy_1.png (image_id 1)" in str(e.value)
    assert cause in str(e.value)


def test_a_loader_that_ends_within_a_window_is_named_and_nothing_is_stepped():
    model = ToyModel()
    trainer = AccumulatingTrainer(model, [toys(1), toys(2), toys(3)], sgd(model), 2)
    with pytest.raises(DataError, match="ended after 1 of the 2 batches"):
        run(trainer)
    after_one_step = ToyModel()
    iterate(AccumulatingTrainer(after_one_step, [toys(1), toys(2)], sgd(after_one_step), 2), 1)
    assert torch.equal(model.weight, after_one_step.weight)


def test_an_overflow_in_one_micro_batch_skips_the_whole_step(log):
    model, seen = ToyModel(), []
    optimizer = sgd(model)
    loader = [toys(1), toys(1e35), toys(1), toys(1), toys(1), toys(1)]
    clip = {"clip_gradients": lambda parameters: seen.append(parameters[0].grad.item())}
    trainer = AccumulatingTrainer(model, loader, optimizer, 3, "float16", **clip)
    scale = trainer.precision.scaler.get_scale()
    iterate(trainer, 1)
    assert model.weight.item() == 1.0
    assert trainer.precision.scaler.get_scale() == scale / 2
    assert log.text.count("Iteration 0: gradients overflowed float16") == 1
    with EventStorage():
        trainer.run_step()
    assert model.weight.item() < 1.0
    assert seen[1] == 3.0


@pytest.mark.parametrize(
    "family", [pytest.param("mask_rcnn", marks=pytest.mark.sweep), "retinanet"]
)
def test_accumulation_needs_the_memory_of_one_micro_batch(family):
    """Plus the gradients that wait for the next; here they are small beside the activations."""
    cfg = tiny_cfg(family, fpn=False)
    num_images = 4
    batch = images(num_images, size=448)
    peaks = {}
    for steps, size in ((1, 1), (num_images, 1), (1, num_images)):
        model = tiny_model(cfg)
        trainer = AccumulatingTrainer(
            model, cut([batch] * 9, [size] * (num_images // size)), sgd(model), steps
        )
        iterate(trainer, 1)  # of the first window, images are kept
        with TensorMeter() as meter:
            iterate(trainer, 1)
        peaks[steps, size] = meter.peak_bytes
    gradients = sum(p.numel() * p.element_size() for p in model.parameters())
    assert peaks[num_images, 1] <= peaks[1, 1] + 1.01 * gradients
    assert peaks[num_images, 1] == pytest.approx(peaks[1, 1], rel=0.01)
    assert peaks[1, num_images] > 3 * peaks[1, 1]


@pytest.fixture
def storage():
    with EventStorage(7) as storage:
        storage.put_scalar("x", 1.0)
        storage.put_scalar("old", 5.0)
        yield storage


def test_a_rewind_drops_later_scalars_and_the_name_scope_that_an_error_left_open(storage):
    with WindowStorage(storage) as window:
        window.put_scalar("x", 1.0)
        num_entries = window.num_entries()
        for _ in range(2):
            with suppress(MemoryError), window.name_scope("inner"):
                window.put_scalar("y", 9.0)
                raise MemoryError
            window.rewind(num_entries)
        window.put_scalar("x", 3.0)
    window.write()
    assert storage.history("x").values() == [(1.0, 7), (2.0, 7)]
    assert set(storage.histories()) == {"x", "old"}


@pytest.mark.skipif(
    "cur_iter" not in inspect.signature(EventStorage.put_scalar).parameters,
    reason="Detectron2 v0.6 has no cur_iter",
)
def test_an_explicit_iteration_is_kept(storage):
    with WindowStorage(storage) as window:
        window.put_scalar("x", 2.0, cur_iter=100)
    window.write()
    assert storage.history("x").values() == [(1.0, 7), (2.0, 100)]
