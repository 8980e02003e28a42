# Copyright (c) the d2_memfit developers.
"""d2_memfit on a GPU: `pytest -m gpu tests/gpu`.

Without one these tests are skipped. What no kernel of CUDA decides also runs on a made-up card, in
the normal suite, and other tests on a CPU, as `sweep`.

Kernels of a GPU add up in any order. Results are equal to the last bit only without ROIAlign,
whose deterministic backward in torchvision needs a compiler.
"""

import gc
import warnings
from contextlib import contextmanager, nullcontext
from functools import partial
from unittest.mock import patch

import pytest
import torch
from detectron2.engine import AMPTrainer, SimpleTrainer
from detectron2.utils.events import EventStorage
from injection import InjectedTrainer, Injector, iterate, seed_all
from made_up_card import made_up_card
from tiny import (
    every_anchor_counts,
    images,
    parameters,
    relative_difference,
    sized,
    suggested,
    tiny_cfg,
    tiny_model,
)
from torch import nn

from d2_memfit import AccumulatingTrainer, estimate_memory
from d2_memfit.common.compat import clear_cublas_workspaces
from d2_memfit.common.errors import ConfigError
from d2_memfit.config.load import with_settings
from d2_memfit.config.settings import Precision, RecoveryOptions
from d2_memfit.engine.evaluating import recovering_inference
from d2_memfit.engine.hooks import MemoryMonitor
from d2_memfit.measure import ITEMS, measure_item
from d2_memfit.memory import (
    OwnerMeter,
    TensorMeter,
    cuda_context_bytes,
    enforce_budget,
    is_out_of_memory,
    release_memory,
)
from d2_memfit.techniques import offload
from d2_memfit.techniques.registry import TECHNIQUES, apply_techniques

EXACT = [t.name for t in TECHNIQUES if t.tier == "exact" and t.part == "model"]

GPU = pytest.param(
    "cuda:0",
    marks=[
        pytest.mark.gpu,
        pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    ],
)
CPU = pytest.param("cpu", marks=pytest.mark.sweep)
MADE_UP = "made-up card"


@pytest.fixture(params=[GPU, MADE_UP])
def gpu(request):
    """A GPU; without one, a made-up card on which the same code runs."""
    with made_up_card() if request.param == MADE_UP else nullcontext():
        device = torch.device("cuda:0")
        yield device
        release_memory(device)


@pytest.fixture(params=[GPU, CPU])
def device(request):
    if request.param == MADE_UP:
        with made_up_card():
            yield torch.device("cuda:0")
        return
    device = torch.device(request.param)
    yield device
    release_memory(device)


def side(device):
    """Of images in pixels: small ones where a CPU computes, large ones beside workspaces."""
    is_card = device.type == "cuda" and torch.cuda.get_device_name() != "Made-up"
    return 512 if is_card else 160


def on_a_made_up_card_too(test):
    return pytest.mark.parametrize("device", [GPU, CPU, MADE_UP], indirect=True)(test)


