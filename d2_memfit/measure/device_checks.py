# Copyright (c) the d2_memfit developers.
"""Checks that d2_memfit works on a device; `pytest -m gpu` runs them with gpu_checks.py.

A check is a function of the device that raises an error if something is wrong.
"""

import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Optional

import torch
from detectron2.engine import AMPTrainer, SimpleTrainer
from detectron2.utils.events import EventStorage
from torch import nn

from ..config import with_settings
from ..cost_model import CostModel
from ..engine import (
    AccumulatingTrainer,
    LeakDetector,
    MemorySnapshot,
    Precision,
    RecoveryOptions,
)
from ..errors import ConfigError
from ..planner.calibration import calibrate
from ..techniques import TECHNIQUES, apply_techniques
from .injection import InjectedTrainer, Injector, iterate, seed_all
from .peaks import peaks_of
from .reproducible import deterministic, in_full_float32
from .tiny import (
    every_anchor_counts,
    images,
    parameters,
    relative_difference,
    tiny_cfg,
    tiny_model,
)

__all__ = ["CHECKS", "Check", "check_steps_are_detectron2s", "run_with_hooks", "sgd"]

Check = Callable[[torch.device], None]

_EXACT = sorted(n for n, t in TECHNIQUES if t.tier == "exact" and t.part == "model")


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4)


def _batches(num: int = 3) -> list[list[dict[str, Any]]]:
    return [images(8, first=8 * i) for i in range(num)]


def _cut(batches: Sequence[list[Any]], sizes: Sequence[int]) -> Iterator[list[Any]]:
    """Cut each batch into smaller ones of these sizes."""
    for batch in batches:
        start = 0
        for size in sizes:
            yield batch[start : start + size]
            start += size


def _trained(trainer: Any, num_iterations: int = 3) -> dict[str, torch.Tensor]:
    iterate(trainer, num_iterations)
    return parameters(trainer.model)


def check_steps_are_detectron2s(precision: str, device: torch.device) -> None:
    """Check that one forward per iteration gives Detectron2's steps, to the last bit.

    ROIAlign is left out: torchvision's deterministic one needs a compiler.
    """
    cfg = tiny_cfg("proposal_network", device=device)
    theirs = SimpleTrainer if precision == "fp32" else AMPTrainer
    results = []
    with deterministic():
        for make in (theirs, partial(AccumulatingTrainer, precision=precision)):
            model = tiny_model(cfg)
            seed_all()
            results.append(_trained(make(model, _batches(), sgd(model))))
    if not all(torch.equal(results[0][name], results[1][name]) for name in results[0]):
        raise AssertionError(f"weights differ by {relative_difference(*results)}, relatively")


@in_full_float32()
def check_accumulation(precision: str, device: torch.device) -> None:
    """Check that micro-batches of 3, 3 and 2 images give the steps of 8."""
    try:
        Precision(precision, device)
    except ConfigError:  # the device has no such format
        return
    cfg = every_anchor_counts(tiny_cfg("proposal_network", device=device))
    results = []
    for sizes, steps in (((8,), 1), ((3, 3, 2), 3)):
        model = tiny_model(cfg)
        loader = _cut(_batches(), sizes)
        results.append(_trained(AccumulatingTrainer(model, loader, sgd(model), steps, precision)))
    moved = relative_difference(results[0], parameters(tiny_model(cfg)))
    difference = relative_difference(results[1], results[0])
    tolerance = {"fp32": 1e-3, "fp16": 0.02, "bf16": 0.1}[precision]
    assert difference < tolerance * moved, f"{difference} of weights that moved by {moved}"


