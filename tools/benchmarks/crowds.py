# Copyright (c) the d2_memfit developers.
"""Crowded images: the losses of a query model on many masks, as numbers and as packed bits.

One image of 800 x 1333 pixels, and the losses of one decoder layer of transformers' Mask2Former,
forward and backward. Both sides take turns in one process. The peak is that of all tensors without
predictions and annotations, counted byte by byte. Times are CPU seconds.
"""

import argparse
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from pages import markdown_table, write_section
from torch import nn
from transformers import AutoConfig
from transformers.models.mask2former.modeling_mask2former import Mask2FormerLoss

from d2_memfit.common import MB
from d2_memfit.config.load import load_cfg
from d2_memfit.memory import TensorMeter
from d2_memfit.techniques.registry import apply_techniques

from .common import CONFIG, machine

PAGE = Path(__file__).resolve().parents[2] / "docs" / "TECHNIQUES.md"
TOOL = "benchmark.py crowds"
PACKED = "MEMFIT.MASKS.PACKED"
HEIGHT, WIDTH, ROUNDS = 800, 1333, 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--masks", type=int, nargs="+", default=[500, 1000], help="numbers")


def run(args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    rows = [row for num in args.masks for row in compared(num)]
    table = markdown_table(["masks", "", "peak MiB", "CPU s", "largest difference"], rows)
    write_section(PAGE, "crowds", TOOL, f"{machine()}\n\n{table}")


class Criterion(nn.Module):
    """Losses of some masks and the gradient of the predictions, as one tensor."""

    def __init__(self) -> None:
        super().__init__()
        config: Any = AutoConfig.for_model("mask2former", num_labels=80)
        self.criterion = Mask2FormerLoss(config, {})

    def forward(self, masks: Any) -> torch.Tensor:
        torch.manual_seed(0)
        predicted = torch.randn(1, 100, HEIGHT // 4, WIDTH // 4).requires_grad_()
        labels, classes = torch.randint(80, (len(masks[0]),)), torch.randn(1, 100, 81)
        losses = self.criterion(predicted, classes, [m.float() for m in masks], [labels])
        total = torch.stack([*losses.values()])
        (gradient,) = torch.autograd.grad(total.sum(), predicted)
        return torch.cat([total, gradient.flatten()])


def compared(num: int) -> list[list[str]]:
    """Rows of a number of masks: as numbers, and packed."""
    torch.manual_seed(0)
    masks = torch.randint(2, (num, HEIGHT, WIDTH), dtype=torch.bool)
    cfg = load_cfg(CONFIG, [PACKED, True])
    sides = {"plain": Criterion(), PACKED: apply_techniques("model", Criterion(), cfg)}
    seconds: dict[str, list[float]] = {side: [] for side in sides}
    for _ in range(ROUNDS):
        for side, model in sides.items():
            start = time.process_time()
            model([masks])
            seconds[side].append(time.process_time() - start)
    rows, expected = [], None
    for side, model in sides.items():
        with TensorMeter() as meter:
            found = model([masks]).detach()
        expected = found if expected is None else expected
        numbers = f"{meter.peak_bytes / MB:,.0f}", f"{median(seconds[side]):.2f}"
        rows.append([f"{num:,}", side, *numbers, f"{float((found - expected).abs().max()):.0e}"])
    return rows
