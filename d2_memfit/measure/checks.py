"""Whether d2_memfit does on this device what it says: what `pytest -m gpu` runs, without pytest.

A check is a function of the device that raises what is wrong.
"""

import gc
import json
import math
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Optional

import torch
from detectron2.engine import AMPTrainer, SimpleTrainer
from detectron2.utils.events import EventStorage
from torch import nn

from ..config import with_settings
from ..engine import (
    AccumulatingTrainer,
    LeakDetector,
    MemoryMonitor,
    MemorySnapshot,
    Precision,
    RecoveryOptions,
    recovering_inference,
)
from ..errors import ConfigError
from ..memory import OwnerMeter, enforce_budget, is_out_of_memory
from ..planner import WorstCase, estimate_memory, plan_memory
from ..planner.autocast import casts_of_cuda
from ..planner.calibration import calibrate
from ..techniques import TECHNIQUES, apply_techniques
from .injection import InjectedTrainer, Injector, iterate, seed_all
from .peaks import limited, peaks_of
from .tiny import (
    every_anchor_counts,
    images,
    parameters,
    relative_difference,
    tiny_cfg,
    tiny_model,
)

__all__ = ["CHECKS", "GPU_CHECKS", "Check"]

Check = Callable[[torch.device], None]

_CASE = WorstCase(((480, 640),), 30, (480, 640), (480, 640))
_EXACT = sorted(n for n, t in TECHNIQUES if t.tier == "exact" and t.part == "model")


def _sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4)


def _batches(num: int = 3) -> list[list[dict[str, Any]]]:
    return [images(8, first=8 * i) for i in range(num)]


def _cut(batches: Sequence[list[Any]], sizes: Sequence[int]) -> Iterator[list[Any]]:
    """Each batch in smaller ones of these sizes."""
    for batch in batches:
        start = 0
        for size in sizes:
            yield batch[start : start + size]
            start += size


def _trained(trainer: Any, num_iterations: int = 3) -> dict[str, torch.Tensor]:
    iterate(trainer, num_iterations)
    return parameters(trainer.model)


def check_steps_are_detectron2s(precision: str, device: torch.device) -> None:
    """One forward per iteration: Detectron2's own trainer, to the last bit.

    Without ROIAlign, of which torchvision's deterministic one needs a compiler.
    """
    cfg = tiny_cfg("proposal_network", device=device)
    theirs = SimpleTrainer if precision == "fp32" else AMPTrainer
    results = []
    with _deterministic():
        for make in (theirs, partial(AccumulatingTrainer, precision=precision)):
            model = tiny_model(cfg)
            seed_all()
            results.append(_trained(make(model, _batches(), _sgd(model))))
    if not all(torch.equal(results[0][name], results[1][name]) for name in results[0]):
        raise AssertionError(f"weights differ by {relative_difference(*results)}, relatively")


@contextmanager
def _in_full_float32() -> Iterator[None]:
    """cuDNN's TF32 rounds one shape of a batch more than another."""
    allowed = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32 = allowed


@_in_full_float32()
def check_accumulation(precision: str, device: torch.device) -> None:
    """Micro-batches of 3, 3 and 2 images make the steps of 8."""
    try:
        Precision(precision, device)
    except ConfigError:  # the device has no such format
        return
    cfg = every_anchor_counts(tiny_cfg("proposal_network", device=device))
    results = []
    for sizes, steps in (((8,), 1), ((3, 3, 2), 3)):
        model = tiny_model(cfg)
        loader = _cut(_batches(), sizes)
        results.append(_trained(AccumulatingTrainer(model, loader, _sgd(model), steps, precision)))
    moved = relative_difference(results[0], parameters(tiny_model(cfg)))
    difference = relative_difference(results[1], results[0])
    tolerance = {"fp32": 1e-3, "fp16": 0.02, "bf16": 0.1}[precision]
    assert difference < tolerance * moved, f"{difference} of weights that moved by {moved}"


def check_memory_of_accumulation(device: torch.device) -> None:
    """Four micro-batches take the memory of one."""
    cfg = tiny_cfg("mask_rcnn", device=device)
    peaks = {}
    for steps in (1, 4):
        model = tiny_model(cfg)
        loader = [images(1, size=512)] * (3 * steps)
        trainer = AccumulatingTrainer(model, loader, _sgd(model), steps)
        iterate(trainer)
        with peaks_of(device) as peak:
            iterate(trainer)
            peaks[steps] = peak.take()[0]
    gradients = sum(p.numel() * p.element_size() for p in model.parameters())
    assert peaks[4] <= 1.01 * peaks[1] + gradients, peaks


