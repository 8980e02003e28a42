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

from d2_memfit.common import MB
from d2_memfit.config.load import load_cfg
from d2_memfit.memory import TensorMeter
from d2_memfit.techniques.registry import apply_techniques

from .common import CONFIG, machine

PAGE = Path(__file__).resolve().parents[2] / "docs" / "TECHNIQUES.md"
TOOL = "benchmark.py crowds"
HEIGHT, WIDTH = 800, 1333


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--masks", type=int, nargs="+", default=[500, 1000], help="numbers")
    parser.add_argument("--rounds", type=int, default=3, help="times of each side")


def run(args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    rows = [row for num in args.masks for row in compared(num, args.rounds)]
    table = markdown_table(["masks", "", "peak MiB", "CPU s", "largest difference"], rows)
    write_section(PAGE, "crowds", TOOL, f"{machine()}\n\n{table}")


class Criterion(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        from transformers import AutoConfig
        from transformers.models.mask2former.modeling_mask2former import Mask2FormerLoss

        config: Any = AutoConfig.for_model("mask2former", num_labels=80)
        self.criterion = Mask2FormerLoss(config, {})

    def forward(self, predicted: Any, classes: Any, masks: Any, labels: Any) -> Any:
        return self.criterion(predicted, classes, [m.float() for m in masks], labels)


def compared(num: int, rounds: int) -> list[list[str]]:
    """Rows of a number of masks: as numbers, and packed."""
    torch.manual_seed(0)
    targets = torch.zeros(num, HEIGHT, WIDTH, dtype=torch.bool)
    for mask in targets:
        height, width = int(torch.randint(20, 260, ())), int(torch.randint(20, 440, ()))
        top, left = int(torch.randint(HEIGHT - height, ())), int(torch.randint(WIDTH - width, ()))
        mask[top : top + height, left : left + width] = True
    labels = torch.randint(80, (num,))
    predicted = torch.randn(1, 100, HEIGHT // 4, WIDTH // 4), torch.randn(1, 100, 81)
    packs = load_cfg(CONFIG, ["MEMFIT.MASKS.PACKED", True])
    sides = {
        "plain": Criterion(),
        "`MEMFIT.MASKS.PACKED True`": apply_techniques("model", Criterion(), packs),
    }

    def results(model: nn.Module) -> torch.Tensor:
        """All losses and the gradient of the predictions."""
        torch.manual_seed(1)
        inputs = [tensor.clone().requires_grad_() for tensor in predicted]
        losses = torch.stack([*model(*inputs, [targets], [labels]).values()])
        gradients = torch.autograd.grad(losses.sum(), inputs)
        return torch.cat([losses.detach(), *(g.flatten() for g in gradients)])

    found, peaks = {}, {}
    seconds: dict[str, list[float]] = {side: [] for side in sides}
    for side, model in sides.items():
        with TensorMeter() as meter:
            found[side] = results(model)
        peaks[side] = meter.peak_bytes
    for _ in range(rounds):
        for side, model in sides.items():
            start = time.process_time()
            results(model)
            seconds[side].append(time.process_time() - start)
    plain = found["plain"]
    return [
        [
            f"{num:,}",
            side,
            f"{peaks[side] / MB:,.0f}",
            f"{median(seconds[side]):.2f}",
            f"{float((found[side] - plain).abs().max()):.0e}" if side != "plain" else "",
        ]
        for side in sides
    ]
