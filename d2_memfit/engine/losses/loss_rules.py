# Copyright (c) the d2_memfit developers.
"""The rules by which a trainer weights losses: decided by a test, then applied to each window."""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any, Optional

import torch
from detectron2.utils import comm
from detectron2.utils.events import get_event_storage
from torch import nn

from ...common.rank_table import rank_table
from ...counts import PretendedRanks
from ...errors import ConfigError, OutOfMemoryError
from ...memory import error_line, is_out_of_memory, with_room
from ...settings import NormalizerOptions
from ..attempts import run_to_count
from ..window import Cutter, MicroBatch, Window, count_objects, may_have_objects
from . import sites
from .adapters import adapt_criteria
from .answers import Answers, Totals
from .communication import Communication, Spared
from .decide import GradientTest, UntestableError, Way, chosen_way, error_text, try_ways
from .rules import CLOSE, EXACT, NOT_KNOWN, OTHER, Rules, Term
from .runs import Subject, without_traces
from .sites import Counts, Site

__all__ = ["CountReport", "LossRules"]

logger = logging.getLogger(__name__)

_MOST_TESTS = 8
_TESTED_AGAIN = (100, 1000)  # iterations; a head that starts at zero has like losses at first
_HELP = "docs/ACCUMULATION.md#what-losses-are-divided-by"


@dataclass
class CountReport:
    """One rank's report about the counts of its window.

    Attributes:
        communicates: a collective that was not expected; "" if there was none.
        broken: sites whose counts do not follow their rule.
        is_new: whether something counts, or a loss is not zero, that was not so in the test.
    """

    communicates: str = ""
    broken: set[Site] = field(default_factory=set)
    is_new: bool = False


@dataclass
class _Found:
    """One rank's findings in the first half of a test."""

    ways: Sequence[Way] = ()
    names: Sequence[str] = ()
    error: str = ""  # of the model
    mistake: str = ""  # of the user, for a ConfigError
    collective: str = ""
    may_have_objects: bool = False


@dataclass
class _Told:
    """One rank's findings in the second half of a test."""

    terms: dict[str, Term]
    zero: frozenset[str]
    not_finite: frozenset[str]
    broken_rules: set[Site]
    left_out: str


