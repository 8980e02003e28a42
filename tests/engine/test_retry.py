# Copyright (c) the d2_memfit developers.
"""A window that ran out of memory ends as one that did not."""

import gc
from contextlib import contextmanager, nullcontext

import pytest
import torch
from detectron2.modeling.meta_arch import retinanet
from fvcore.nn import sigmoid_focal_loss
from injection import (
    FailingTrainer,
    InjectedTrainer,
    Injector,
    everything,
    iterate,
    read_record,
    scripted,
    seed_all,
)
from tiny import images, parameters, relative_difference, tiny_cfg, tiny_model

from d2_memfit import AccumulatingTrainer
from d2_memfit.common.errors import OutOfMemoryError
from d2_memfit.common.snapshot import Snapshot as StateCopy
from d2_memfit.config.settings import NormalizerOptions, RecoveryOptions
from d2_memfit.engine.evaluating import recovering_inference
from d2_memfit.memory import TensorMeter
from d2_memfit.techniques.checkpointing import checkpointed

FAMILIES = ["proposal_network", "faster_rcnn", "mask_rcnn", "keypoint_rcnn", "retinanet"]


NUM_POINTS = 200


NUM_SAMPLED = 4


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """The models are so small that threads mostly wait for each other."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture(autouse=True)
def no_torchscript(monkeypatch):
    """TorchScript drops the text of errors that Python raises within it, as the injector does; that
    of PyTorch's own errors it keeps (tests/memory/test_oom.py).
    """
    monkeypatch.setattr(retinanet, "sigmoid_focal_loss_jit", sigmoid_focal_loss)


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def batches(num=100):
    return [images(2, first=2 * i) for i in range(num)]


def model_with_trainable_bn(family, fpn=True):
    cfg = tiny_cfg(family, fpn=fpn)
    cfg.MODEL.RESNETS.NORM = "BN"
    return tiny_model(cfg)


class CountingModel(torch.nn.Module):
    """The gradient of its weight counts each image, and so does a number of its own."""

    def __init__(self, num_images):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(num_images))
        self.num_seen = 0

    def forward(self, batch):
        ids = torch.tensor([image["image_id"] for image in batch])
        self.num_seen += len(ids)
        return {"loss": -self.weight[ids].mean()}


@pytest.mark.parametrize("phase", ["forward", "backward"])
@pytest.mark.parametrize("seed", range(5))
def test_every_image_counts_once(phase, seed, monkeypatch):
    monkeypatch.setattr("d2_memfit.engine.retry.GROW_AFTER", 1)
    rng = torch.Generator().manual_seed(seed)

    def fails(names):
        return len(names) > 1 and torch.rand((), generator=rng) < 0.5

    model = CountingModel(48)
    trainer = FailingTrainer(
        model,
        [[{"image_id": 6 * b + i} for i in range(6)] for b in range(8)],
        torch.optim.SGD(model.parameters(), lr=1.0),
        accumulation_steps=4,
        recovery=RecoveryOptions(),
        fails=fails,
    )
    trainer.phase = phase
    iterate(trainer, 2)
    torch.testing.assert_close(model.weight.data, torch.full((48,), 1 / 24))
    assert model.num_seen == 48


def failing(fails, steps=1, model=None, num_batches=1, **kwargs):
    model = model or model_with_trainable_bn("mask_rcnn", fpn=False)
    output_dir = kwargs.pop("output_dir", "")
    return FailingTrainer(
        model,
        batches(num_batches),
        sgd(model),
        steps,
        recovery=RecoveryOptions(output_dir=str(output_dir), **kwargs),
        normalizers=NormalizerOptions("off"),  # testing the losses takes longer than all else
        fails=fails,
    )


class FailsTimes:
    """Image ``index`` alone fails so many times, and any batch with more images."""

    def __init__(self, index, times):
        self.index, self.left = index, times

    def __call__(self, names):
        if len(names) > 1:
            return True
        if names != [self.index] or not self.left:
            return False
        self.left -= 1
        return True


ACTIONS = [
    "the micro-batch is halved to 1 and its images are run again",
    "caches are freed and it is run again",
    "it is run again with checkpointed activations, kept on the host",
    "it is run again at 0.7 of its size, 0.70 of the original",
    "it is run again at 0.7 of its size, 0.49 of the original",
    "it is run again at 0.7 of its size, 0.34 of the original",
]


def one_iteration(family, precision, fail_at=(), sizes=None, fpn=True):
    """An iteration of 2 x 2 images after one that was clean.

    Args:
        fail_at: allocations that fail.
        sizes: of the micro-batches, instead of those that recovery finds.
        fpn: see :func:`tiny_cfg`.
    """
    seed_all()
    model = model_with_trainable_bn(family, fpn)
    trainer = InjectedTrainer(
        model, batches(), sgd(model), 2, precision, recovery=RecoveryOptions()
    )
    iterate(trainer)
    trainer.injector = Injector(fail_at)
    if sizes:
        trainer.cutter.take = scripted(sizes)
    storage = iterate(trainer, first=1)
    return trainer, everything(trainer, storage)


def check_recovery_at(family, precision, points, fpn=True):
    clean = {}
    for point in points:
        trainer, recovered = one_iteration(family, precision, fail_at=[point], fpn=fpn)
        assert trainer.recovery.totals.oom_events == 1, f"nothing failed at {point}"
        sizes = tuple(trainer.window_sizes)
        assert sum(sizes) == 4
        if sizes not in clean:
            _, clean[sizes] = one_iteration(family, precision, sizes=sizes, fpn=fpn)
        assert_same(recovered, clean[sizes])
    return clean


def assert_same(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


def points_of(family, precision, num, fpn=True):
    """So many allocations, evenly spread over the first window.

    A process's first backward, which may round otherwise, is here.
    """
    trainer, _ = one_iteration(family, precision, fpn=fpn)
    last = trainer.injector.num_allocations
    return sorted({round(1 + i * (last - 1) / (num - 1)) for i in range(num)})


@pytest.mark.slow  # RetinaNet has a running normaliser, too
@pytest.mark.parametrize(
    ("family", "precision"), [("mask_rcnn", "float32"), ("retinanet", "float16")]
)
def test_a_window_that_failed_somewhere_ends_as_one_that_did_not(family, precision):
    points = points_of(family, precision, NUM_SAMPLED, fpn=False)
    splits = check_recovery_at(family, precision, points, fpn=False)
    assert set(splits) == {(1, 1, 1, 1), (2, 1, 1)}


@pytest.mark.sweep
@pytest.mark.parametrize("precision", ["float32", "float16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_window_that_failed_anywhere_ends_as_one_that_did_not(family, precision):
    points = points_of(family, precision, NUM_POINTS)
    assert len(points) == NUM_POINTS
    check_recovery_at(family, precision, points)


@pytest.mark.parametrize(("phase", "times"), [("forward", 1), ("backward", 2)])
def test_an_image_that_does_not_fit_alone_is_eased_without_changing_what_is_computed(
    phase, times, tmp_path, monkeypatch
):
    states, eased = [], []
    ease = lambda model: eased.append(1) or checkpointed(model)  # noqa: E731
    monkeypatch.setattr("d2_memfit.engine.retry.checkpointed", ease)
    for fails in (FailsTimes(1, 0), FailsTimes(1, 0), FailsTimes(1, times)):
        seed_all()
        trainer = failing(fails, output_dir=tmp_path / str(len(states)))
        trainer.phase = phase
        states.append(everything(trainer, iterate(trainer)))
    actions = [e["action"] for e in read_record(tmp_path / "2")]
    assert actions == ACTIONS[: times + 1]
    assert len(eased) == times - 1
    assert states[2].pop("scalars") == states[1].pop("scalars")
    assert_same(states[2], states[1])


@pytest.mark.parametrize("times", [3, 5])
def test_it_is_made_smaller_only_if_that_is_allowed(times, tmp_path):
    model = tiny_model(tiny_cfg("mask_rcnn", fpn=False))
    fails = FailsTimes(1, times)
    trainer = failing(fails, model=model, last_resort="resize", output_dir=tmp_path)
    iterate(trainer)
    events = read_record(tmp_path)
    assert [e["action"] for e in events] == ACTIONS[: times + 1]
    heights = [e["images"][0]["height"] for e in events[1:]]
    assert heights == [64, 64, 64, 45, 31][:times]


def test_the_last_resort_is_an_error_that_says_all(tmp_path):
    trainer = failing(FailsTimes(1, 99), output_dir=tmp_path, budget_gb=6)
    before = parameters(trainer.model)
    with pytest.raises(OutOfMemoryError) as e:
        iterate(trainer)
    text = str(e.value)
    for part in (
        "in the forward of iteration 0 on rank 0",
        "a micro-batch of 1",
        "image_1.png (image_id 1, 64 x 64 pixels, 3 instances)",
        "GB allocated",
        "GB reserved, a budget of 6 GB",
        "(1) SOLVER.AMP.ENABLED True; (2) a smaller INPUT.MAX_SIZE_TRAIN; "
        "(3) MEMFIT.OOM.LAST_RESORT resize",
    ):
        assert part in text
    assert read_record(tmp_path)[-1]["action"] == "training stops"
    assert relative_difference(parameters(trainer.model), before) == 0
    assert all(p.grad is None for p in trainer.model.parameters())


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_an_image_that_is_skipped_leaves_the_mean_over_the_others(phase, log):
    alone = model_with_trainable_bn("proposal_network", fpn=False)
    seed_all()
    others = [images(1), images(1, first=2), images(1, first=3)]
    iterate(AccumulatingTrainer(alone, others, sgd(alone), 3))
    model = model_with_trainable_bn("proposal_network", fpn=False)
    trainer = failing(FailsTimes(1, 99), 2, model, 2, last_resort="skip")
    trainer.phase = phase
    seed_all()
    storage = iterate(trainer)
    assert relative_difference(parameters(trainer.model), parameters(alone)) < 1e-6
    assert trainer.recovery.totals.skipped_images == 1
    assert storage.latest()["effective_batch"][0] == 3
    assert "image_1.png" in log.text
    assert "it is skipped" in log.text


def test_too_many_skipped_images_end_the_run():
    trainer = failing(lambda names: True, 1, CountingModel(6), 3, last_resort="skip")
    with pytest.raises(OutOfMemoryError, match=r"2 of 2 images.*share of 0.001"):
        iterate(trainer, 3)


def test_an_iteration_without_images_makes_no_step_and_no_metrics(monkeypatch, log):
    monkeypatch.setattr("d2_memfit.engine.retry.MAX_SKIPPED", 1.0)
    storage = iterate(failing(lambda names: True, 1, CountingModel(6), last_resort="skip"))
    assert "all images were skipped, and so is the step" in log.text
    assert "total_loss" not in storage.latest()


def test_the_size_grows_back_and_is_kept_in_checkpoints(monkeypatch):
    monkeypatch.setattr("d2_memfit.engine.retry.GROW_AFTER", 2)
    fails_at = {2, 4}

    def fails(names):
        return trainer.iter in fails_at and len(names) > 1

    trainer = failing(fails, 1, CountingModel(100), 20)
    sizes = iterate(trainer, 10).history("memfit/micro_batch").values()
    # Halved in iterations 2 and 4; after two clean iterations each it is 2 again.
    assert [int(v) for v, _ in sizes] == [2, 2, 1, 1, 1, 2, 2, 2, 2, 2]

    fails_at.add(10)
    iterate(trainer, 1, first=10)
    resumed = failing(lambda names: False, 1, CountingModel(100), 20)
    resumed.load_state_dict(trainer.state_dict())
    storage = iterate(resumed, 3, first=11)
    assert [int(v) for v, _ in storage.history("memfit/micro_batch").values()] == [1, 1, 2]
    assert storage.latest()["memfit/oom_events"][0] == trainer.recovery.totals.oom_events


def train_recovering(model, batch):
    """An iteration whose only forwards are those of its micro-batches."""
    options = {"recovery": RecoveryOptions(), "normalizers": NormalizerOptions("off")}
    iterate(AccumulatingTrainer(model, [batch], sgd(model), **options))


def test_other_errors_are_not_tried_again():
    calls = []

    class Broken(CountingModel):
        def forward(self, batch):
            calls.append(batch)
            raise RuntimeError("shape mismatch")

    with pytest.raises(RuntimeError, match="shape mismatch"):
        train_recovering(Broken(2), images(2))
    assert len(calls) == 1


def run_out(*args, **kwargs):
    raise torch.OutOfMemoryError("CUDA out of memory")


@pytest.mark.parametrize(
    ("place", "phases", "advice"),
    [
        ("d2_memfit.engine.train_loop.RankReport.add", ["vote"], ""),
        ("d2_memfit.common.snapshot.Snapshot.restore", ["forward", "restoration"], ""),
        ("d2_memfit.engine.retry.release_memory", ["forward", "restoration"], ""),
        ("torch.optim.SGD.step", ["optimizer"], "FREEZE_AT"),
    ],
)
def test_an_error_where_nothing_can_be_run_again_is_explained(
    place, phases, advice, tmp_path, monkeypatch
):
    monkeypatch.setattr(place, run_out)

    def fails(names):
        return len(names) > 1 and len(phases) > 1

    trainer = failing(fails, 1, CountingModel(2), output_dir=tmp_path)
    with pytest.raises(OutOfMemoryError, match=f"in the {phases[-1]} of iteration 0.*{advice}"):
        iterate(trainer)
    assert [event["phase"] for event in read_record(tmp_path)] == phases


@contextmanager
def failing_as_it_is_left():
    """As a context manager of a project that allocates when it is left."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise torch.OutOfMemoryError("CUDA out of memory. injected") from None