@in_full_float32()
def check_cuts_by_bytes(device: torch.device) -> None:
    """Check that a window cut by predicted bytes gives the steps of the whole window."""
    cfg = every_anchor_counts(tiny_cfg("proposal_network", device=device))
    pixels = 64 * 64
    cost_model = CostModel(((0.0, 0.0, 1.0, 0.0, 0.0, 0.0),), limit_bytes=3 * pixels)
    results = []
    for cut_by in (None, cost_model):
        model = tiny_model(cfg)
        trainer = InjectedTrainer(model, _batches(), sgd(model), cost_model=cut_by)
        results.append(_trained(trainer))
    assert sorted(trainer.window_sizes) == [2, 3, 3], trainer.window_sizes
    moved = relative_difference(results[0], parameters(tiny_model(cfg)))
    difference = relative_difference(results[1], results[0])
    assert difference < 1e-3 * moved, f"{difference} of weights that moved by {moved}"


def check_memory_of_accumulation(device: torch.device) -> None:
    """Check that four micro-batches take the memory of one."""
    cfg = tiny_cfg("mask_rcnn", device=device)
    peaks = {}
    for steps in (1, 4):
        model = tiny_model(cfg)
        loader = [images(1, size=512)] * (3 * steps)
        trainer = AccumulatingTrainer(model, loader, sgd(model), steps)
        iterate(trainer)
        with peaks_of(device) as peak:
            iterate(trainer)
            peaks[steps] = peak.take()[0]
    gradients = sum(p.numel() * p.element_size() for p in model.parameters())
    assert peaks[4] <= 1.01 * peaks[1] + gradients, peaks


