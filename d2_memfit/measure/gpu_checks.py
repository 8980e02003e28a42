# Copyright (c) the d2_memfit developers.
"""Checks that need a GPU: its allocator, its number formats, its limits."""

import gc
import math
from functools import partial
from typing import Any

import torch
from detectron2.utils.events import EventStorage
from torch import nn

from ..engine import AccumulatingTrainer, MemoryMonitor, RecoveryOptions, recovering_inference
from ..errors import ConfigError
from ..memory import OwnerMeter, enforce_budget, is_out_of_memory
from ..planner import WorstCase, estimate_memory, plan_memory
from ..planner.autocast import casts_of_cuda
from ..torch_private import clear_cublas_workspaces
from .device_checks import Check, check_steps_are_detectron2s, run_with_hooks, sgd
from .injection import iterate
from .peaks import limited, peaks_of
from .tiny import images, tiny_cfg, tiny_model

__all__ = ["GPU_CHECKS"]

_CASE = WorstCase((480, 640), 30)


def check_budget(device: torch.device) -> None:
    """Check that allocations above the budget fail, and that no budget exceeds the card."""
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


def check_real_out_of_memory(device: torch.device) -> None:
    """Check that a batch that does not fit is split, and memory does not grow."""
    model = tiny_model(tiny_cfg("mask_rcnn", device=device))
    loader = [images(8, size=512)] * 4
    trainer = AccumulatingTrainer(model, loader, sgd(model), recovery=RecoveryOptions())
    one = AccumulatingTrainer(model, [images(1, size=512)] * 3, sgd(model))
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
    """Check that evaluation with too little memory gives the same results."""
    model = tiny_model(tiny_cfg("mask_rcnn", device=device)).eval()
    batch = images(8, size=512)
    with torch.no_grad():
        expected = [len(found["instances"]) for found in model(batch)]
        with limited(device, 64 * 2**20), recovering_inference(model, RecoveryOptions()):
            actual = [len(found["instances"]) for found in model(batch)]
    assert actual == expected


def check_owners(device: torch.device) -> None:
    """Check that the bytes of all owners add up to the allocator's count."""
    before = torch.cuda.memory_allocated(device)
    model = tiny_model(tiny_cfg("mask_rcnn", device=device))
    with OwnerMeter(model) as meter, EventStorage():
        losses = model(images(2, size=512))
        on_device = torch.cuda.memory_allocated(device) - before
        counted = sum(meter.live.values())
    del losses
    assert math.isclose(counted, on_device, rel_tol=0.01), f"{counted} of {on_device} bytes"


def check_reports(device: torch.device) -> None:
    """Check that reports equal the allocator's values, and that peaks are not reset."""
    ballast = torch.ones(2**27, device=device)  # 0.5 GB
    del ballast
    ever = torch.cuda.max_memory_allocated(device)
    latest = {k: v[0] for k, v in run_with_hooks(device, MemoryMonitor(2)).latest().items()}
    assert torch.cuda.max_memory_allocated(device) == ever
    assert latest["memfit/alloc_retries"] == torch.cuda.memory_stats(device)["num_alloc_retries"]
    assert 0 < latest["memfit/allocated_gb"] <= latest["memfit/allocated_peak_gb"] < 0.5
    assert latest["memfit/reserved_gb"] <= torch.cuda.max_memory_reserved(device) / 2**30


def check_formats_of_dry_runs(device: torch.device) -> None:
    """Check that a dry run on the CPU has autocast's number formats of this device."""
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
    """Check that a probe leaves nothing behind, and that a probed plan fits."""
    cfg = tiny_cfg("mask_rcnn", device=device)
    cfg.SOLVER.IMS_PER_BATCH = 8
    torch.zeros(1, device=device)

    def state() -> tuple[Any, ...]:
        clear_cublas_workspaces()
        torch.cuda.empty_cache()
        random_state = torch.cuda.get_rng_state(device).tolist(), torch.get_rng_state().tolist()
        return torch.cuda.memory_allocated(device), *random_state

    before = state()
    measured = estimate_memory(cfg, batch=_CASE, probe=True)
    assert state() == before
    total = sum(measured.breakdown.values())
    assert math.isclose(total, measured.peak_allocated_gb, rel_tol=1e-6)
    budget_gb = (measured.device_total_gb - 0.3 * measured.peak_allocated_gb) / 0.9
    plan = plan_memory(cfg, budget_gb, batch=_CASE, probe=True)
    assert plan.fits
    assert plan.estimate.device_total_gb <= 0.95 * budget_gb
    half = torch.cuda.get_device_properties(device).total_memory // 2
    torch.empty(half, dtype=torch.uint8, device=device)  # no limit is left


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
