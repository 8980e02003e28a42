# Copyright (c) the d2_memfit developers.
"""What a window's losses are divided by: declared, and tested before it is used."""

import logging
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Optional

import torch
from detectron2.utils import comm
from torch import nn

from ...counts import PretendedRanks
from ...errors import ConfigError, OutOfMemoryError
from ...job import NormalizerOptions
from ...memory import error_line, is_out_of_memory, release_memory
from ..window import MicroBatch, Window, count_objects, may_have_objects
from .adapters import adapt_criteria
from .answers import DECLARED, IN_FULL, OBJECTS, SUM, Answers, Noted, Site, Totals
from .communication import Communication, CommunicationError
from .totals import Rule, run_for_counts
from .trial import Findings, Trial, trial_images
from .verdict import Verdict, judged, published_distance

__all__ = ["CountReport", "Normalizers"]

logger = logging.getLogger(__name__)

_MOST_TRIALS = 4  # windows with a trial
_MOST_RUNS = 3  # runs of one window
_HELP = "docs/ACCUMULATION.md#what-losses-are-divided-by"


@dataclass
class CountReport:
    """One rank's report about the counts of its window. It is pickled, and small.

    Attributes:
        communicates: a collective that was not expected; "" if there was none.
        unknown: sites that no trial has seen.
        wrong: sites whose rule does not explain a count.
        untested: losses that no trial has seen, or only as zero.
    """

    communicates: str = ""
    unknown: set[Site] = field(default_factory=set)
    wrong: set[Site] = field(default_factory=set)
    untested: set[str] = field(default_factory=set)