@in_full_float32()
def check_recovery(family: str, precision: str, device: torch.device) -> None:
    """Check that a failed allocation gives the step of two micro-batches, wherever it is.

    On a GPU the results are not equal to the last bit, because kernels add up in any order.
    """

    def one_iteration(micro_batch: Optional[int], fail_at: Sequence[int]) -> InjectedTrainer:
        seed_all()
        model = tiny_model(tiny_cfg(family, device=device))
        trainer = InjectedTrainer(
            model, [images(4)], sgd(model), 1, precision, micro_batch, RecoveryOptions()
        )
        trainer.injector = Injector(fail_at)
        iterate(trainer)
        return trainer

    expected = one_iteration(2, [])
    before = parameters(tiny_model(tiny_cfg(family, device=device)))
    moved = relative_difference(parameters(expected.model), before)
    points = one_iteration(None, []).injector.num_allocations
    for point in range(5, points, max(points // 4, 1)):
        trainer = one_iteration(None, [point])
        assert trainer.window_sizes == (2, 2), trainer.window_sizes
        gap = relative_difference(parameters(trainer.model), parameters(expected.model))
        assert gap < 0.01 * moved, f"{gap} of {moved} after allocation {point}"


@in_full_float32()
def check_technique(names: Sequence[str], device: torch.device) -> None:
    """Check that exact techniques keep gradients and take no more memory."""

    def step(names: Sequence[str]) -> tuple[dict[str, torch.Tensor], int]:
        there_already = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
        cfg = tiny_cfg("mask_rcnn", device=device)
        cfg.INPUT.MASK_FORMAT = "bitmask"
        for name in names:
            cfg = with_settings(cfg, dict(TECHNIQUES)[name].enabling_settings(cfg))
        model = apply_techniques("model", tiny_model(cfg), cfg)
        batch = images(2, size=512)
        for _ in range(2):  # the first warms up
            model.zero_grad(set_to_none=True)
            seed_all()
            with peaks_of(device) as peak, EventStorage():
                sum(model(batch).values()).backward()
                bytes_taken = peak.take()[0] - there_already
        gradients = {n: p.grad.cpu() for n, p in model.named_parameters() if p.grad is not None}
        return gradients, bytes_taken

    expected, plain = step([])
    actual, less = step(names)
    difference = relative_difference(actual, expected)
    assert difference < 1e-4, difference  # kernels add up in any order
    # Some save nothing at this size, and workspaces of cuDNN differ with the shape of a chunk.
    assert less <= 1.02 * plain, f"{less} bytes, without {plain}"
    if len(names) > 1:
        assert less < 0.8 * plain, f"{less} bytes, without {plain}"


def check_gradients_of_blocks(family: str, device: torch.device) -> None:
    """Some blocks recomputed and others offloaded, as plans have it: gradients to the last bit.

    Without ROIAlign, as in :func:`check_steps_are_detectron2s`.
    """

    def gradients(settings: dict[str, Any]) -> dict[str, torch.Tensor]:
        cfg = with_settings(tiny_cfg(family, device=device), settings)
        model = apply_techniques("model", tiny_model(cfg), cfg, announce=False)
        for _ in range(2):  # the first warms up
            model.zero_grad(set_to_none=True)
            seed_all()
            with EventStorage():
                sum(model(images(2, size=512)).values()).backward()
        return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}

    blocks = {"MEMFIT.CHECKPOINT.MODULES": ["backbone.bottom_up.res3", "*head"]}
    if device.type == "cuda":
        blocks["MEMFIT.OFFLOAD.MODULES"] = ["backbone.bottom_up.res2.*"]
    with deterministic():
        expected, again, actual = map(gradients, ({}, {}, blocks))
    repeats = f"{relative_difference(again, expected)} without it"
    assert expected.keys() == actual.keys()
    equal = all(torch.equal(actual[name], expected[name]) for name in expected)
    assert equal, f"{relative_difference(actual, expected)}, and {repeats}"


def check_snapshot(device: torch.device) -> None:
    """Check that a snapshot has owners, and PyTorch's own snapshot with it."""
    with tempfile.TemporaryDirectory() as folder:
        run_with_hooks(device, MemorySnapshot(folder, iteration=1))
        names = {file.name for file in Path(folder).iterdir()}
        snapshot = json.loads((Path(folder) / "memfit_memory_1.json").read_text())
    assert "memfit_memory_1.pickle" in names or device.type == "cpu", names
    assert snapshot["owners"]["parameters"] > 0


def check_no_false_alarm(device: torch.device) -> None:
    """Check that a healthy run causes no warning of a leak."""
    detector = LeakDetector(window=80, skip=20)
    run_with_hooks(device, detector, num_iterations=120)
    assert not detector._said


def check_calibration(device: torch.device) -> None:
    """Check that the device is measured, with its name."""
    values = calibrate(device, seconds=0.1)
    assert values["flops_per_s"]["float32"] > 1e9
    assert values["bytes_per_s"] > 1e8
    if device.type == "cuda":
        assert values["device_name"] == torch.cuda.get_device_name(device)
        assert 100 < values["context_mb"] < 2500
        assert values["flops_per_s"]["float16"] > values["flops_per_s"]["float32"] / 2


def run_with_hooks(device: torch.device, *hooks: Any, num_iterations: int = 4) -> Any:
    """Run a small training with hooks; return its event storage."""
    model = tiny_model(tiny_cfg("proposal_network", device=device))
    trainer = AccumulatingTrainer(model, [images(1)] * num_iterations, sgd(model))
    trainer.register_hooks(hooks)
    trainer.train(0, num_iterations)
    return trainer.storage


# By the name in reports.
CHECKS: dict[str, Check] = {
    "float32 is Detectron2's": partial(check_steps_are_detectron2s, "fp32"),
    "accumulation in float32": partial(check_accumulation, "fp32"),
    "accumulation in float16": partial(check_accumulation, "fp16"),
    "accumulation in bfloat16": partial(check_accumulation, "bf16"),
    "windows cut by bytes": check_cuts_by_bytes,
    "memory of accumulation": check_memory_of_accumulation,
    **{
        f"recovery, {family} in {precision}": partial(check_recovery, family, precision)
        for family in ("proposal_network", "mask_rcnn", "retinanet")
        for precision in ("fp32", "fp16")
    },
    **{f"technique {name}": partial(check_technique, [name]) for name in _EXACT},
    "all exact techniques": partial(check_technique, _EXACT),
    **{
        f"gradients of blocks, {family}": partial(check_gradients_of_blocks, family)
        for family in ("proposal_network", "retinanet")
    },
    "snapshot": check_snapshot,
    "no false alarm of a leak": check_no_false_alarm,
    "calibration": check_calibration,
}
