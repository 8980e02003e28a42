# Copyright (c) the d2_memfit developers.
"""The rules by which a trainer weights losses: decided by a test, then applied to each window."""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Optional

import torch
from detectron2.utils import comm
from detectron2.utils.events import get_event_storage
from torch import nn

from ...common.rank_table import rank_table
from ...counts import PretendedRanks
from ...errors import ConfigError, OutOfMemoryError
from ...memory import error_line, is_out_of_memory
from ...settings import NormalizerOptions
from ..retry import Cutter, run_to_count
from ..state import StateCopy
from ..window import MicroBatch, Window, count_objects, may_have_objects
from . import sites
from .adapters import adapt_criteria
from .answers import Answers, Totals
from .communication import Communication, Spared
from .decide import UntestableError, gradient_test, text_of
from .rules import Rules
from .runs import Subject, without_traces
from .schedule import Schedule
from .sites import Counts, Site
from .wording import HELP, log_rules

__all__ = ["CountReport", "LossRules"]

logger = logging.getLogger(__name__)

_MOST_TESTERS = 2  # ranks


@dataclass
class CountReport:
    """One rank's report about the counts of its window.

    Attributes:
        communicates: a collective that was not expected; "" if there was none.
        broken: sites whose counts do not follow their formula.
        is_new: whether there is a count that was not in the test, or a loss that is no longer zero.
    """

    communicates: str = ""
    broken: set[Site] = field(default_factory=set)
    is_new: bool = False


@dataclass
class _Found:
    """The findings of the rank that tests. Plain data: all ranks get it.

    Attributes:
        rules: None if the losses could not be tested.
        changed, counters, forwards: as for :class:`GradientTest`.
        collective: a collective of the model that is not a count; "" if there is none.
        error: an error of the model; "" if there is none.
        mistake: an error of the user; "" if there is none.
    """

    rules: Optional[Rules] = None
    changed: Sequence[str] = ()
    counters: Sequence[str] = ()
    forwards: int = 0
    collective: str = ""
    error: str = ""
    mistake: str = ""


