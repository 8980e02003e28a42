# Copyright (c) the d2_memfit developers.
"""The counts of one forward: recorded, and answered with its share of the window's counts."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, Optional, TypeVar

import torch

from ..collectives import Collective, noticed_collectives, place_of_caller, pretended_ranks
from ..window_counts import counts_answered_by
from .count_rules import Seen, Site
from .mean_losses import MeanLosses
from .window import MicroBatch, Window, count_objects

__all__ = ["PRETENDED_RANKS", "ForwardCounts", "SeenAt"]

Number = TypeVar("Number", float, torch.Tensor)
SeenAt = dict[Site, list[Seen]]

PRETENDED_RANKS = 2


class ForwardCounts:
    """Stands between a model and the other ranks while the model runs.

    Args:
        window: the window of the micro-batches.
        communicate: handler for collectives that are not counts, as for
            :func:`noticed_collectives`. None handles no collective.
        pretends: whether the model is told that there are two ranks.
        totals: the window's count at each site. Sites without one keep the forward's own counts.
        images: number of images behind the totals, for each kind of site. The default is the
            window's images on this rank.
        objects: number of objects in the images behind the means; None if unknown.
        means: whether means are recorded.
    """

    def __init__(
        self,
        window: Window,
        communicate: Optional[Callable[[Collective], bool]] = None,
        pretends: bool = False,
        totals: Optional[Mapping[Site, float]] = None,
        images: Optional[Mapping[str, int]] = None,
        objects: Optional[int] = None,
        means: bool = True,
    ) -> None:
        self._window = window
        self._communicate = communicate
        self._pretends = pretends
        self._totals = totals or {}
        self._images = images or {}
        self._objects = objects
        self._means = means
        self._micro_batch = (0, 0)  # images and objects
        self._calls: Counter[Any] = Counter()
        self._answers: list[tuple[float, float]] = []  # each with its share
        self._replays = False
        self._of_forward: list[tuple[Site, torch.Tensor]] = []
        self._noted: list[tuple[tuple[int, int], list[tuple[Site, torch.Tensor]]]] = []

    @property
    def seen(self) -> SeenAt:
        """The counts so far. Reading them waits for the device."""
        sites = dict.fromkeys(site for _, noted in self._noted for site, _ in noted)
        seen: SeenAt = {site: [] for site in sites}
        for (images, objects), noted in self._noted:
            counts = dict(noted)
            for site in sites:  # a forward that did not count has count 0
                seen[site].append(Seen(images, objects, float(counts.get(site, 0.0))))
        return seen

    @contextmanager
    def of(self, micro_batch: MicroBatch, replays: bool) -> Iterator[None]:
        """Record and answer counts in a micro-batch's forward, and (``replays``) its backward.

        The backward may compute parts of the forward again. These get the answers of the forward.
        """
        self._micro_batch = (micro_batch.num_images, count_objects(micro_batch.data))
        self._replays = replays
        self._calls.clear()
        if not replays:
            self._answers.clear()
            self._of_forward = []
        with ExitStack() as stack:
            stack.enter_context(counts_answered_by(self))
            if self._communicate is not None:
                stack.enter_context(noticed_collectives(self._handle))
            if self._pretends:
                stack.enter_context(pretended_ranks(PRETENDED_RANKS))
            if self._means:
                stack.enter_context(MeanLosses(self))
            yield
        if not replays:
            self._noted.append((self._micro_batch, self._of_forward))

    @property
    def share(self) -> float:
        return self._share("mean")

    def answer(self, count: Number, minimum: float) -> Number:
        """Answer a call of :func:`~d2_memfit.window_counts.window_count`."""
        site = self._note("ranks", torch.as_tensor(count).detach())
        own = count.detach() if isinstance(count, torch.Tensor) else count
        total = self._totals.get(site)
        if isinstance(own, torch.Tensor):
            if total is None:
                return own.float().clamp(min=minimum)
            return torch.full_like(
                own, max(total, minimum) * self._share("ranks"), dtype=torch.float
            )
        return max(own, minimum) if total is None else max(total, minimum) * self._share("ranks")

    def share_of_objects(self) -> float:
        """Factor for a loss that is divided by the objects of this micro-batch."""
        if self._objects is None:
            return 1.0
        return max(self._micro_batch[1], 1) / (max(self._objects, 1) * self._share("mean"))

    def count_of_mean(self, kind: str, count: torch.Tensor) -> Optional[float]:
        site = self._note(kind, count)
        share = self._share(kind)
        if share == 1 or site not in self._totals:
            return None
        return self._totals[site] * share

    def share_of(self, value: float) -> Optional[float]:
        for answer, share in self._answers:
            if abs(value - answer) <= 1e-6 * abs(answer):
                return share
        return None

    def _handle(self, call: Collective) -> bool:
        if self._pretends and call.name in ("barrier", "broadcast", "reduce"):  # such as for logs
            if call.is_sum:
                call.tensors[0].mul_(call.num_ranks)
            return True
        if not call.is_count:
            assert self._communicate is not None
            return self._communicate(call)
        tensor = call.tensors[0]
        ranks = call.num_ranks if call.is_sum else 1
        sites = [self._note("ranks", t.detach().clone()) for t in tensor.detach().flatten()]
        if all(site in self._totals for site in sites):
            share = self._share("ranks")
            means = [self._totals[site] * share for site in sites]
            self._answers += [(m * r, share) for m in means for r in {1, ranks}]
            answer = tensor.new_tensor(means, dtype=torch.float).reshape(tensor.shape) * ranks
        else:
            answer = tensor.detach() * ranks
        # A count of integers may have a share that is none.
        tensor.data = answer if not tensor.is_floating_point() else answer.to(tensor.dtype)
        return True

    def _note(self, kind: str, count: torch.Tensor) -> Site:
        place = place_of_caller()
        if self._replays:  # its callers are those of the backward
            same = [s for s, _ in self._of_forward if s.kind == kind and s.place[:1] == place[:1]]
            if same:
                self._calls[kind, place[:1]] += 1
                return same[min(self._calls[kind, place[:1]], len(same)) - 1]
        site = Site(kind, place, self._calls[kind, place])
        self._calls[kind, place] += 1
        self._of_forward.append((site, count))
        return site

    def _share(self, kind: str) -> float:
        return self._micro_batch[0] / self._images.get(kind, self._window.expected_images)
