# Copyright (c) the d2_memfit developers.
"""The counts of a window's forwards, and the answers that the model gets in their place."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Optional, TypeVar, Union

import torch

from ...common.patching import replaced_functions
from ...compat.pytorch import cross_entropy_owner
from ...counts import (
    Collective,
    Handler,
    PretendedRanks,
    counts_answered_by,
    noticed_collectives,
    place_of_caller,
)
from ...memory import is_out_of_memory
from ..window import MicroBatch, count_objects
from . import sites
from .communication import Spared
from .sites import Counts, Site

__all__ = ["Answers", "Totals"]

Number = TypeVar("Number", float, torch.Tensor)

_REDUCTION_MEAN = 1  # what PyTorch's functions of losses call it
_TINY = 1e-12  # the sum of the weights of no element


@dataclass(frozen=True)
class Totals:
    """The counts of a whole window. Without any, each forward is a window of its own.

    Args:
        counts: of all ranks; counts of means are of this rank if no batches are accumulated.
        images: behind the counts of all ranks.
        mean_images: behind the counts of means.
        ranks: number of ranks.
    """

    counts: Counts = field(default_factory=dict)
    images: float = 0.0
    mean_images: float = 0.0
    ranks: int = 1


class Answers:
    """Stands between a model and the other ranks while the model runs.

    It notes the model's counts. It answers an ``all_reduce`` of a count, and ``window_count``, with
    the window's count. A count without a total is answered with this forward's own, as if all ranks
    had the same.

    Args:
        communicate: handles collectives that are not counts.
        totals: the window's counts.
        weights: for a loss, the count by which micro-batches are weighted in place of images.
        pretended: on one rank, tells the model that there are two ranks.
        is_alone: whether no other rank takes part, as in tests and while counting.

    Attributes:
        is_asked: whether the model or an adapter has asked for anything of the window.
        large: sums over ranks that may not be counts, by their sites.
    """

    def __init__(
        self,
        communicate: Handler,
        totals: Optional[Totals] = None,
        weights: Optional[Mapping[str, Site]] = None,
        pretended: Optional[PretendedRanks] = None,
        is_alone: bool = False,
    ) -> None:
        self.is_asked = False
        self.large: dict[Site, str] = {}
        self._is_alone = is_alone
        self._communicate = communicate
        self._totals = totals or Totals()
        self._weights = weights or {}
        self._pretended = pretended
        self._noted: list[dict[Site, Any]] = []
        self._forward: dict[Site, Any] = {}  # counts of the running one
        self._calls: Counter[Any] = Counter()

    @property
    def counts(self) -> list[Counts]:
        """The counts of each completed forward. This waits for the device."""
        return [sites.added_up([noted]) for noted in self._noted]

    @contextmanager
    def answering(self, micro_batch: MicroBatch, replays: bool = False) -> Iterator[None]:
        """Note and answer counts in a micro-batch's forward.

        Args:
            replays: whether this is its backward, which may compute parts of the forward again.
                They get the same answers.

        Raises:
            Spared: a function cannot work with a second rank, and sees one rank from now on.
        """
        if not replays:
            objects = count_objects(micro_batch.data)
            self._forward = {sites.IMAGES: micro_batch.num_images, sites.OBJECTS: objects}
        self._calls.clear()
        try:
            with (
                counts_answered_by(self),
                noticed_collectives(self._handle),
                replaced_functions(
                    [cross_entropy_owner], {"cross_entropy_loss": self._cross_entropy}
                ),
                self._pretended.told() if self._pretended else nullcontext(),
            ):
                yield
        except Exception as e:  # a model without another rank may raise anything
            if self._pretended is None or replays or is_out_of_memory(e):
                raise
            if not self._pretended.spare(e):
                raise
            raise Spared(f"{type(e).__name__}: {e}") from e
        if not replays:
            self._noted.append(self._forward)

    def weighted(self, losses: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """The losses, so that the micro-batch's share of the images is the right weight of each."""
        return {
            name: loss * self._factor(self._weights[name]) if name in self._weights else loss
            for name, loss in losses.items()
        }

    @property
    def share(self) -> float:
        """Images of the running micro-batch over those of the window, for a mean."""
        self.is_asked = True
        return self._share(self._totals.mean_images)

    def count(self, own: Number, minimum: float) -> Number:
        """Answer a call of :func:`~d2_memfit.counts.window_counts.window_count`."""
        return self._answer(sites.COUNT, own, minimum, self._totals.images)

    def factor(self, own: Number, minimum: float) -> Number:
        """Answer a call of :func:`~d2_memfit.counts.window_counts.mean_factor`."""
        return _limited(own, minimum) / self._answer(
            sites.MEAN, own, minimum, self._totals.mean_images
        )

    def _answer(self, kind: str, own: Number, minimum: float, images: float) -> Number:
        """This forward's share of the window's count."""
        site = self._note(kind, own)
        if site not in self._totals.counts:
            return _limited(own, minimum)
        answer = self._totals.counts[site].clamp(min=minimum) * self._share(images)
        if isinstance(own, torch.Tensor):
            dtype = own.dtype if own.is_floating_point() else torch.float32
            return answer.reshape(own.shape).to(own.device, dtype)
        return answer.item()

    def _handle(self, call: Collective) -> bool:
        if not call.is_count:
            return self._communicate(call)
        tensor = call.tensors[0].detach()
        ranks = call.scale or 1
        site = self._note(sites.SUM, tensor)
        if call.is_large:
            self.large[site] = str(call)
        if site not in self._totals.counts:
            if call.is_large and not self._is_alone:
                return self._communicate(call)
            tensor.mul_(ranks)
            return True
        answer = self._totals.counts[site] / self._totals.ranks * ranks
        answer = answer if tensor.is_floating_point() else answer.round()
        tensor.copy_(answer.reshape(tensor.shape))
        return True

    def _cross_entropy(self, original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def cross_entropy(logits: Any, target: Any, weight: Any, *rest: Any) -> torch.Tensor:
            loss = original(logits, target, weight, *rest)
            reduction, ignore_index, _ = rest
            if weight is None or reduction != _REDUCTION_MEAN or target.is_floating_point():
                return loss
            is_counted = target != ignore_index
            own = (weight[target.where(is_counted, 0)] * is_counted).sum()
            return loss * self.factor(own, _TINY)

        return cross_entropy

    def _factor(self, site: Site) -> Union[float, torch.Tensor]:
        share = self._share(self._totals.images)
        if site == sites.IN_FULL:
            return 1.0 / (share * self._totals.ranks)
        # A batch without any object is divided by 1.
        whole = self._totals.counts[site].item()
        return max(self._forward[site], 1) / (max(whole, 1.0) * share)

    def _share(self, images: float) -> float:
        return self._forward[sites.IMAGES] / images if images else 1.0

    def _note(self, kind: str, value: Any) -> Site:
        self.is_asked = True
        place = place_of_caller()
        site = (kind, place, self._calls[kind, place])
        self._calls[kind, place] += 1
        is_tensor = isinstance(value, torch.Tensor)
        self._forward[site] = value.detach().clone() if is_tensor else value
        return site


def _limited(own: Number, minimum: float) -> Number:
    if isinstance(own, torch.Tensor):
        return own.detach().float().clamp(min=minimum)
    return max(own, minimum)
