# Copyright (c) the d2_memfit developers.
"""What the forwards of a window count, and what they are answered."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Optional, TypeVar, Union

import torch

from ...compat.pytorch import replaced_cross_entropy
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
from .sites import Site

__all__ = ["Answers", "Totals"]

Number = TypeVar("Number", float, torch.Tensor)

_REDUCTION_MEAN = 1  # what PyTorch's functions of losses call it


@dataclass(frozen=True)
class Totals:
    """What is counted in a whole window.

    Args:
        counts: of all ranks, or behind ``own_images`` if they are :func:`sites.is_of_rank`.
        own_images: this rank's, or all if batches are accumulated.
        ranks: number of ranks.
    """

    counts: Mapping[Site, float]
    own_images: float
    ranks: int = 1

    def share(self, images: float, site: Site) -> float:
        """Some images over all that are behind a count."""
        return images / (self.own_images if sites.is_of_rank(site) else self.counts[sites.IMAGES])


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
        self.noted: list[dict[Site, Any]] = []
        self.is_asked = False
        self._communicate = communicate
        self._totals = totals
        self._weights = weights or {}
        self._sees_weights = weights is None or any(s[0] == sites.WEIGHTS for s in weights.values())
        self._pretended = pretended
        self._forward: dict[Site, Any] = {}  # counts of the running one
        self._calls: Counter[Any] = Counter()
        self._replays = False

    @contextmanager
    def of(self, micro_batch: MicroBatch, replays: bool = False) -> Iterator[None]:
        """Note and answer counts in a micro-batch's forward.

        Args:
            replays: whether this is its backward, which may compute parts of the forward again.
                They get the same answers.

        Raises:
            Spared: a function cannot work with a second rank, and is told the truth from now on.
        """
        if not replays:
            objects = count_objects(micro_batch.data)
            self._forward = {sites.IMAGES: micro_batch.num_images, sites.OBJECTS: objects}
        self._replays = replays
        self._calls.clear()
        try:
            with ExitStack() as stack:
                stack.enter_context(counts_answered_by(self))
                stack.enter_context(noticed_collectives(self._handle))
                if self._sees_weights:
                    stack.enter_context(replaced_cross_entropy(self._cross_entropy))
                if self._pretended is not None:
                    stack.enter_context(self._pretended.told())
                yield
        except Exception as e:  # a model without another rank may raise anything
            if self._pretended is None or replays or is_out_of_memory(e):
                raise
            if not self._pretended.spare(e):
                raise
            raise Spared(f"{type(e).__name__}: {e}") from e
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
        images = self._forward[sites.IMAGES]
        return 1.0 if self._totals is None else images / self._totals.own_images

    def answer(self, count: Number, minimum: float, of_rank: bool) -> Number:
        """Answer a call of :func:`~d2_memfit.counts.window_counts.window_count`."""
        site = self._note(sites.MEAN if of_rank else sites.COUNT, torch.as_tensor(count).detach())
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
        ranks = call.scale or 1
        for i, own in enumerate(tensor.clone().reshape(-1)):
            site = self._note(sites.SUM, own)
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
            is_mean = reduction == _REDUCTION_MEAN
            if weight is not None and is_mean and not target.is_floating_point():
                is_counted = target != ignore_index
                count = (weight[target.where(is_counted, 0)] * is_counted).sum()
                self._note(sites.WEIGHTS, count.detach())
            return original(logits, target, weight, *rest)

        return cross_entropy

    def _factor(self, site: Site) -> Union[float, torch.Tensor]:
        assert self._totals is not None
        if site == sites.IN_FULL:
            return 1.0 / (self._share(site) * self._totals.ranks)
        own = self._forward.get(site, 0.0)
        total = self._totals.counts[site]
        if site == sites.OBJECTS:  # a batch without any is divided by 1
            own = max(own, 1.0)
            total = max(total, 1.0)
        return own / (total * self._share(site) or 1.0)

    def _share(self, site: Site) -> float:
        assert self._totals is not None
        return self._totals.share(self._forward[sites.IMAGES], site)

    def _note(self, kind: str, value: torch.Tensor) -> Site:
        self.is_asked = True
        place = place_of_caller()
        if self._replays:  # the outer callers are those of the backward
            place = place[:1]
        number = self._calls[kind, place]
        self._calls[kind, place] += 1
        if self._replays:
            same = [s for s in self._forward if s[0] == kind and s[1][:1] == place]
            if same:
                return same[min(number, len(same) - 1)]
        site = (kind, place, number)
        self._forward[site] = value
        return site