def infer(model, batch):
    model.eval()
    with recovering_inference(model, RecoveryOptions()):
        model(batch)


@pytest.mark.parametrize("around", [nullcontext, failing_as_it_is_left])
@pytest.mark.parametrize("run", [train_recovering, infer])
def test_a_failed_attempt_is_freed_before_its_state_is_restored(run, around, monkeypatch):
    def forward(batch):
        at_start.append(meter.live_bytes)
        garbage = [torch.zeros(2**22)]
        garbage.append(garbage)  # as code whose objects refer to each other
        with around():
            return original(batch)

    def fail(_, args):
        if len(args[0]) > 2:
            at_error.append(meter.live_bytes)
            raise torch.OutOfMemoryError("CUDA out of memory. injected")

    def restore(copy):
        at_restore.append(meter.live_bytes)
        return restored(copy)

    model = tiny_model(tiny_cfg("mask_rcnn", fpn=False))
    original, restored = model.forward, StateCopy.restore
    at_start, at_error, at_restore = [], [], []
    monkeypatch.setattr(model, "forward", forward)
    monkeypatch.setattr(StateCopy, "restore", restore)
    model.roi_heads.register_forward_pre_hook(fail)
    gc.disable()  # what frees them is recovery, and not a collection by chance
    try:
        with TensorMeter() as meter:
            run(model, images(4, size=128))
    finally:
        gc.enable()
    assert len(at_restore) == len(at_error) >= 1
    assert max(at_restore) - at_start[0] < 0.1 * (at_error[0] - at_start[0])