class Normalizers:
    """Knows what the losses of each window are divided by.

    Micro-batches count by their images. That is right for a loss that is a mean over images. A loss
    that is divided by objects, or the like, needs the count of the window. A count is the window's
    if the model adds it up over ranks, an adapter of the criterion's class declares it, or the user
    does; and if a :class:`Trial` on the job's own images shows that the losses are then right.

    Args:
        model: without DDP around it.
        losses: called as ``losses(model, batch)``.
        options: which counts are taken over the window.
        recovers: whether ranks may run images again, each for itself.
        is_cut: whether the trainer cuts the loader's batches.
        accumulation_steps: as for the trainer.

    Attributes:
        communication: the model's collectives that are not counts.
        verdict: how micro-batches are weighted.
    """

    def __init__(
        self,
        model: nn.Module,
        losses: Callable[[nn.Module, Any], Mapping[str, torch.Tensor]],
        options: NormalizerOptions,
        recovers: bool,
        is_cut: bool,
        accumulation_steps: int,
    ) -> None:
        self.communication = Communication(recovers, is_cut)
        self.verdict = Verdict()
        self._model = model
        self._losses = losses
        self._told = [pattern for pattern, _ in options.losses]
        self._recovers = recovers
        self._is_cut = is_cut
        self._is_whole = accumulation_steps == 1 and not is_cut
        self._ranks = comm.get_world_size()
        self._needs_trial = options.policy != "off"
        self._has_to_ask = False  # after a resume, how the model is told of a second rank
        self._trials_left = _MOST_TRIALS if self._needs_trial else 0
        self._findings: list[Findings] = []
        self._errors: list[str] = []  # of trials that failed
        self._may_pretend = self._ranks == 1
        self._pretended: Optional[PretendedRanks] = None
        self._sites = {OBJECTS}
        self._rules = {OBJECTS: Rule(1, 0)}
        self._without_rule: set[Site] = set()
        self._is_uncut = False
        self._runs = 1
        self._answers: Optional[Answers] = None
        self._with_gradient: set[str] = set()
        self._has_to_warn = False
        if options.policy != "off":
            adapt_criteria(model, is_exact=options.policy == "exact")

    @property
    def may_run_again(self) -> bool:
        """Whether this window's counts may turn out wrong after it ran."""
        counts = self._ranks > 1 or len(self._used_sites) > 0
        return self._answers is not None and counts

    @property
    def lacks_counts(self) -> bool:
        """Whether the window goes through the model at once, and needs counts if it is cut."""
        return self._is_uncut and (self._needs_trial or not self.verdict.is_by_images)

    def test(self, window: Window, is_cut: bool) -> None:
        """Test the weights on the window's images, if they are not known.

        Args:
            is_cut: whether the window is known to go through the model in several micro-batches.

        Raises:
            ConfigError: on every rank, if the model cannot be trained so, or if a declared count
                has nothing to do with a loss.
        """
        if not (is_cut or self._ranks > 1 or not self._is_whole):
            return
        if self._has_to_ask:
            self._has_to_ask = False
            window.load()
            trial = self._trial()
            trial.ask(trial_images(window.images_waiting)[:1])
            self._pretended = trial.pretended
        if not self._needs_trial:
            return
        window.load()
        images = window.images_waiting
        tells = count_objects(images) > 0 or not may_have_objects(images)
        findings = None
        error = "" if images else "batches cannot be cut into images"
        if images and (tells or not self.verdict.seen):  # images without objects: once
            findings, error = self._tried(images)
        reports = comm.all_gather((findings, error, tells, self.communication.found))
        all_findings, errors, all_tell, heard = zip(*reports)
        self.communication.found = ""
        if any(heard) and self._ranks > 1:
            self.communication.allow(next(filter(None, heard)))
        found = [f for f in all_findings if f is not None]
        self._errors = [e for e in errors if e]
        self._check(found)
        if not found and not self._errors:
            return
        if found:
            self.verdict = judged([*self._findings, *found])
        for f in found:
            self._sites.update(f.sites)
            rules = {s: r for s, r in f.rules.items() if s not in self._without_rule}
            self._rules = {**rules, **self._rules}
        if any(all_tell) or not found:
            self._findings += found
            self._trials_left -= 1
            is_open = self.verdict.is_open or _NO_MEMORY in self._errors
            self._needs_trial = is_open and self._trials_left > 0
            self._has_to_warn = not self._needs_trial

    def begin(self, window: Window, images: Optional[int], forward: Callable[..., Any]) -> bool:
        """Find what a window's losses are divided by, before its first forward.

        Args:
            images: images per micro-batch, as for :meth:`Window.take`.
            forward: the trainer's forward of a micro-batch.

        Returns:
            bool: whether it is known. If not, something was learned of the model, and the window
                must be tested and cut anew.

        Raises:
            ConfigError: on every rank, if the model communicates and numbers of micro-batches
                differ.
        """
        self.communication.found = ""
        self._answers = None
        self._is_uncut = self._ranks == 1 and self._is_whole and images is None
        if self._is_uncut:  # its own counts are the window's
            return True
        if self.verdict.is_by_images and not self.communication.known:
            if self._ranks > 1:
                self._answers = self._new_answers(None)
            return True
        parts, numbers = zip(*comm.all_gather(self._part(window, images)))
        self._is_uncut = self._ranks == 1 and numbers[0] == 1
        if self._is_uncut:
            return True
        self.communication.check(numbers)
        everything = _sum(parts)
        of_rank = parts[comm.get_rank()] if self._is_whole else everything
        totals = Totals(everything.images, of_rank.images, self._ranks)
        for site in self._used_sites & set(self._rules):
            part = of_rank if site.of_rank else everything
            totals.counts[site] = self._rules[site].predicted(part)
        missing = self._used_sites - set(self._rules)
        if missing:
            totals.counts.update(self._counted(missing, window, images, forward))
        self._answers = self._new_answers(totals)
        if self.communication.found:
            self._hear_of(self.communication.found)
            return False
        return True

    @contextmanager
    def of(self, micro_batch: MicroBatch, replays: bool = False) -> Iterator[None]:
        """Count during a micro-batch's forward, and again (``replays``) during its backward.

        Raises:
            CommunicationError: the model communicates unexpectedly, or cannot work with what it is
                told of other ranks.
        """
        if self._answers is None:
            yield
            return
        try:
            with self._answers.of(micro_batch, replays):
                yield
        except Exception as e:
            if self._pretended is None or replays or is_out_of_memory(e):
                raise
            raise CommunicationError(self.communication.found or str(e)) from e

    def weighted(self, losses: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """The losses of the running micro-batch, for which its images are the right weight."""
        if self._has_to_warn:
            self._with_gradient.update(n for n, loss in losses.items() if loss.requires_grad)
        return losses if self._answers is None else self._answers.weighted(losses)

    def report(self, window: Window) -> CountReport:
        """The facts by which ranks agree whether the window ran with the right counts."""
        report = CountReport(self.communication.found)
        for n in self._answers.noted if self._answers is not None else ():
            report.unknown |= n.counts.keys() - self._sites
            for site in self._used_sites & set(self._rules):
                if not self._rules[site].explains(site, n):
                    report.wrong.add(site)
        if self._trials_left and self.verdict.seen:
            for m in window.micro_batches:
                losses = m.losses.items()
                report.untested |= {k for k, v in losses if k not in self.verdict.seen and v.item()}
        return report

    def must_run_again(self, reports: Sequence[CountReport]) -> bool:
        """Learn from a window, and return whether all ranks must run it again.

        Args:
            reports: of all ranks, so that all learn the same.

        Raises:
            ConfigError: on every rank, if the model communicates and cannot be trained so.
        """
        found = [r.communicates for r in reports if r.communicates]
        unknown, wrong = (
            set().union(*sets) for sets in zip(*((r.unknown, r.wrong) for r in reports))
        )
        if found:
            self._hear_of(found[0])
        for site in wrong:
            del self._rules[site]
        self._without_rule |= wrong
        self._sites |= unknown
        is_untested = any(r.untested for r in reports)
        if unknown or is_untested:
            self._test_again()
        is_contradicted = bool(found or unknown or wrong or is_untested)
        again = is_contradicted and self.may_run_again and self._runs < _MOST_RUNS
        self._runs = self._runs + 1 if again else 1
        if found and not again:
            raise ConfigError(
                f"the model communicates in its forward, {found[0]}, and its window still ended "
                f"there in run {_MOST_RUNS}. Train without it, or set MEMFIT.NORMALIZERS.POLICY off"
            )
        if not again and self._has_to_warn:
            self._warn()
        return again

    def state_dict(self) -> dict[str, Any]:
        """What was learned of the model, in plain types. The same run goes on with it."""
        if not self.verdict.seen:
            return {}
        return {
            "needs_trial": self._needs_trial,
            "findings": [f.state_dict() for f in self._findings],
            "may_pretend": self._may_pretend or self._ranks > 1,  # several ranks do not know
            "answers": self.verdict.answers,
            "weights": {name: tuple(site) for name, site in self.verdict.weights.items()},
            "seen": sorted(self.verdict.seen),
            "sites": [tuple(site) for site in sorted(self._sites)],
            "rules": [(tuple(site), tuple(rule)) for site, rule in self._rules.items()],
            "without_rule": [tuple(site) for site in sorted(self._without_rule)],
            "trials_left": self._trials_left,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if not state or not self._trials_left:
            return
        weights = {name: Site(*site) for name, site in state["weights"].items()}
        self.verdict = Verdict(state["answers"], weights, seen=frozenset(state["seen"]))
        self._sites = {Site(*site) for site in state["sites"]}
        self._rules = {Site(*site): Rule(*rule) for site, rule in state["rules"]}
        self._without_rule = {Site(*site) for site in state["without_rule"]}
        self._trials_left = state["trials_left"]
        self._needs_trial = state["needs_trial"]
        self._findings = [Findings.from_state_dict(f) for f in state["findings"]]
        self._may_pretend = state["may_pretend"] and self._ranks == 1
        self._has_to_ask = self.verdict.answers and self._ranks == 1

    def described(self) -> list[str]:
        """Places in the code whose counts are the window's, and how they are known."""
        lines: set[str] = set()
        for site in self._used_sites:
            how = "from the annotations" if site in self._rules else "by a forward more"
            lines.update(f"{file}:{line} ({how})" for file, line in site.place[:1])
        return sorted(lines)

    @property
    def _used_sites(self) -> set[Site]:
        """Sites whose totals are needed."""
        answered = {s for s in self._sites if s.kind in (SUM, DECLARED)}
        used = answered if self.verdict.answers else set()
        return (used | set(self.verdict.weights.values())) - {IN_FULL}

    def _tried(self, images: Sequence[Any]) -> tuple[Optional[Findings], str]:
        """The findings of a trial, or the error of the last one."""
        error = ""
        for number, with_empty in ((3, True), (3, False), (2, False)):
            chosen = trial_images(images, with_empty)[:number]
            trial = self._trial()
            try:
                findings = trial.run(chosen)
            except Exception as e:  # of the model's code
                error = _one_line(e)
            else:
                self._pretended = trial.pretended
                if trial.refuses:
                    logger.warning(
                        "The model's losses are other ones when it is told that there are ranks, "
                        "so the counts that it would add up over ranks are those of each "
                        "micro-batch"
                    )
                return findings, ""
            release_memory(next(self._model.parameters()).device)
        return None, error

    def _trial(self) -> Trial:
        handle = self.communication.handle_alone
        return Trial(self._model, self._losses, handle, self._may_pretend, self._told)

    def _check(self, found: Sequence[Findings]) -> None:
        """Raise :class:`ConfigError`, on all ranks, if a count has nothing to do with a loss."""
        losses = list(dict.fromkeys(name for f in found for name in f.whole))
        for pattern in self._told if found else ():
            if not any(fnmatchcase(name, pattern) for name in losses):
                raise ConfigError(
                    f"MEMFIT.NORMALIZERS.LOSSES: no loss matches {pattern!r}. The model's losses "
                    f"are {', '.join(losses)}"
                )
        unused = [set(f.unused) for f in found if f.answered]
        for site in set.intersection(*unused) if unused else ():
            file, line = site.place[0]
            raise ConfigError(
                f"window_count in {file}:{line}: no loss depends on what it returns. Divide the "
                "loss by it, in the same forward"
            )

    def _test_again(self) -> None:
        """Let the next window, or this one's next run, be tested anew."""
        self._needs_trial = self._trials_left > 0
        self._findings.clear()

    def _hear_of(self, found: str) -> None:
        """Learn, on all ranks, of a collective that was not expected."""
        self.communication.found = ""
        if self._ranks > 1:
            self.communication.allow(found)
            return
        self._may_pretend = False
        self._pretended = None  # an error that comes again is the model's own
        self._trials_left = max(self._trials_left, 1)
        self._test_again()

    def _part(self, window: Window, images: Optional[int]) -> tuple[Noted, int]:
        """This rank's images and objects, and in how many micro-batches they are."""
        window.load()
        while window.take(images, self._is_cut) is not None:
            pass
        data = [m.data for m in window.micro_batches]
        part = Noted(window.num_images, sum(map(count_objects, data)))
        window.start_over()
        return part, len(data)

    def _new_answers(self, totals: Optional[Totals]) -> Answers:
        handle = self.communication.handle_alone if self._ranks == 1 else self.communication.handle
        pretended = self._pretended if self.verdict.answers else None
        return Answers(handle, totals, self.verdict.weights, pretended)

    def _counted(
        self,
        sites: set[Site],
        window: Window,
        images: Optional[int],
        forward: Callable[..., Any],
    ) -> dict[Site, float]:
        """Counts that no rule tells, by a forward of all images without gradients.

        If a rank finds a collective that is not expected, all have it in ``communication.found``.

        Raises:
            OutOfMemoryError: on all ranks, if one has no memory even to begin.
        """
        answers = self._new_answers(None)
        self._answers = answers
        recovers = self._recovers and not self.communication.known
        error = ""
        try:
            with suppress(CommunicationError):  # all ranks hear of it
                run_for_counts(self._model, window, (images, self._is_cut), forward, recovers)
        except Exception as e:
            if not (recovers and is_out_of_memory(e)):
                raise
            error = error_line(e)
        own = {site: sum(n.count(site) for n in answers.noted) for site in sites}
        found, of_ranks, errors = zip(*comm.all_gather((self.communication.found, own, error)))
        if any(errors):
            error = next(filter(None, errors))
            raise OutOfMemoryError(
                f"there was no memory to count what losses are divided by ({error}). Lower "
                "MEMFIT.MICRO_BATCH, or set MEMFIT.NORMALIZERS.POLICY off"
            )
        self.communication.found = next(filter(None, found), "")
        of_all = {site: sum(of_rank[site] for of_rank in of_ranks) for site in sites}
        return {s: (own if s.of_rank and self._is_whole else of_all)[s] for s in sites}

    def _warn(self) -> None:
        """Say, once, which losses are not the full batch's."""
        self._has_to_warn = False
        if not self.verdict.distances:
            logger.warning(
                "What losses are divided by could not be tested (%s). Micro-batches count by their "
                "images: %s",
                self._errors[0],
                _HELP,
            )
        wrong = [n for n in self.verdict.wrong if n in self._with_gradient]
        distances = self.verdict.distances
        published = {n: published_distance(self._model, n).distance for n in wrong}
        stated = [n for n in wrong if distances[n] <= published[n]]
        if stated:
            logger.info(
                "%s: close to the full batch's, not equal. See %s", ", ".join(stated), _HELP
            )
        others = [f"{n} ({distances[n]:.2g})" for n in wrong if n not in stated]
        if others:
            logger.warning(
                "Micro-batches have other losses than the full batch, by these relative distances: "
                "%s. A loss is divided by a count of its own micro-batch, or its images depend on "
                "each other. Micro-batches count by their images. Declare the count with "
                "d2_memfit.window_count or MEMFIT.NORMALIZERS.LOSSES: %s",
                ", ".join(others),
                _HELP,
            )


_NO_MEMORY = "memory ran out"


def _sum(parts: Sequence[Noted]) -> Noted:
    return Noted(sum(p.images for p in parts), sum(p.objects for p in parts))


def _one_line(error: Exception) -> str:
    if is_out_of_memory(error):
        return _NO_MEMORY
    place = traceback.extract_tb(error.__traceback__)[-1]
    file = "/".join(Path(place.filename).parts[-2:])
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]} in {file}:{place.lineno}"