def check_budget(device: torch.device) -> None:
    """What a budget does not allow is refused, and one above the card is no budget."""
    name = str(device)
    torch.zeros(1, device=device)
    try:
        enforce_budget(2, name)
        half = torch.empty(2**29, dtype=torch.uint8, device=device)
        try:
            torch.empty(2**31, dtype=torch.uint8, device=device)
        except RuntimeError as e:
            was_refused = is_out_of_memory(e)
        else:
            was_refused = False
        assert was_refused, "2 GB more were given"
        assert torch.cuda.memory_reserved(device) <= 2 * 2**30
        del half
        try:
            enforce_budget(10_000, name)
        except ConfigError:
            was_refused = True
        else:
            was_refused = False
        assert was_refused, "a budget of 10,000 GB was accepted"
    finally:
        enforce_budget(None, name)
    total = torch.cuda.get_device_properties(device).total_memory
    torch.empty(min(total // 3, 2**32), dtype=torch.uint8, device=device)  # no limit is left


@_in_full_float32()
def check_recovery(family: str, precision: str, device: torch.device) -> None:
    """Whatever allocation of a window fails, its step is that of two micro-batches from the start.

    On a GPU kernels add up in any order, so not to the last bit.
    """

    def one_iteration(micro_batch: Optional[int], fail_at: Sequence[int]) -> InjectedTrainer:
        seed_all()
        model = tiny_model(tiny_cfg(family, device=device))
        trainer = InjectedTrainer(
            model, [images(4)], _sgd(model), 1, precision, micro_batch, RecoveryOptions()
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


def check_real_out_of_memory(device: torch.device) -> None:
    """A batch that does not fit is split, and memory does not grow with it."""
    model = tiny_model(tiny_cfg("mask_rcnn", device=device))
    loader = [images(8, size=512)] * 4
    trainer = AccumulatingTrainer(model, loader, _sgd(model), recovery=RecoveryOptions())
    one = AccumulatingTrainer(model, [images(1, size=512)] * 3, _sgd(model))
    iterate(one)
    base = torch.cuda.memory_allocated(device)
    with peaks_of(device) as peak:
        iterate(one)
        of_one = peak.take()[0] - base
    one.optimizer.zero_grad(set_to_none=True)
    with limited(device, 3 * of_one):
        iterate(trainer)
        assert trainer.recovery is not None
        assert trainer.recovery.oom_events >= 1
        assert trainer.recovery.size.images in (1, 2, 4)
        gc.collect()
        after_first = torch.cuda.memory_allocated(device)
        iterate(trainer, 3, first=1)
    gc.collect()
    assert torch.cuda.memory_allocated(device) <= after_first + 2**20


def check_evaluation_under_a_limit(device: torch.device) -> None:
    """Evaluation that does not fit finds what it would have found."""
    model = tiny_model(tiny_cfg("mask_rcnn", device=device)).eval()
    batch = images(8, size=512)
    with torch.no_grad():
        expected = [len(found["instances"]) for found in model(batch)]
        with limited(device, 64 * 2**20), recovering_inference(model, RecoveryOptions()):
            actual = [len(found["instances"]) for found in model(batch)]
    assert actual == expected


@_in_full_float32()
def check_technique(names: Sequence[str], device: torch.device) -> None:
    """Exact techniques leave gradients as they are, and take no more memory."""

    def step(names: Sequence[str]) -> tuple[dict[str, torch.Tensor], int]:
        there_already = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
        cfg = tiny_cfg("mask_rcnn", device=device)
        cfg.INPUT.MASK_FORMAT = "bitmask"
        for name in names:
            cfg = with_settings(cfg, dict(TECHNIQUES)[name].settings(cfg))
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


def check_owners(device: torch.device) -> None:
    """What tensors are counted for adds up to what the allocator says."""
    before = torch.cuda.memory_allocated(device)
    model = tiny_model(tiny_cfg("mask_rcnn", device=device))
    with OwnerMeter(model) as meter, EventStorage():
        losses = model(images(2, size=512))
        on_device = torch.cuda.memory_allocated(device) - before
        counted = sum(meter.live.values())
    del losses
    assert math.isclose(counted, on_device, rel_tol=0.01), f"{counted} of {on_device} bytes"


def check_reports(device: torch.device) -> None:
    """Reports are the allocator's, and its peak statistics are not reset."""
    ballast = torch.ones(2**27, device=device)  # 0.5 GB
    del ballast
    ever = torch.cuda.max_memory_allocated(device)
    latest = {k: v[0] for k, v in _with_hooks(device, MemoryMonitor(2)).latest().items()}
    assert torch.cuda.max_memory_allocated(device) == ever
    assert latest["memfit/alloc_retries"] == torch.cuda.memory_stats(device)["num_alloc_retries"]
    assert 0 < latest["memfit/allocated_gb"] <= latest["memfit/allocated_peak_gb"] < 0.5
    assert latest["memfit/reserved_gb"] <= torch.cuda.max_memory_reserved(device) / 2**30


def check_snapshot(device: torch.device) -> None:
    """A snapshot has owners, and PyTorch's own beside it."""
    with tempfile.TemporaryDirectory() as folder:
        _with_hooks(device, MemorySnapshot(folder, iteration=1))
        names = {file.name for file in Path(folder).iterdir()}
        snapshot = json.loads((Path(folder) / "memfit_memory_1.json").read_text())
    assert "memfit_memory_1.pickle" in names or device.type == "cpu", names
    assert snapshot["owners"]["parameters"] > 0


def check_no_false_alarm(device: torch.device) -> None:
    """A healthy run is not said to leak."""
    detector = LeakDetector(window=80, skip=20)
    _with_hooks(device, detector, num_iterations=120)
    assert not detector._has_warned


def check_formats_of_dry_runs(device: torch.device) -> None:
    """A dry run on the CPU has the number formats that autocast has on this device."""
    functions: dict[str, tuple[Any, ...]] = {
        "conv2d": (torch.ones(8, 8, 1, 1),),
        "group_norm": (4,),
        "interpolate": (None, 2.0),
        "softmax": (1,),
        "relu": (),
        "sigmoid": (),
        "gelu": (),
    }

    def formats(kind: str) -> list[torch.dtype]:
        x = torch.ones(2, 8, 4, 4, dtype=torch.float16, device=kind)
        found = []
        for name, arguments in functions.items():
            args = [a.to(kind) if torch.is_tensor(a) else a for a in arguments]
            with torch.autocast(kind, dtype=torch.float16):
                found.append(getattr(nn.functional, name)(x, *args).dtype)
        return found

    with casts_of_cuda():
        expected = formats("cpu")
    assert formats(device.type) == expected, list(functions)


def check_probe(device: torch.device) -> None:
    """A probe leaves nothing behind, and a plan that was probed fits for real."""
    cfg = tiny_cfg("mask_rcnn", device=device)
    cfg.SOLVER.IMS_PER_BATCH = 8
    torch.zeros(1, device=device)

    def state() -> tuple[Any, ...]:
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
        random_state = torch.cuda.get_rng_state(device).tolist(), torch.get_rng_state().tolist()
        return torch.cuda.memory_allocated(device), *random_state

    before = state()
    measured = estimate_memory(cfg, case=_CASE, probe=True)
    assert state() == before
    total = sum(measured.breakdown.values())
    assert math.isclose(total, measured.peak_allocated_gb, rel_tol=1e-6)
    budget_gb = (measured.device_total_gb - 0.3 * measured.peak_allocated_gb) / 0.9
    plan = plan_memory(cfg, budget_gb, case=_CASE, probe=True)
    assert plan.fits
    assert plan.estimate.device_total_gb <= 0.95 * budget_gb
    half = torch.cuda.get_device_properties(device).total_memory // 2
    torch.empty(half, dtype=torch.uint8, device=device)  # no limit is left


def check_calibration(device: torch.device) -> None:
    """The device is measured, and known by its name."""
    values = calibrate(device, seconds=0.1)
    assert values["flops_per_s"]["float32"] > 1e9
    assert values["bytes_per_s"] > 1e8
    if device.type == "cuda":
        assert values["device_name"] == torch.cuda.get_device_name(device)
        assert 100 < values["context_mb"] < 2500
        assert values["flops_per_s"]["float16"] > values["flops_per_s"]["float32"] / 2


def _with_hooks(device: torch.device, *hooks: Any, num_iterations: int = 4) -> Any:
    """The event storage of a small run."""
    model = tiny_model(tiny_cfg("proposal_network", device=device))
    trainer = AccumulatingTrainer(model, [images(1)] * num_iterations, _sgd(model))
    trainer.register_hooks(hooks)
    trainer.train(0, num_iterations)
    return trainer.storage


@contextmanager
def _deterministic() -> Iterator[None]:
    """While open, operators compute the same every time, as far as PyTorch has such."""
    algorithms = torch.are_deterministic_algorithms_enabled()
    cudnn = torch.backends.cudnn.deterministic
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of operators that have no such algorithm
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.backends.cudnn.deterministic = True
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(algorithms)
            torch.backends.cudnn.deterministic = cudnn


# By a name for people; on any device, and on GPUs only.
CHECKS: dict[str, Check] = {
    "float32 is Detectron2's": partial(check_steps_are_detectron2s, "fp32"),
    "accumulation in float32": partial(check_accumulation, "fp32"),
    "accumulation in float16": partial(check_accumulation, "fp16"),
    "accumulation in bfloat16": partial(check_accumulation, "bf16"),
    "memory of accumulation": check_memory_of_accumulation,
    **{
        f"recovery, {family} in {precision}": partial(check_recovery, family, precision)
        for family in ("proposal_network", "mask_rcnn", "retinanet")
        for precision in ("fp32", "fp16")
    },
    **{f"technique {name}": partial(check_technique, [name]) for name in _EXACT},
    "all exact techniques": partial(check_technique, _EXACT),
    "snapshot": check_snapshot,
    "no false alarm of a leak": check_no_false_alarm,
    "calibration": check_calibration,
}
GPU_CHECKS: dict[str, Check] = {
    "float16 is Detectron2's": partial(check_steps_are_detectron2s, "fp16"),
    "budget": check_budget,
    "real out-of-memory error": check_real_out_of_memory,
    "evaluation under a limit": check_evaluation_under_a_limit,
    "owners": check_owners,
    "reports": check_reports,
    "formats of dry runs": check_formats_of_dry_runs,
    "probe": check_probe,
}
