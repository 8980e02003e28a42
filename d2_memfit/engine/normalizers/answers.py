# Copyright (c) the d2_memfit developers.
"""What the forwards of a window count, and what they are answered."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Optional, TypeVar, Union

import torch

from ...compat.pytorch import replaced_cross_entropy
from ...counts import (
    Collective,
    Handler,
    Place,
    PretendedRanks,
    counts_answered_by,
    noticed_collectives,
    place_of_caller,
)
from ..window import MicroBatch, count_objects

__all__ = ["DECLARED", "IN_FULL", "OBJECTS", "SUM", "WEIGHTS", "Answers", "Noted", "Site", "Totals"]

Number = TypeVar("Number", float, torch.Tensor)

_MEAN = 1  # what PyTorch's functions of losses call this reduction


class Site(NamedTuple):
    """A place where a forward counts something that losses are divided by.

    Attributes:
        kind: SUM, WEIGHTS, DECLARED or "objects".
        place: place in the code.
        number: number of the count at this place in one forward, from 0.
        of_rank: whether each rank counts its own images, if nothing is accumulated.
    """

    kind: str
    place: Place = ()
    number: int = 0
    of_rank: bool = False


SUM = "sum"  # the model adds it up over ranks: all_reduce(num_boxes)
WEIGHTS = "weights"  # the sum of weights of a weighted F.cross_entropy, a mean over the batch
DECLARED = "declared"  # window_count, or an adapter of the criterion's class
OBJECTS = Site("objects")  # annotated objects: MEMFIT.NORMALIZERS.LOSSES
IN_FULL = Site("in full")  # weights of a loss that the forward divides by the window's sum


@dataclass
class Noted:
    """What one forward counted. Counts are tensors of one element, or numbers."""

    images: int
    objects: int
    counts: dict[Site, Union[torch.Tensor, float]] = field(default_factory=dict)

    def count(self, site: Site) -> float:
        """A count, 0 if it was not taken. This waits for the device."""
        return float(self.counts.get(site, 0.0))


@dataclass(frozen=True)
class Totals:
    """What is counted in a whole window.

    Args:
        images: of all ranks.
        own_images: the images behind a count ``of_rank``: this rank's, or all if batches are
            accumulated.
        ranks: number of ranks.
        counts: the window's counts, of those sites that are answered or weigh a loss.
    """

    images: int
    own_images: int
    ranks: int = 1
    counts: dict[Site, float] = field(default_factory=dict)


class Answers:
    """Stands between a model and the other ranks while the model runs.

    Counts are noted. Sums over ranks and declared counts are answered with the window's. One that
    has no total is answered with this forward's own, as if all ranks had the same.

    Args:
        communicate: handles collectives that are not counts.
        totals: the window's counts; None if nothing is answered.
        weights: for a loss, the count by which micro-batches are weighted in place of images. None
            notes the weights of all cross entropies.
        pretended: on one rank, tells the model that there are two.

    Attributes:
        noted: the counts of all forwards that ended.
        is_asked: whether the model or an adapter has asked for anything of the window.
    """

    def __init__(
        self,
        communicate: Handler,
        totals: Optional[Totals] = None,
        weights: Optional[Mapping[str, Site]] = None,
        pretended: Optional[PretendedRanks] = None,
    ) -> None:
        self.noted: list[Noted] = []
        self.is_asked = False
        self._communicate = communicate
        self._totals = totals
        self._weights = weights or {}
        self._sees_weights = weights is None or any(s.kind == WEIGHTS for s in weights.values())
        self._pretended = pretended
        self._forward = Noted(0, 0)  # the running one
        self._calls: Counter[Any] = Counter()
        self._replays = False

    @contextmanager
    def of(self, micro_batch: MicroBatch, replays: bool = False) -> Iterator[None]:
        """Note and answer counts in a micro-batch's forward.

        Args:
            replays: whether this is its backward, which may compute parts of the forward again.
                They get the same answers.
        """
        if not replays:
            self._forward = Noted(micro_batch.num_images, count_objects(micro_batch.data))
            self._forward.counts[OBJECTS] = self._forward.objects
        self._replays = replays
        self._calls.clear()
        with ExitStack() as stack:
            stack.enter_context(counts_answered_by(self))
            stack.enter_context(noticed_collectives(self._handle))
            if self._sees_weights:
                stack.enter_context(replaced_cross_entropy(self._cross_entropy))
            if self._pretended is not None:
                stack.enter_context(self._pretended.told())
            yield
        if not replays:
            self.noted.append(self._forward)

    def weighted(self, losses: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """The losses, so that the micro-batch's share of the images is the right weight of each."""
        if self._totals is None:
            return losses
        return {
            name: loss * self._factor(self._weights[name]) if name in self._weights else loss
            for name, loss in losses.items()
        }

    @property
    def share(self) -> float:
        """Images of the running micro-batch over those of the window on this rank."""
        self.is_asked = True
        return 1.0 if self._totals is None else self._forward.images / self._totals.own_images

    def answer(self, count: Number, minimum: float, of_rank: bool) -> Number:
        """Answer a call of :func:`~d2_memfit.counts.window_counts.window_count`."""
        site = self._note(DECLARED, torch.as_tensor(count).detach(), of_rank)
        own = count.detach().float() if isinstance(count, torch.Tensor) else count
        if self._totals is None or site not in self._totals.counts:
            return own.clamp(min=minimum) if isinstance(own, torch.Tensor) else max(own, minimum)
        answer = max(self._totals.counts[site], minimum) * self._share(site)
        return torch.full_like(own, answer) if isinstance(own, torch.Tensor) else answer

    def _handle(self, call: Collective) -> bool:
        if not call.is_count:
            return self._communicate(call)
        tensor = call.tensors[0].detach()
        answers = tensor.clone().reshape(-1)
        ranks = call.num_ranks if call.is_sum else 1
        for i, own in enumerate(tensor.clone().reshape(-1)):
            site = self._note(SUM, own, of_rank=False)
            if self._totals is not None and site in self._totals.counts:
                answer = self._totals.counts[site] / self._totals.ranks * ranks
                answers[i] = answer if tensor.is_floating_point() else round(answer)
            else:
                answers[i] = own * ranks
        tensor.copy_(answers.reshape(tensor.shape))
        return True

    def _cross_entropy(self, original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def cross_entropy(logits: Any, target: Any, weight: Any, *rest: Any) -> torch.Tensor:
            reduction, ignore_index, _ = rest
            if weight is not None and reduction == _MEAN and not target.is_floating_point():
                is_counted = target != ignore_index
                count = (weight[target.where(is_counted, 0)] * is_counted).sum()
                self._note(WEIGHTS, count.detach(), of_rank=True)
            return original(logits, target, weight, *rest)

        return cross_entropy

    def _factor(self, site: Site) -> Union[float, torch.Tensor]:
        assert self._totals is not None
        if site == IN_FULL:
            return self._totals.images / (self._forward.images * self._totals.ranks)
        own = self._forward.counts.get(site, 0.0)
        total = self._totals.counts[site]
        if site == OBJECTS:  # a batch without any is divided by 1
            own = max(own, 1.0)
            total = max(total, 1.0)
        return own / (total * self._share(site) or 1.0)

    def _share(self, site: Site) -> float:
        assert self._totals is not None
        images = self._totals.own_images if site.of_rank else self._totals.images
        return self._forward.images / images

    def _note(self, kind: str, value: torch.Tensor, of_rank: bool) -> Site:
        self.is_asked = True
        place = place_of_caller()
        if self._replays:  # its callers are those of the backward
            sites = self._forward.counts
            same = [s for s in sites if s.kind == kind and s.place[:1] == place[:1]]
            if same:
                number = self._calls[kind, place[:1]]
                self._calls[kind, place[:1]] += 1
                return same[min(number, len(same) - 1)]
        site = Site(kind, place, self._calls[kind, place], of_rank)
        self._calls[kind, place] += 1
        self._forward.counts[site] = value
        return site
