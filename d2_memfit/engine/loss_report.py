# Copyright (c) the d2_memfit developers.
"""What the check of losses found, and how losses are weighted since."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from .collectives import Site

HELP = "docs/ACCUMULATION.md#a-loss-that-is-off"
_ELEMENTS = 2**20


@dataclass
class LossReport:
    """Result of the check. Plain data: all ranks and checkpoints get it.

    Attributes:
        counts: sites that are answered with the window's counts.
        formulas: numbers per object and per image that a count follows; empty if it follows none.
        weights: "sum" or "objects" for losses that are not weighted by images.
        estimates: whether a loss is divided by a running mean, estimated within a window.
        simulates_ranks: whether a second rank is simulated, so that one rank adds up its counts.
        names: of the losses that were not zero.
        off: the relative distance of the gradient of each loss that is off.
        unchecked: why a loss, or all ("losses"), could not be checked.
        changed: names of what a forward changes in the model.
        counters: those of numbers that grow by one with each forward.
        forwards: images through the model in the check.
    """

    counts: list[Site] = field(default_factory=list)
    formulas: dict[Site, Sequence[float]] = field(default_factory=dict)
    weights: dict[str, str] = field(default_factory=dict)
    estimates: bool = False
    simulates_ranks: bool = False
    names: list[str] = field(default_factory=list)
    off: dict[str, float] = field(default_factory=dict)
    unchecked: dict[str, str] = field(default_factory=dict)
    changed: list[str] = field(default_factory=list)
    counters: list[str] = field(default_factory=list)
    forwards: int = 0

    def __str__(self) -> str:
        exact = [k for k in self.names if k not in self.off and k not in self.unchecked]
        lines = [f"like one forward over all images: {', '.join(exact)}"] if exact else []
        lines += [f"not checked: {name} ({why})" for name, why in self.unchecked.items()]
        if self.changed:
            lines.append(f"each forward changes {', '.join(self.changed)}")
        return f"in {self.forwards} forwards: {'; '.join(lines)}"

    def complaints(self) -> list[str]:
        """A line for each loss that is off, for each counter, or for a check that failed."""
        why = self.unchecked.get("losses")
        lines = [f"the losses of micro-batches are not checked: {why}. See {HELP}"] if why else []
        off = "{}: {:.2g} of the gradient off in micro-batches. See {}"
        lines += [off.format(name, distance, HELP) for name, distance in self.off.items()]
        early = "{} counts forwards, not iterations: a warm-up that depends on it ends too early"
        return lines + [early.format(name) for name in self.counters]


def gradient_of(parameters: Sequence[nn.Parameter]) -> torch.Tensor:
    """The gradient: every n-th element of each parameter's, about a million in all."""
    step = -(-sum(p.numel() for p in parameters) // _ELEMENTS)
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad.to_dense() for p in parameters]
    return torch.cat([gradient.flatten()[::step] for gradient in gradients])
