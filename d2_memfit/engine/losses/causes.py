# Copyright (c) the d2_memfit developers.
"""Why the gradient of a loss differs in micro-batches, and what helps."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from . import sites
from .pairs import LIMIT, Pair
from .sketch import relative

__all__ = ["Evidence", "cause_of", "weights_of_parts"]


@dataclass(frozen=True)
class Evidence:
    """What a test has found about losses that are wrong for one reason.

    Attributes:
        names: of the losses.
        pair: the images together and in parts, with the gradient of these losses.
        broken_counts: counts that do not add up, on which the losses depend, as text.
        frozen: whether the losses are right if batch normalisation uses its running statistics.
        restored: whether the losses are right if each part starts from the same state.
        state: names of what a forward changes in the model.
        norms: names of layers of batch normalisation that are trained.
    """

    names: Sequence[str]
    pair: Pair
    broken_counts: Sequence[str]
    frozen: bool
    restored: bool
    state: Sequence[str]
    norms: Sequence[str]

    @property
    def objects(self) -> list[float]:
        """The number of objects in each part."""
        return [part.counts[sites.OBJECTS].item() for part in self.pair.parts.each]

    def is_right(self, weights: Sequence[float]) -> bool:
        """Whether the parts have the gradient of the whole with these weights."""
        whole = self.pair.whole.gradient
        pairs = zip(weights, self.pair.parts.gradients)
        parts = sum((w * part for w, part in pairs), torch.zeros_like(whole))
        return relative(parts - whole, whole) <= LIMIT

    def has_values_of(self, weights: Sequence[float]) -> bool:
        """Whether the parts have the values of the whole with these weights."""
        whole = sum(map(self.pair.whole.loss, self.names))
        losses = [part.losses for part in self.pair.parts.each]
        values = [sum(own.get(name, 0.0) for name in self.names) for own in losses]
        return abs(sum(w * v for w, v in zip(weights, values)) - whole) <= LIMIT * abs(whole)


def weights_of_parts(
    whole: torch.Tensor, parts: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, float]:
    """The weights of the parts' gradients whose sum is nearest to the whole's, and its distance."""
    columns = torch.stack(list(parts), 1)
    weights = torch.linalg.lstsq(columns, whole[:, None], driver="gelsd").solution[:, 0]
    return weights, relative(columns @ weights - whole, whole)


def cause_of(found: Evidence) -> str:
    """The cause, and a remedy for it. Causes that were found by running the model come first."""
    names = ", ".join(f'["{name}", "{{}}"]' for name in found.names)
    key = f"MEMFIT.NORMALIZERS.LOSSES [{names}]"
    objects = [max(n, 1.0) for n in found.objects]  # a batch without any is divided by 1
    if not math.isfinite(found.pair.distance):
        return (
            "its gradient is infinite or NaN for some images, such as those without labels. Look "
            "for a square root, a logarithm or a division at zero"
        )
    weights, rest = weights_of_parts(found.pair.whole.gradient, found.pair.parts.gradients)
    if found.broken_counts:
        return (
            f"its count does not add up over micro-batches: {'; '.join(found.broken_counts)}. "
            "Declare the raw count there. Clamp or add to it after the all_reduce; the limit of a "
            "window_count is its argument minimum"
        )
    if found.frozen:
        return (
            f"batch normalisation takes the statistics of a micro-batch ({_few(found.norms)}). Use "
            "MODEL.*.NORM FrozenBN or GN, or larger micro-batches"
        )
    if found.restored:
        return (
            f"it depends on {', '.join(found.state)}, which each forward changes, so that an "
            "iteration changes it once per micro-batch. Change it once per iteration, such as in a "
            "hook's after_step, or freeze it"
        )
    if found.is_right([1.0] * len(objects)):
        return (
            f"it is a sum over images, not a mean. Set {key.format(*['sum'] * len(found.names))}, "
            "or divide it by the number of images"
        )
    if found.is_right([n / max(sum(found.objects), 1.0) for n in objects]):
        return (
            "it is divided by the objects of its micro-batch. Set "
            f"{key.format(*['objects'] * len(found.names))}, or divide by "
            "d2_memfit.window_count(objects)"
        )
    if rest <= LIMIT and found.has_values_of(weights.tolist()):
        return (
            "it is divided by a count of its micro-batch. Divide by d2_memfit.window_count(count)"
        )
    if rest <= LIMIT:
        return (
            "its gradient has a factor that the forward computes from its own micro-batch. Compute "
            "the factor for each image"
        )
    changes = (
        f", and on {', '.join(found.state)}, which each forward changes" if found.state else ""
    )
    if found.norms:
        changes += f", and on the statistics of batch normalisation ({_few(found.norms)})"
    return (
        f"it depends on the images of a forward together{changes}, such as on pairs of them or on "
        "the hardest elements of the batch. No cut has the gradient of the whole window: raise "
        "MEMFIT.MICRO_BATCH, or compute it for each image"
    )


def _few(names: Sequence[str]) -> str:
    more = f" and {len(names) - 2} more" if len(names) > 2 else ""
    return f"{', '.join(names[:2])}{more}"
