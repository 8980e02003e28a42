# Copyright (c) the d2_memfit developers.
"""Why the gradient of a loss is another one in micro-batches, and what helps."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from .sketch import relative

__all__ = ["Evidence", "cause_of", "weights_of_parts"]


@dataclass
class Evidence:
    """What a test has found about losses that are wrong for one reason.

    Attributes:
        names: of the losses.
        whole, whole_loss: gradient and value of all images together.
        parts, part_losses: those of the parts, without their shares.
        objects: number of them in each part.
        limit: distance that is right.
        broken_counts: counts that do not add up, on which the losses depend, as text.
        frozen, restored: whether the losses are right with the running statistics of batch
            normalisation, and if each part finds the state at the start.
        state: names of what a forward changes.
        norms: names of layers of batch normalisation that are trained.
    """

    names: Sequence[str]
    whole: torch.Tensor
    whole_loss: float
    parts: Sequence[torch.Tensor]
    part_losses: Sequence[float]
    objects: Sequence[float]
    limit: float
    broken_counts: Sequence[str] = ()
    frozen: bool = False
    restored: bool = False
    state: Sequence[str] = ()
    norms: Sequence[str] = ()
    weights: torch.Tensor = field(init=False)
    rest: float = field(init=False)

    def __post_init__(self) -> None:
        self.weights, self.rest = weights_of_parts(self.whole, self.parts)

    def is_right(self, weights: Sequence[float]) -> bool:
        """Whether the parts have the gradient of the whole with these weights."""
        pairs = zip(weights, self.parts)
        parts = sum((w * part for w, part in pairs), torch.zeros_like(self.whole))
        return relative(parts - self.whole, self.whole) <= self.limit

    @property
    def has_values_too(self) -> bool:
        """Whether the weights of the gradients are those of the values."""
        value = sum(w * v for w, v in zip(self.weights.tolist(), self.part_losses))
        return abs(value - self.whole_loss) <= self.limit * abs(self.whole_loss)


def weights_of_parts(
    whole: torch.Tensor, parts: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, float]:
    """The weights of the parts' gradients that come nearest to the whole's, and what is left."""
    columns = torch.stack(list(parts), 1)
    weights = torch.linalg.lstsq(columns, whole[:, None], driver="gelsd").solution[:, 0]
    return weights, relative(columns @ weights - whole, whole)


def cause_of(found: Evidence) -> str:
    """The cause, and a remedy that works for it. Causes that were seen by running come first."""
    names = ", ".join(f'["{name}", "{{}}"]' for name in found.names)
    key = f"MEMFIT.NORMALIZERS.LOSSES [{names}]"
    objects = [max(n, 1.0) for n in found.objects]  # a batch without any is divided by 1
    if found.broken_counts:
        return (
            f"its count does not add up over micro-batches: {'; '.join(found.broken_counts)}. "
            "Declare the raw count there. Clamp or add to it after the all_reduce; the limit of a "
            "window_count is its argument minimum"
        )
    if found.frozen:
        few = ", ".join(found.norms[:2])
        return (
            f"batch normalisation takes the statistics of a micro-batch ({few}"
            f"{f' and {len(found.norms) - 2} more' if len(found.norms) > 2 else ''}). Use "
            "MODEL.*.NORM FrozenBN or GN, or larger micro-batches"
        )
    if found.restored:
        return (
            f"it depends on {', '.join(found.state)}, which each forward changes, so that an "
            "iteration changes it once per micro-batch. Change it once per iteration, such as in a "
            "hook's after_step, or freeze it"
        )
    if found.is_right([1.0] * len(found.parts)):
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
    if found.rest <= found.limit and found.has_values_too:
        return (
            "it is divided by a count of its micro-batch. Divide by d2_memfit.window_count(count)"
        )
    if found.rest <= found.limit:
        return (
            "its gradient has a factor that the forward computes from its own micro-batch. Compute "
            "the factor for each image"
        )
    changes = (
        f", and on {', '.join(found.state)}, which each forward changes" if found.state else ""
    )
    return (
        f"it depends on the images of a forward together{changes}, such as on pairs of them or on "
        "the hardest elements of the batch. No cut has the gradient of the whole window: raise "
        "MEMFIT.MICRO_BATCH, or compute it for each image"
    )