@pytest.fixture
def full_float32(monkeypatch):
    """cuDNN without TF32, which rounds one shape of a batch more than another."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


@contextmanager
def deterministic():
    """While open, operators compute the same every time, if PyTorch has such an algorithm."""
    before = torch.backends.cudnn.deterministic
    torch.backends.cudnn.deterministic = True
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of operators that have no such algorithm
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(False)
            torch.backends.cudnn.deterministic = before


@contextmanager
def peaks_of(device):
    """While open, a function returns the peak of tensors since its last call, in bytes."""

    def take():
        torch.cuda.synchronize(device)
        peak = torch.cuda.memory_stats(device)["allocated_bytes.all.peak"]
        torch.cuda.reset_peak_memory_stats(device)
        return peak

    def take_on_cpu():
        peak, meter.peak_bytes = meter.peak_bytes, meter.live_bytes
        return peak

    if device.type == "cuda":
        take()
        yield take
    else:
        with TensorMeter() as meter:
            yield take_on_cpu


@contextmanager
def limited(gpu, more_bytes):
    """While open, the process may take only this much more than it has reserved now."""
    load_kernels(gpu)
    torch.cuda.empty_cache()
    taken = cuda_context_bytes(gpu) + torch.cuda.memory_reserved(gpu)
    enforce_budget((taken + more_bytes) / 2**30, str(gpu))
    try:
        yield
    finally:
        enforce_budget(None, str(gpu))


@torch.enable_grad()
def load_kernels(gpu):
    """Those of cuDNN and cuBLAS, whose memory is outside the allocator."""
    x = torch.ones(1, 8, 32, 32, device=gpu, requires_grad=True)
    rows = nn.functional.conv2d(x, x.new_ones(8, 8, 3, 3)).flatten(2)
    (rows @ x.new_ones(900, 8)).sum().backward()


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4)


def batches():
    return [images(8, first=8 * i) for i in range(3)]


def trained(trainer):
    iterate(trainer, 3)
    return parameters(trainer.model)


@pytest.mark.parametrize("precision", ["float32", "float16"])
def test_steps_are_detectron2s(precision, device):
    if precision == "float16" and device.type == "cpu":
        pytest.skip("float16 is for GPUs")
    cfg = tiny_cfg("proposal_network", device=device)
    theirs = SimpleTrainer if precision == "float32" else AMPTrainer
    results = []
    with deterministic():
        for make in (theirs, partial(AccumulatingTrainer, precision=precision)):
            model = tiny_model(cfg)
            seed_all()
            results.append(trained(make(model, batches(), sgd(model))))
    for name, expected in results[0].items():
        assert torch.equal(results[1][name], expected), relative_difference(*results)


def test_allocations_above_the_budget_fail(gpu):
    name = str(gpu)
    torch.zeros(1, device=gpu)
    try:
        enforce_budget(2, name)
        half = torch.empty(2**29, dtype=torch.uint8, device=gpu)
        with pytest.raises(RuntimeError) as error:
            torch.empty(2**31, dtype=torch.uint8, device=gpu)
        assert is_out_of_memory(error.value)
        assert torch.cuda.memory_reserved(gpu) <= 2 * 2**30
        del half
        with pytest.raises(ConfigError):  # no card has as much
            enforce_budget(10_000, name)
    finally:
        enforce_budget(None, name)
    total = torch.cuda.get_device_properties(gpu).total_memory
    torch.empty(min(total // 3, 2**32), dtype=torch.uint8, device=gpu)  # no limit is left


@pytest.mark.slow
def test_a_batch_that_does_not_fit_is_split_and_memory_does_not_grow(gpu):
    model = tiny_model(tiny_cfg("mask_rcnn", device=gpu))
    loader = [images(8, size=side(gpu))] * 4
    trainer = AccumulatingTrainer(model, loader, sgd(model), recovery=RecoveryOptions())
    one = AccumulatingTrainer(model, [images(1, size=side(gpu))] * 3, sgd(model))
    iterate(one)
    base = torch.cuda.memory_allocated(gpu)
    with peaks_of(gpu) as peak:
        iterate(one)
        of_one = peak() - base
    one.optimizer.zero_grad(set_to_none=True)
    with limited(gpu, 3 * of_one):
        iterate(trainer)
        assert trainer.recovery.totals.oom_events >= 1
        assert trainer.cutter.images in (1, 2, 4)
        gc.collect()
        after_first = torch.cuda.memory_allocated(gpu)
        iterate(trainer, 3, first=1)
    gc.collect()
    assert torch.cuda.memory_allocated(gpu) <= after_first + 2**20


def test_evaluation_with_too_little_memory_has_the_same_results(gpu):
    model = tiny_model(tiny_cfg("mask_rcnn", device=gpu)).eval()
    batch = images(4, size=side(gpu))
    with torch.no_grad(), peaks_of(gpu) as peak:
        base = torch.cuda.memory_allocated(gpu)

        def results(part):
            found = [len(result["instances"]) for result in model(part)]
            return found, peak() - base

        of_one = max(results([image])[1] for image in batch)
        expected, of_all = results(batch)
        errors = torch.cuda.memory_stats(gpu)["num_ooms"]
        with (
            limited(gpu, int((of_one + 3 * of_all) / 4)),
            recovering_inference(model, RecoveryOptions()),
        ):
            actual, _ = results(batch)
    assert torch.cuda.memory_stats(gpu)["num_ooms"] > errors  # or it shows nothing
    assert actual == expected


def test_the_bytes_of_all_owners_add_up_to_the_allocators_count(gpu):
    load_kernels(gpu)  # whose workspaces have no owner, and stay
    before = torch.cuda.memory_allocated(gpu)
    model = tiny_model(tiny_cfg("mask_rcnn", device=gpu))
    with OwnerMeter(model) as meter, EventStorage():
        others = meter.live["other"]  # tensors from before
        losses = model(images(2, size=512))
        on_device = torch.cuda.memory_allocated(gpu) - before
        counted = sum(meter.live.values()) - others
    del losses
    assert counted == pytest.approx(on_device, rel=0.01)


def test_reports_have_the_allocators_values_and_do_not_reset_its_peak(gpu):
    ballast = torch.ones(2**27, device=gpu)  # 0.5 GB
    del ballast
    ever = torch.cuda.max_memory_allocated(gpu)
    model = tiny_model(tiny_cfg("proposal_network", device=gpu))
    trainer = AccumulatingTrainer(model, [images(1)] * 4, sgd(model))
    trainer.register_hooks([MemoryMonitor(2)])
    trainer.train(0, 4)
    latest = {k: v[0] for k, v in trainer.storage.latest().items()}
    assert torch.cuda.max_memory_allocated(gpu) == ever
    assert latest["memfit/alloc_retries"] == torch.cuda.memory_stats(gpu)["num_alloc_retries"]
    assert 0 < latest["memfit/allocated_gb"] <= latest["memfit/allocated_peak_gb"] < 0.5
    assert latest["memfit/reserved_gb"] <= torch.cuda.max_memory_reserved(gpu) / 2**30


def test_a_probe_leaves_nothing_behind(gpu):
    def state():
        clear_cublas_workspaces()
        torch.cuda.empty_cache()
        random_state = torch.cuda.get_rng_state(gpu).tolist(), torch.get_rng_state().tolist()
        return torch.cuda.memory_allocated(gpu), *random_state

    cfg = tiny_cfg("mask_rcnn", device=gpu)
    cfg.SOLVER.IMS_PER_BATCH = 2
    torch.zeros(1, device=gpu)
    before = state()
    measured = estimate_memory(cfg, **sized(cfg, (240, 320), 5), probe=True)
    assert state() == before
    total = sum(measured.breakdown.values())
    assert total == pytest.approx(measured.peak_allocated_gb, rel=1e-6)


@pytest.mark.parametrize("precision", ["float32", "float16", "bfloat16"])
def test_micro_batches_of_3_3_and_2_images_give_the_steps_of_8(precision, device, full_float32):
    try:
        Precision(precision, device)
    except ConfigError as e:
        pytest.skip(str(e))
    cfg = every_anchor_counts(tiny_cfg("proposal_network", device=device))
    cut = [part for batch in batches() for part in (batch[:3], batch[3:6], batch[6:])]
    results = []
    for loader, steps in ((batches(), 1), (cut, 3)):
        model = tiny_model(cfg)
        results.append(trained(AccumulatingTrainer(model, loader, sgd(model), steps, precision)))
    moved = relative_difference(results[0], parameters(tiny_model(cfg)))
    tolerance = {"float32": 1e-3, "float16": 0.02, "bfloat16": 0.1}[precision]
    assert relative_difference(results[1], results[0]) < tolerance * moved


@pytest.mark.parametrize("family", ["proposal_network", "mask_rcnn", "retinanet"])
@pytest.mark.parametrize("precision", ["float32", "float16"])
def test_a_failed_allocation_gives_the_step_of_two_micro_batches(
    family, precision, device, full_float32
):
    def one_iteration(micro_batch, fail_at):
        seed_all()
        model = tiny_model(tiny_cfg(family, device=device))
        trainer = InjectedTrainer(
            model, [images(4)], sgd(model), 1, precision, micro_batch, RecoveryOptions()
        )
        trainer.injector = Injector(fail_at)
        iterate(trainer)
        return trainer

    halves, whole = one_iteration(2, []), one_iteration(None, [])
    before = parameters(tiny_model(tiny_cfg(family, device=device)))
    moved = relative_difference(parameters(halves.model), before)
    points = whole.injector.num_allocations
    for point in range(5, points, points // 8):
        trainer = one_iteration(None, [point])
        assert trainer.window_sizes == (2, 2)
        gap = relative_difference(parameters(trainer.model), parameters(halves.model))
        assert gap < 0.01 * moved, f"{gap} of {moved} after allocation {point}"


@pytest.mark.parametrize("names", [*([name] for name in EXACT), EXACT], ids=", ".join)
def test_exact_techniques_keep_gradients_and_take_no_more_memory(names, device, full_float32):
    def step(names):
        there_already = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
        cfg = tiny_cfg("mask_rcnn", device=device)
        cfg.INPUT.MASK_FORMAT = "bitmask"
        for name in names:
            cfg = with_settings(cfg, suggested(name, cfg))
        model = apply_techniques("model", tiny_model(cfg), cfg)
        batch = images(2, size=side(device))
        for _ in range(2):  # the first warms up
            model.zero_grad(set_to_none=True)
            seed_all()
            with peaks_of(device) as peak, EventStorage():
                sum(model(batch).values()).backward()
                bytes_taken = peak() - there_already
        gradients = {n: p.grad.cpu() for n, p in model.named_parameters() if p.grad is not None}
        return gradients, bytes_taken

    expected, plain = step([])
    actual, less = step(names)
    assert relative_difference(actual, expected) < 1e-4
    # Some save nothing at this size, and workspaces of cuDNN differ with the shape of a chunk.
    assert less <= (1.02 if len(names) == 1 else 0.8) * plain


@on_a_made_up_card_too
@pytest.mark.parametrize("family", ["proposal_network", "retinanet"])
def test_blocks_recomputed_and_offloaded_keep_gradients_to_the_last_bit(family, device):
    def gradients(settings):
        cfg = with_settings(tiny_cfg(family, device=device), settings)
        model = apply_techniques("model", tiny_model(cfg), cfg, announce=False)
        for _ in range(2):  # the first warms up
            model.zero_grad(set_to_none=True)
            seed_all()
            with EventStorage():
                sum(model(images(2, size=side(device))).values()).backward()
        return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}

    blocks = {"MEMFIT.CHECKPOINT.MODULES": ["backbone.bottom_up.res3", "*head"]}
    if device.type == "cuda":
        blocks["MEMFIT.OFFLOAD.MODULES"] = ["backbone.bottom_up.res4.*"]  # trained; res2 is frozen
    all_leave = {"_SMALLEST_BYTES": 1, "MOST_IN_FLIGHT": 1}
    with deterministic(), patch.multiple(offload, **all_leave):
        expected, again, actual = map(gradients, ({}, {}, blocks))
    repeats = f"{relative_difference(again, expected)} without them"
    assert expected.keys() == actual.keys()
    for name in expected:
        assert torch.equal(actual[name], expected[name]), repeats


@pytest.mark.parametrize("change", ["2 images", pytest.param("6GB", marks=pytest.mark.slow)])
def test_the_gpu_is_measured(change, gpu):
    (name,) = (item for item in ITEMS if item.endswith(f"mask_rcnn_R_50_FPN_3x, {change}"))
    try:
        record = measure_item(name, str(gpu), small=True)
    finally:
        enforce_budget(None, str(gpu))
    off = abs(record["estimated_bytes"] - record["measured_bytes"])
    assert off < 2**26  # workspaces, which a simulated card does not have
    assert 0 < record["measured_bytes"] < record["device_measured_bytes"]
    if change == "6GB":
        assert record["device_measured_bytes"] <= 6 * 2**30
