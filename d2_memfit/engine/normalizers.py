# Copyright (c) the d2_memfit developers.
"""The counts that losses are divided by, taken over the window and all ranks."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, Optional

import torch
from detectron2.utils import comm
from torch import nn

from ..collectives import noticed_questions
from ..job.normalizer_options import NormalizerOptions
from .communication import Communication, CommunicationError
from .count_pass import count_window, does_the_same_with_ranks
from .count_report import CountReport, Part
from .count_rules import CountRules, PerObjectAndImage, SeenAt, Site
from .forward_counts import ForwardCounts
from .window import MicroBatch, Window, count_objects

__all__ = ["Normalizers"]

logger = logging.getLogger(__name__)

Forward = Callable[[MicroBatch], Any]

_WATCHED_WINDOWS = 3  # without an object, before the model is taken to count nothing
_MOST_RUNS = 5  # runs of one window


class Normalizers:
    """Finds, before a window's forwards, the counts that its losses are divided by.

    A loss divided by the objects in its batch would be divided by the micro-batch's objects. Counts
    are noticed in sums over ranks (on one rank, where there would be one), in means of losses, and
    in ``window_count``. Most follow from the annotations (:class:`CountRules`). For others, the
    window first runs without gradients.

    Args:
        model: without DDP around it.
        options: which counts are taken over the window.
        recovers: whether ranks may run images again, each for itself.
        is_cut: whether the trainer cuts the loader's batches.
        accumulation_steps: as for the trainer.

    Attributes:
        communication: the model's collectives that are not counts.
        rules: what is known of the model's counts.
    """

    def __init__(
        self,
        model: nn.Module,
        options: NormalizerOptions,
        recovers: bool,
        is_cut: bool,
        accumulation_steps: int,
    ) -> None:
        self.communication = Communication(recovers, is_cut, options.policy != "off")
        self._model = model
        self._options = options
        self._recovers = recovers
        self._is_cut = is_cut
        self._is_whole = accumulation_steps == 1 and not is_cut
        self._ranks = comm.get_world_size()
        self.rules = CountRules()
        self._may_pretend = self._ranks == 1  # that there is a second rank
        self._asks_for_ranks = self._pretends = False
        self._windows_to_watch = _WATCHED_WINDOWS
        self._runs = 1
        self._counts: Optional[ForwardCounts] = None
        self._start_run()

    @property
    def may_run_again(self) -> bool:
        """Whether a window's counts may turn out wrong after it ran."""
        return self._options.policy != "off" and (self._is_live or self._ranks > 1)

    def begin(self, window: Window, images: Optional[int], forward: Forward) -> None:
        """Find what a window's losses are divided by, before its first forward.

        Args:
            images: images per micro-batch, as for :meth:`Window.take`.
            forward: the trainer's forward.

        Raises:
            CommunicationError: see :meth:`of`.
            ConfigError: on every rank, if the model communicates and numbers of micro-batches
                differ.
        """
        self._start_run()
        if self._options.policy == "off":
            return
        self._sees_means = self._is_live
        self._is_uncut = self._ranks == 1 and self._is_whole and images is None
        watches = self._ranks > 1 or self._windows_to_watch > 0  # new counts may still appear
        if self._is_uncut or not self._knows_something:
            self._is_on = watches
            handle = self.communication.handle if watches else None
            self._counts = ForwardCounts(window, handle, means=self._sees_means and watches)
            return
        self._is_on = True
        window.load()
        micro_batches = self._cut(window, images)
        self._parts = comm.all_gather(Part.of(micro_batches))
        if self._ranks == 1 and len(micro_batches) == 1:
            self._is_on = False
            self._counts = ForwardCounts(window, means=False)
            return
        self.communication.check([p.micro_batches for p in self._parts])
        must_count = any(self._needs(s) and not self.rules.rule(s) for s in self.rules.sites)
        if self._must_ask:
            crowded = max(micro_batches, key=lambda m: count_objects(m.data))
            self._pretends = does_the_same_with_ranks(
                self._model, crowded, forward, partial(self._new_counts, window), self._recovers
            )
            self._may_pretend, self.communication.found = False, ""
            must_count |= self._pretends
        self._know(window, self._count(window, images, forward) if must_count else [])

    @contextmanager
    def of(self, micro_batch: MicroBatch, replays: bool = False) -> Iterator[None]:
        """Count during a micro-batch's forward, and again (``replays``) during its backward.

        Raises:
            CommunicationError: the model communicates unexpectedly.
        """
        with ExitStack() as stack:
            asked = []
            if self._is_on and self._may_pretend:
                asked = stack.enter_context(noticed_questions())
            if self._counts is not None:
                stack.enter_context(self._counts.of(micro_batch, replays))
            yield
        self._asks_for_ranks |= bool(asked)

    def divided(self, losses: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """The losses; those in MEMFIT.NORMALIZERS.LOSSES divided by the window's objects."""
        if self._counts is None or not self._options.losses:
            return losses
        share = self._counts.share_of_objects()
        patterns = [pattern for pattern, _ in self._options.losses]
        return {
            name: loss * share if any(fnmatchcase(name, p) for p in patterns) else loss
            for name, loss in losses.items()
        }

    def report(self, window: Window) -> CountReport:
        """The facts by which ranks agree whether the window ran with the right counts."""
        return CountReport(
            self.rules.news(self._counts.seen if self._counts else {}),
            self._must_ask,
            self.communication.found,
            self._is_whole
            and len(window.micro_batches) > self._parts[comm.get_rank()].micro_batches,
            any(count_objects(m.data) for m in window.micro_batches),
        )

    def must_run_again(self, reports: Sequence[CountReport]) -> bool:
        """Learn from a window, and return whether all ranks must run it again.

        Args:
            reports: of all ranks, so that all learn the same.

        Raises:
            ConfigError: on every rank, if the model communicates and cannot be trained so.
        """
        found = [r.communicates for r in reports if r.communicates]
        is_cut_anew = any(r.is_cut_anew for r in reports)
        if again := len(found) > 0:
            self.communication.allow(found[0])
            self._pretends = False
        else:
            news: SeenAt = {}
            for r in reports:
                for site, seen in r.news.items():
                    news.setdefault(site, []).extend(seen)
            self.rules.learn(news)
            if self._is_on:
                has_objects = any(r.has_objects for r in reports)
                self._windows_to_watch = 0 if has_objects else self._windows_to_watch - 1
            again = any(r.asks_for_ranks for r in reports) or any(
                self._answered[site] not in (None, self.rules.rule(site))
                if site in self._answered
                else self._needs(site, is_cut_anew)
                for site in self.rules.sites
            )
            again = again and (is_cut_anew or not self._is_uncut)
        if again and self._runs == _MOST_RUNS:
            logger.warning(
                "What the losses are divided by changes each time that the same images are run. "
                "Micro-batches are divided by their own counts where that is so"
            )
            again = False
        self._runs = self._runs + 1 if again else 1
        return again

    def _start_run(self) -> None:
        self.communication.found = ""
        self._counts = None
        self._is_on = False  # whether the model's counts are looked at
        self._is_uncut = False
        self._answered: dict[Site, Optional[PerObjectAndImage]] = {}  # by rule; None is counted
        self._parts = [Part(0, 0, 1)] * self._ranks

    @property
    def _is_live(self) -> bool:
        return self._windows_to_watch > 0 or self._knows_something

    @property
    def _knows_something(self) -> bool:
        """Whether the model is known to count, to communicate, or to ask for ranks."""
        counts = any(self._needs(site, is_cut=True) for site in self.rules.sites)
        is_told = len(self._options.losses) > 0
        return counts or self.communication.known != "" or self._must_ask or is_told

    @property
    def _must_ask(self) -> bool:
        """Whether it is still unknown what the model does with several ranks."""
        return self._asks_for_ranks and self._may_pretend

    def _needs(self, site: Site, is_cut: bool = False) -> bool:
        """Whether micro-batches' own counts at a site would be wrong."""
        if site.kind == "ranks":
            return True
        is_cut = is_cut or any(p.micro_batches > 1 for p in self._parts)
        if self._is_own(site) and not is_cut:
            return False
        rule = self.rules.rule(site)
        if rule is None:
            return site.kind == "weights" or self._options.policy == "exact"
        return rule[0] != 0

    def _is_own(self, site: Site) -> bool:
        """Whether a rank's mean is over its own images, as in Detectron2."""
        return self._is_whole and site.kind != "ranks"

    def _cut(self, window: Window, images: Optional[int]) -> list[MicroBatch]:
        while window.take(images, self._is_cut) is not None:
            pass
        micro_batches = list(window.micro_batches)
        window.start_over()
        return micro_batches

    def _know(self, window: Window, counted: Sequence[dict[Site, float]]) -> None:
        """Set the window's totals, from rules or from the counts of all ranks."""
        rank = comm.get_rank()
        own = self._parts[rank]
        images, objects = (sum(getattr(p, k) for p in self._parts) for k in ("images", "objects"))
        totals = {}
        for site in dict.fromkeys([*self.rules.sites, *(s for c in counted for s in c)]):
            rule = self.rules.rule(site)
            is_own = self._is_own(site)
            if rule is not None and self._needs(site):
                of = (own.objects, own.images) if is_own else (objects, images)
                totals[site] = rule[0] * of[0] + rule[1] * of[1]
            elif rule is None and counted:
                ranks = [counted[rank]] if is_own else counted
                totals[site] = sum(c.get(site, 0.0) for c in ranks)
            else:
                continue
            self._answered[site] = rule
        own_images = own.images if self._is_whole else images
        kinds = {"ranks": images, "weights": own_images, "mean": own_images}
        own_objects = own.objects if self._is_whole else objects
        self._new_counts(window, totals=totals, images=kinds, objects=own_objects)

    def _new_counts(
        self, window: Window, pretends: Optional[bool] = None, **known: Any
    ) -> ForwardCounts:
        pretends = self._pretends if pretends is None else pretends
        self._counts = ForwardCounts(
            window, self.communication.handle, pretends, means=self._sees_means, **known
        )
        return self._counts

    def _count(
        self, window: Window, images: Optional[int], forward: Forward
    ) -> Sequence[dict[Site, float]]:
        """Each rank's counts in its window."""

        counted: dict[Site, float] = {}
        try:
            counted = count_window(
                self._model,
                window,
                (images, self._is_cut),
                forward,
                partial(self._new_counts, window),
                self._recovers and not self.communication.known,
            )
        except CommunicationError:
            window.start_over()
        found, all_counted = zip(*comm.all_gather((self.communication.found, counted)))
        if any(found):
            raise CommunicationError
        return all_counted