class LossRules:
    """Decides what the losses are weighted by, and counts each window accordingly.

    Micro-batches count by their images, which is right for a loss that is a mean over images. A
    loss that is divided by objects, or the like, needs the count of the window. The model declares
    a count by adding it up over ranks. An adapter of the criterion's class or the user can declare
    it, too. Declared counts are the window's if they add up, and a :class:`GradientTest` on the
    job's own images shows that the gradient is then right.

    Args:
        model: without DDP around it.
        losses: called as ``losses(model, batch)``.
        options: which counts are taken over the window.
        recovers: whether ranks may run images again, each for itself.
        cutter: cuts the trainer's windows.
        accumulation_steps: as for the trainer.

    Attributes:
        rules: what losses are weighted by.
        communication: the model's collectives that are not counts.
        lacks_counts: whether the window goes through the model at once, and needs counts if it is
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
        self.lacks_counts = False
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
        self._is_due = options.policy != "off"
        self._tests_left = _MOST_TESTS
        self._has_tested = False
        self._is_spared = False  # a function, in this window
        self._counters: list[str] = []  # that were not named yet
        self._said: set[str] = set()
        if options.policy != "off":
            adapt_criteria(model, is_exact=options.policy == "exact")

    def begin(self, window: Window, forward: Callable[..., Any]) -> None:
        """Find what a window's losses are divided by, before its first forward.

        Args:
            forward: the trainer's forward of a micro-batch.

        Raises:
            ConfigError: on every rank, if the model cannot be trained so.
            OutOfMemoryError: on every rank, if one cannot even begin to count.
        """
        self._answers = None
        self.lacks_counts = False
        if not (self._is_due or self.communication.known) and not self.rules.is_answered:
            if self._ranks > 1:
                self._answers = self._new_answers()
            return
        table = rank_table(self._annotated(window), self._device)
        numbers = [int(number) for *_, number, _ in table]
        largest = int(max(row[-1] for row in table))
        names = (sites.IMAGES, sites.OBJECTS)
        annotated = [sites.added_up([dict(zip(names, row))]) for row in table]
        if self._is_due and (self._recovers or max(numbers) > 1):
            objects = [own[sites.OBJECTS].item() > 0 for own in annotated]
            self._decide(window, objects, largest)
        self.lacks_counts = self._ranks == 1 and numbers[0] == 1
        if self.lacks_counts:  # its own counts are the window's
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

    def of(self, micro_batch: MicroBatch, replays: bool = False) -> AbstractContextManager[None]:
        """Count during a micro-batch's forward, and again (``replays``) during its backward."""
        return nullcontext() if self._answers is None else self._answers.of(micro_batch, replays)

    def run(
        self, micro_batch: MicroBatch, losses: Callable[[Any], Mapping[str, torch.Tensor]]
    ) -> torch.Tensor:
        """The sum of a micro-batch's losses, for which its images are the right weight.

        Each loss is kept in the micro-batch, too.

        Args:
            losses: the forward.

        Raises:
            CommunicationError: the model communicates unexpectedly.
        """
        try:
            with self.of(micro_batch):
                found = losses(micro_batch.batch)
                if self._answers is not None:
                    found = self._answers.weighted(found)
                total: Any = sum(found.values())
                micro_batch.losses = {name: loss.detach() for name, loss in found.items()}
                return total
        except Spared as e:  # a function that cannot work with what it was told of other ranks
            logger.info("%s: this function is told the truth from now on", e)
        self._is_spared = True
        return self.run(micro_batch, losses)

    def report(self, window: Window, found: str) -> CountReport:
        """What this rank's window says about the rules.

        Args:
            found: text of the :class:`CommunicationError` that ended it, if one did.
        """
        is_told = self._ranks == 1 or self.communication.known
        unexpected = "" if is_told else self.communication.found
        report = CountReport(found or unexpected, is_new=self._is_spared)
        self._is_spared = False
        self._name_counters(len(window.micro_batches))
        if not self._has_tested:
            return report
        for counts in self._answers.counts if self._answers is not None else ():
            report.broken |= self.rules.broken(counts)
            report.is_new |= not self.rules.knows(counts)
        tested = self.rules.terms.keys() - self.rules.zero
        losses = [item for m in window.micro_batches for item in m.losses.items()]
        report.is_new |= any(name not in tested and loss.item() for name, loss in losses)
        return report

    def learn(self, reports: Sequence[CountReport]) -> None:
        """Change the rules for later windows by the reports of all ranks.

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
        is_time = self._has_tested and get_event_storage().iter + 1 in _TESTED_AGAIN
        if (is_time or any(r.is_new for r in reports)) and self._options.policy != "off":
            self._is_due = self._tests_left > 0

    def state_dict(self) -> dict[str, Any]:
        """The rules in plain types, with which a resumed run goes on; empty before a test."""
        if not self._has_tested:
            return {}
        spared = self._pretended.spared if self._pretended is not None else ()
        return {
            "rules": self.rules.state_dict(),
            "is_due": self._is_due,
            "tests_left": self._tests_left,
            "spared": sorted(spared),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with the rules of a checkpoint. One of an older version has none: test again."""
        if "rules" not in state or self._options.policy == "off":
            return
        self.rules = Rules.from_state_dict(state["rules"])
        self._is_due = state["is_due"]
        self._tests_left = state["tests_left"]
        self._has_tested = True
        self._said.update(name for name, term in self.rules.terms.items() if term.why)
        if self._pretended is not None:
            self._pretended.spared.update(state["spared"])

    def described(self) -> list[str]:
        """Places in the code whose counts are the window's, and how they are known."""
        how = {True: "from the annotations", False: "by a forward more"}
        counts = self.rules.counts.items()
        return sorted({f"{sites.place_of(s)} ({how[rule is not None]})" for s, rule in counts})

    def _decide(self, window: Window, has_objects: Sequence[bool], largest: int) -> None:
        """Test the losses on the window's images, and set the rules. All ranks call it.

        Args:
            has_objects: whether the window of each rank has any.
            largest: images of the largest micro-batch.
        """
        start = time.perf_counter()
        subject = Subject(self._model, self._losses, self.communication.note, self._pretended)
        is_asked = has_objects[comm.get_rank()] or not (any(has_objects) or self._has_tested)
        test, mine = self._first_half(subject, window, largest if is_asked else 0)
        mine.may_have_objects = may_have_objects(window.images_waiting)
        statistics = test.statistics if test is not None else []
        mine.collective = next(iter(statistics), self.communication.found)
        found = comm.all_gather(mine)
        for mistake in filter(None, (f.mistake for f in found)):
            raise ConfigError(mistake)
        for collective in [f.collective for f in found if f.collective and self._ranks > 1][:1]:
            self.communication.allow(collective)
        self._check_patterns([name for f in found for name in f.names])
        self._is_due = not any(has_objects) and any(f.may_have_objects for f in found)
        self._tests_left -= not self._is_due
        errors = [f.error for f in found if f.error]
        if not any(f.ways for f in found):
            if errors and not self._has_tested and not self._is_due:
                logger.warning(
                    "not known: what losses are divided by could not be tested (%s). Micro-batches "
                    "count by their images. See %s",
                    errors[0],
                    _HELP,
                )
            return
        way = chosen_way([f.ways for f in found if f.ways])
        for place in way.unused:
            raise ConfigError(
                f"window_count in {place}: no loss depends on what it returns. Divide the loss by "
                "it, in the same forward"
            )
        of_ranks = [t for t in comm.all_gather(self._second_half(test, way)) if t is not None]
        terms: dict[str, Term] = {}
        for told in of_ranks:
            for name, term in told.terms.items():
                terms[name] = term.worse(terms.get(name, term))
        self.rules = replace(
            way.rules.without(set().union(*(told.broken_rules for told in of_ranks))),
            terms=terms,
            zero=frozenset.intersection(*(told.zero for told in of_ranks)),
            not_finite=frozenset().union(*(told.not_finite for told in of_ranks)),
            left_out=max(told.left_out for told in of_ranks),
        )
        self._has_tested = True
        if test is not None:
            self._counters = [name for name in test.counters if name not in self._said]
            self._said.update(self._counters)
            others = [name for name in test.changed if name not in test.counters]
            self._say(others, subject.forwards, time.perf_counter() - start)

    def _first_half(
        self, subject: Subject, window: Window, of_micro_batch: int
    ) -> tuple[Optional[GradientTest], _Found]:
        """Test the ways of weighting on this rank's images, if it is asked to."""
        images = window.images_waiting
        found = _Found()
        try:
            if not images:
                found.error = "batches cannot be cut into images"
            elif of_micro_batch:
                test, ways = try_ways(subject, images, self._options.losses, of_micro_batch)
                return test, _Found(ways, test.names)
        except ConfigError as e:
            found.mistake = str(e)
        except UntestableError as e:
            found.error = str(e)
        return None, found

    def _second_half(self, test: Optional[GradientTest], way: Way) -> Optional["_Told"]:
        """What the test says about each loss with the weights that were chosen."""
        if test is None:
            return None
        try:
            terms = with_room(lambda: test.terms(way), self._device)
        except Exception as e:  # of the model's code
            terms = dict.fromkeys(test.names, Term(NOT_KNOWN, 0.0, error_text(e)))
        return _Told(terms, test.zero, frozenset(test.not_finite), test.broken_rules, test.without)

    def _check_patterns(self, names: Sequence[str]) -> None:
        for pattern, _ in self._options.losses if names else ():
            if not any(fnmatchcase(name, pattern) for name in names):
                raise ConfigError(
                    f"MEMFIT.NORMALIZERS.LOSSES: no loss matches {pattern!r}. The model's losses "
                    f"are {', '.join(dict.fromkeys(names))}"
                )

    def _annotated(self, window: Window) -> list[float]:
        """This rank's images, objects, micro-batches, and images in the largest of these."""
        window.load()
        while self._cutter.take(window) is not None:
            pass
        objects = sum(count_objects(m.data) for m in window.micro_batches)
        largest = max((m.num_images for m in window.micro_batches), default=0)
        numbers: list[float] = [window.num_images, objects, len(window.micro_batches), largest]
        window.start_over()
        return numbers

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
        return Answers(self.communication.handle, totals, weights, self._told)

    @property
    def _told(self) -> Optional[PretendedRanks]:
        return self._pretended if self.rules.pretends else None

    def _total(self, kind: str, of_ranks: Sequence[Counts]) -> Counts:
        """The counts of the images that a count of this kind is about."""
        if kind == sites.MEAN and self._is_whole:  # each rank has its own mean, as in Detectron2
            return of_ranks[comm.get_rank()]
        return sites.added_up(of_ranks)

    def _counted(self, window: Window, forward: Callable[..., Any]) -> Sequence[Counts]:
        """Each rank's counts, by a forward of all images without gradients."""
        self._answers = Answers(self.communication.handle, pretended=self._told, is_test=True)
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

    def _say(self, changed: Sequence[str], forwards: int, seconds: float) -> None:
        """Log the word for each loss, and what forwards change in the model."""
        terms = self.rules.terms
        words = []
        for word in (EXACT, CLOSE, OTHER, NOT_KNOWN):
            of_word = {name: term for name, term in terms.items() if term.word == word}
            if of_word:
                worst = max(term.distance for term in of_word.values())
                figure = "" if word == NOT_KNOWN else f" (up to {worst:.1g})"
                words.append(f"{word}{figure}: {', '.join(of_word)}")
        logger.info(
            "Gradients of micro-batches were compared with those of one forward, with %d forwards "
            "of an image in %.1f s. %s%s",
            forwards,
            seconds,
            "; ".join(words),
            f"; with {self.rules.left_out}" if self.rules.left_out else "",
        )
        if changed:
            logger.info(
                "A forward changes %s, so an iteration changes it once per micro-batch",
                ", ".join(changed),
            )
        if bad := sorted(self.rules.not_finite - self._said):
            self._said.update(bad)
            logger.warning(
                "%s: not finite for an image without labels, if it is a micro-batch of its own, "
                "and that ends a run. Sum over the labels, and divide by "
                "d2_memfit.window_count(number of labels)",
                ", ".join(bad),
            )
        new = {
            k: t for k, t in terms.items() if t.word in (OTHER, NOT_KNOWN) and k not in self._said
        }
        self._said.update(new)
        for why in dict.fromkeys(term.why for term in new.values()):
            of_why = {name: term for name, term in new.items() if term.why == why}
            logger.warning("%s. See %s", complaint_about(of_why), _HELP)


def complaint_about(terms: Mapping[str, Term]) -> str:
    """Losses that are wrong for one reason, with their distance and a remedy, in one line."""
    term = max(terms.values(), key=lambda t: t.distance)
    names = ", ".join(terms)
    if term.word == NOT_KNOWN:
        return f"{names}: not known ({term.why})"
    return f"{names}: other, {term.distance:.2g} of the gradient in micro-batches: {term.why}"