class LossRules:
    """Decides what the losses are weighted by, and counts each window accordingly.

    Micro-batches are weighted by their images, which is right for a loss that is a mean over
    images. A loss that is divided by a number of objects needs the count of the window. The model
    declares a count by adding it up over ranks. An adapter of the criterion's class or the user can
    declare one, too. A declared count is replaced by the window's if counts add up, and if a
    :class:`GradientTest` on the job's own images shows that the gradient is then right.

    Args:
        model: without DDP around it.
        losses: called as ``losses(model, batch)``.
        options: which counts are taken over the window.
        recovers: whether each rank may run images again on its own.
        cutter: cuts the trainer's windows.
        accumulation_steps: as for the trainer.

    Attributes:
        rules: what losses are weighted by.
        communication: the model's collectives that are not counts.
        is_one_piece: whether the window is one micro-batch, so that it needs counts only if it is
            cut.
    """

    def __init__(
        self,
        model: nn.Module,
        losses: Callable[[nn.Module, Any], Mapping[str, torch.Tensor]],
        options: NormalizerOptions,
        recovers: bool,
        cutter: Cutter,
        accumulation_steps: int,
    ) -> None:
        self.rules = Rules()
        self.communication = Communication(recovers, cutter)
        self.is_one_piece = False
        self._model = model
        self._device = next(model.parameters()).device
        self._losses = losses
        self._options = options
        self._recovers = recovers
        self._cutter = cutter
        self._is_whole = accumulation_steps == 1 and not cutter.is_configured
        self._ranks = comm.get_world_size()
        self._pretended = PretendedRanks() if self._ranks == 1 else None
        self._answers: Optional[Answers] = None  # None: nothing stands around the model
        self._schedule = Schedule(options.policy != "off")
        self._is_spared = False  # a function, in this window
        self._before: Optional[StateCopy] = None  # the last forward that may be spared
        self._counters: list[str] = []  # that were not named yet
        self._said: set[str] = set()
        if options.policy != "off":
            adapt_criteria(model, is_exact=options.policy == "exact")

    def prepare(self, window: Window, forward: Callable[..., Any]) -> None:
        """Find what a window's losses are divided by, before its first forward.

        Args:
            forward: the trainer's forward of a micro-batch.

        Raises:
            ConfigError: on every rank, if the model cannot be trained with these options.
            OutOfMemoryError: on every rank, if one rank has no memory to count.
        """
        self._answers = None
        self.is_one_piece = False
        if not (self._schedule.is_due or self.communication.known) and not self.rules.is_answered:
            if self._ranks > 1:
                self._answers = self._new_answers()
            return
        table = rank_table(self._numbers_of(window), self._device)
        images, objects, numbers, sizes, places = (list(map(int, column)) for column in zip(*table))
        if self._schedule.is_due and (self._recovers or max(numbers) > 1):
            self._decide(window, objects, any(places), max(sizes))
        rows = zip(images, objects)
        annotated = [sites.added_up([{sites.IMAGES: i, sites.OBJECTS: o}]) for i, o in rows]
        self.is_one_piece = self._ranks == 1 and numbers[0] == 1
        if self.is_one_piece:  # the forward's own counts are those of the window
            return
        self._name_counters(max(numbers))
        if not self.rules.is_answered and self._ranks == 1:
            return
        self.communication.check(numbers)
        counted: Sequence[Counts] = ()
        if self.rules.needs_forward:
            counted = self._counted(window, forward)
        totals = sites.added_up(annotated)
        for site in self.rules.counts:
            count = self.rules.count(site, self._total(site[0], annotated))
            totals[site] = self._total(site[0], counted)[site] if count is None else count
        self._answers = self._new_answers(
            Totals(
                totals,
                totals[sites.IMAGES].item(),
                self._total(sites.MEAN, annotated)[sites.IMAGES].item(),
                self._ranks,
            )
        )

    def answering(
        self, micro_batch: MicroBatch, replays: bool = False
    ) -> AbstractContextManager[None]:
        """Count during a micro-batch's forward, and again (``replays``) during its backward."""
        return (
            nullcontext()
            if self._answers is None
            else self._answers.answering(micro_batch, replays)
        )

    def run(
        self, micro_batch: MicroBatch, losses: Callable[[Any], Mapping[str, torch.Tensor]]
    ) -> torch.Tensor:
        """The sum of a micro-batch's losses, scaled so that its images are the right weight.

        Each loss is also kept in the micro-batch.

        Args:
            losses: the forward.

        Raises:
            CommunicationError: the model communicates unexpectedly.
        """
        self._before = StateCopy(self._model, last=self._before) if self._second_rank else None
        try:
            with self.answering(micro_batch):
                found = losses(micro_batch.batch)
                if self._answers is not None:
                    found = self._answers.weighted(found)
                total: Any = sum(found.values())
                micro_batch.losses = {name: loss.detach() for name, loss in found.items()}
                return total
        except Spared as e:  # a function that cannot work with what it was told of other ranks
            logger.info("%s: this function is told the truth from now on", e)
        self._is_spared = True
        if self._before is not None:
            self._before.restore()
        return self.run(micro_batch, losses)

    def report(self, window: Window, found: str) -> CountReport:
        """Compare this rank's window with the rules.

        Args:
            found: text of the :class:`CommunicationError` that ended it, if one did.
        """
        is_told = self._ranks == 1 or self.communication.known
        unexpected = "" if is_told else self.communication.found
        report = CountReport(found or unexpected, is_new=self._is_spared)
        self._is_spared = False
        self._name_counters(len(window.micro_batches))
        if not self._schedule.has_result:
            return report
        for counts in self._answers.counts if self._answers is not None else ():
            report.broken |= self.rules.broken(counts)
            report.is_new |= not self.rules.knows(counts)
        tested = self.rules.terms.keys() - self.rules.zero
        losses = [item for m in window.micro_batches for item in m.losses.items()]
        report.is_new |= any(name not in tested and loss.item() for name, loss in losses)
        return report

    def end_iteration(self, reports: Sequence[CountReport]) -> None:
        """Change the rules for later windows, according to the reports of all ranks.

        Raises:
            ConfigError: on every rank, if the model communicates and cannot be trained so.
        """
        found = next((r.communicates for r in reports if r.communicates), "")
        if found:
            self.communication.allow(found)
        broken: set[Site] = set().union(*(r.broken for r in reports))
        if broken:
            places = ", ".join(sorted(map(sites.place_of, broken)))
            logger.warning(
                "Iteration %d: the count in %s no longer follows from the annotations, so the "
                "losses of this iteration were divided by another one. From now on it is counted "
                "by a forward of the whole window",
                get_event_storage().iter,
                places,
            )
            self.rules = self.rules.without(broken)
        news = [rank for rank, report in enumerate(reports) if report.is_new]
        self._schedule.end_iteration(get_event_storage().iter, news)

    def state_dict(self) -> dict[str, Any]:
        """The rules in plain types, for a resumed run; empty before a test."""
        if not self._schedule.has_result:
            return {}
        spared = self._pretended.spared if self._pretended is not None else ()
        return {
            "rules": self.rules.state_dict(),
            "schedule": self._schedule.state_dict(),
            "spared": sorted(spared),
            "options": self._plain_options,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Use the rules of a checkpoint; test again if they belong to other options."""
        if state.get("options") != self._plain_options or self._options.policy == "off":
            return
        self.rules = Rules.from_state_dict(state["rules"])
        self._schedule.load_state_dict(state["schedule"])
        self._said.update(name for name, term in self.rules.terms.items() if term.why)
        if self._pretended is not None:
            self._pretended.spared.update(state["spared"])

    def described(self) -> list[str]:
        """Places in the code whose counts are the window's, and how these are found."""
        how = {True: "from the annotations", False: "by one more forward"}
        counts = self.rules.counts.items()
        return sorted(
            {f"{sites.place_of(s)} ({how[formula is not None]})" for s, formula in counts}
        )

    def _decide(
        self, window: Window, objects: Sequence[int], may_have_objects: bool, largest: int
    ) -> None:
        """Test the losses on one rank's images, and set the rules of all ranks. All ranks call it.

        The rank with the most objects tests, or one that has something new. If the model fails with
        its images, the next rank tests.

        Args:
            objects: of each rank's window.
            may_have_objects: whether images have a field for objects, which may be empty.
            largest: images of the largest micro-batch.
        """
        if not self._schedule.takes(objects, may_have_objects):
            return
        start = time.perf_counter()
        news, self._schedule.news = self._schedule.news, set()
        found = _Found()
        ranks = sorted(range(self._ranks), key=lambda rank: (rank not in news, -objects[rank]))
        for rank in ranks[:_MOST_TESTERS]:
            mine = self._tested(window, largest) if rank == comm.get_rank() else None
            found = comm.all_gather(mine)[rank]
            if found.mistake:
                raise ConfigError(found.mistake)
            if found.rules is not None:
                break
        if found.collective and self._ranks > 1:
            self.communication.allow(found.collective)
        if found.rules is None:
            if not (self._schedule.has_result or self._schedule.is_due):
                logger.warning(
                    "not known: what losses are divided by could not be tested (%s). Micro-batches "
                    "are weighted by their images. See %s",
                    found.error,
                    HELP,
                )
            return
        self.rules = found.rules.after(self.rules)
        self._schedule.has_result = True
        self._counters = [name for name in found.counters if name not in self._said]
        self._said.update(self._counters)
        others = [name for name in found.changed if name not in found.counters]
        seconds = time.perf_counter() - start
        log_rules(self.rules, others, found.forwards, seconds, self._said)

    def _tested(self, window: Window, largest: int) -> _Found:
        """Test on this rank's images. It raises nothing: other ranks wait for the result."""
        if not window.images_waiting:
            return _Found(error="batches cannot be cut into images")
        subject = Subject(self._model, self._losses, self.communication.note, self._pretended)
        try:
            patterns = self._options.losses
            test = gradient_test(subject, window.images_waiting, patterns, largest)
            for pattern, _ in patterns:
                if not any(fnmatchcase(name, pattern) for name in test.names):
                    raise ConfigError(
                        f"MEMFIT.NORMALIZERS.LOSSES: no loss matches {pattern!r}. The model's "
                        f"losses are {', '.join(test.names)}"
                    )
            for place in test.unused:
                raise ConfigError(
                    f"window_count in {place}: no loss depends on what it returns. Divide the loss "
                    "by it, in the same forward"
                )
            rules = test.rules(test.nearest)
            collective = next(iter(test.statistics), self.communication.found)
            return _Found(rules, test.changed, test.counters, test.forwards, collective)
        except ConfigError as e:
            return _Found(mistake=str(e))
        except Exception as e:
            error = str(e) if isinstance(e, UntestableError) else text_of(e)
            return _Found(error=error, collective=self.communication.found)

    def _numbers_of(self, window: Window) -> list[float]:
        """Numbers of this rank's images, objects and micro-batches, of images in the largest
        micro-batch, and whether images have a field for objects.
        """
        window.load_all()
        while self._cutter.take(window) is not None:
            pass
        pieces = window.micro_batches
        objects = sum(count_objects(m.data) for m in pieces)
        largest = max((m.num_images for m in pieces), default=0)
        numbers: list[float] = [window.num_images, objects, len(pieces), largest]
        window.put_all_back()
        return [*numbers, self._schedule.is_due and may_have_objects(window.images_waiting)]

    def _name_counters(self, forwards: int) -> None:
        """Warn once of numbers that count the forwards of an iteration."""
        for name in self._counters if forwards > 1 else ():
            logger.warning(
                "%s counts forwards, %d times per iteration with accumulation. What depends on "
                "it, such as a warm-up, comes earlier by that factor: lengthen it",
                name,
                forwards,
            )
        if forwards > 1:
            self._counters = []

    def _new_answers(self, totals: Optional[Totals] = None) -> Answers:
        weights = self.rules.weights if totals else {}
        return Answers(self.communication.handle, totals, weights, self._second_rank)

    @property
    def _plain_options(self) -> dict[str, Any]:
        losses = [list(pair) for pair in self._options.losses]
        return {"policy": self._options.policy, "losses": losses}

    @property
    def _second_rank(self) -> Optional[PretendedRanks]:
        return self._pretended if self.rules.pretends else None

    def _total(self, kind: str, of_ranks: Sequence[Counts]) -> Counts:
        """The counts of the images that a count of this kind is about."""
        if kind == sites.MEAN and self._is_whole:  # each rank has its own mean, as in Detectron2
            return of_ranks[comm.get_rank()]
        return sites.added_up(of_ranks)

    def _counted(self, window: Window, forward: Callable[..., Any]) -> Sequence[Counts]:
        """Each rank's counts, by a forward of all images without gradients."""
        self._answers = Answers(
            self.communication.handle, pretended=self._second_rank, is_alone=True
        )
        error = ""
        may_recover = self.communication.may_recover
        try:
            with without_traces(self._model):
                run_to_count(self._model, window, self._cutter, forward, may_recover)
        except Exception as e:
            if not (may_recover and is_out_of_memory(e)):
                raise
            error = error_line(e)
        own = sites.added_up(self._answers.counts)
        missing = {site: torch.zeros(1, dtype=torch.float64) for site in self.rules.counts}
        errors, of_ranks = zip(*comm.all_gather((error, {**missing, **own})))
        if any(errors):
            raise OutOfMemoryError(
                "there was no memory to count what losses are divided by "
                f"({next(filter(None, errors))}). Lower MEMFIT.MICRO_BATCH, or set "
                "MEMFIT.NORMALIZERS.POLICY off"
            )
        return of_ranks
