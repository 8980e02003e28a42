# Copyright (c) the d2_memfit developers.
"""What a window's losses are divided by: declared, and tested before it is used."""

import logging
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Optional

import torch
from detectron2.utils import comm
from detectron2.utils.events import get_event_storage
from torch import nn

from ...counts import PretendedRanks
from ...errors import ConfigError, OutOfMemoryError
from ...job import NormalizerOptions
from ...memory import error_line, is_out_of_memory, release_memory
from ..attempts import run_to_count
from ..window import MicroBatch, Window, count_objects, may_have_objects
from . import sites
from .adapters import adapt_criteria
from .answers import Answers, Totals
from .communication import Communication, CommunicationError, raise_on_all
from .sites import Counts, Site
from .trial import OVER_RANKS, Findings, Trial, trial_images
from .trial_forwards import without_traces
from .verdict import Known, Verdict, published_distance

__all__ = ["CountReport", "Normalizers"]

logger = logging.getLogger(__name__)

_MOST_TRIALS = 4  # windows with a trial
_TRIED_AGAIN = (100, 1000)  # iterations; a head that starts at zero has like losses at first
_NO_MEMORY = "memory ran out"
_HELP = "docs/ACCUMULATION.md#what-losses-are-divided-by"


@dataclass
class CountReport:
    """One rank's report about the counts of its window. It is pickled, and small.

    Attributes:
        communicates: a collective that was not expected; "" if there was none.
        broken: sites whose counts do not follow their rule.
        is_untested: whether something counts, or a loss is not zero, that was not so in any trial.
    """

    communicates: str = ""
    broken: set[Site] = field(default_factory=set)
    is_untested: bool = False


class Normalizers:
    """Knows what the losses of each window are divided by.

    Micro-batches count by their images, which is right for a loss that is a mean over images. A
    loss that is divided by objects, or the like, needs the count of the window. The model declares
    a count by adding it up over ranks. An adapter of the criterion's class or the user can declare
    it, too. Declared counts are the window's if a :class:`Trial` on the job's own images shows that
    the losses are then right.

    Args:
        model: without DDP around it.
        losses: called as ``losses(model, batch)``.
        options: which counts are taken over the window.
        recovers: whether ranks may run images again, each for itself.
        is_cut: whether the trainer cuts the loader's batches.
        accumulation_steps: as for the trainer.

    Attributes:
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
        is_cut: bool,
        accumulation_steps: int,
    ) -> None:
        self.communication = Communication(recovers, is_cut)
        self.lacks_counts = False
        self._known = Known(0 if options.policy == "off" else _MOST_TRIALS)
        self._model = model
        self._by_objects = [pattern for pattern, _ in options.losses]
        self._is_cut = is_cut
        self._is_whole = accumulation_steps == 1 and not is_cut
        self._ranks = comm.get_world_size()
        self._pretended = PretendedRanks() if self._ranks == 1 else None
        handle = self.communication.handle_alone
        self._trial = Trial(model, losses, handle, self._pretended, self._by_objects)
        self._answers: Optional[Answers] = None  # None: nothing stands around the model
        self._trial_errors: Optional[list[str]] = None  # of the last trial, until they are logged
        self._with_gradient: set[str] = set()
        self._said: set[str] = set()  # losses that are not the full batch's
        if options.policy != "off":
            adapt_criteria(model, is_exact=options.policy == "exact")

    @property
    def verdict(self) -> Verdict:
        """How micro-batches are weighted."""
        return self._known.verdict

    @property
    def may_run_again(self) -> bool:
        """Whether this window's counts may turn out wrong after it ran."""
        is_counted = self._ranks > 1 or len(self._known.used_sites) > 0
        return self._answers is not None and is_counted

    def begin(
        self, window: Window, micro_batch_size: Optional[int], forward: Callable[..., Any]
    ) -> None:
        """Find what a window's losses are divided by, before its first forward.

        Args:
            micro_batch_size: images per micro-batch; None is the loader's batch.
            forward: the trainer's forward of a micro-batch.

        Raises:
            CommunicationError: on every rank. Something was learned of the model, and the window
                must begin anew.
            ConfigError: on every rank, if the model cannot be trained so.
            OutOfMemoryError: on every rank, if one cannot even begin to count.
        """
        self._answers = None
        self.lacks_counts = False
        known = self._known
        is_by_images = self.verdict.is_by_images and not known.needs_trial
        if is_by_images and not self.communication.known:
            if self._ranks > 1:
                self._answers = self._new_answers()
            return
        parts, numbers = zip(*comm.all_gather(self._part(window, micro_batch_size)))
        self.lacks_counts = self._ranks == 1 and numbers[0] == 1
        if self.lacks_counts:  # its own counts are the window's
            return
        if known.needs_trial:
            self._test(window)
        if self.verdict.is_by_images and self._ranks == 1:
            return
        self.communication.check(numbers)
        is_annotated = known.used_sites <= known.rules.keys()
        counted = parts if is_annotated else self._counted(window, micro_batch_size, forward)
        totals = sites.added_up(parts)
        for site in known.used_sites:
            if site in known.rules:
                totals[site] = known.count_by_rule(site, self._total(site[0], parts))
            else:
                totals[site] = self._total(site[0], counted).get(site, 0.0)
        mean_images = self._total(sites.MEAN, parts)[sites.IMAGES]
        self._answers = self._new_answers(
            Totals(totals, totals[sites.IMAGES], mean_images, self._ranks)
        )

    def of(self, micro_batch: MicroBatch, replays: bool = False) -> AbstractContextManager[None]:
        """Count during a micro-batch's forward, and again (``replays``) during its backward.

        Raises:
            CommunicationError: in it, if the model communicates unexpectedly, or cannot work with
                what it is told of other ranks.
        """
        return nullcontext() if self._answers is None else self._answers.of(micro_batch, replays)

    def weighted(self, losses: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """The losses of the running micro-batch, for which its images are the right weight."""
        if self._trial_errors is not None:
            self._with_gradient.update(n for n, loss in losses.items() if loss.requires_grad)
        return losses if self._answers is None else self._answers.weighted(losses)

    def report(self, window: Window, found: str) -> CountReport:
        """The facts by which ranks agree whether the window ran with the right counts.

        Args:
            found: text of the :class:`CommunicationError` that ended it, if one did.
        """
        report = CountReport(found)
        known = self._known
        for counts in self._answers.counts if self._answers is not None else ():
            report.broken |= known.broken_rules(counts)
            report.is_untested |= known.is_new(counts)
        if known.trials_left and self.verdict.seen:
            losses = [item for m in window.micro_batches for item in m.losses.items()]
            report.is_untested |= any(k not in self.verdict.seen and v.item() for k, v in losses)
        return report

    def must_run_again(self, reports: Sequence[CountReport]) -> bool:
        """Learn from a window, and return whether all ranks must run it again.

        The runs come to an end: the number of trials is limited, and a broken rule is not used
        again.

        Args:
            reports: of all ranks, so that all learn the same.

        Raises:
            ConfigError: on every rank, if the model communicates and cannot be trained so.
        """
        found = next((r.communicates for r in reports if r.communicates), "")
        broken = set().union(*(r.broken for r in reports))
        was_due = self._known.needs_trial
        if found and self._ranks > 1:
            self.communication.allow(found)
        elif found:  # a function is no longer told of a second rank, so its counts are missing
            self._known.forget()
        if broken:
            self._known.correct(broken)
        if any(r.is_untested for r in reports):
            self._known.test_again()
        is_due = self._known.needs_trial and not was_due
        again = found != "" or len(broken) > 0 or (is_due and self.may_run_again)
        if not again and self._trial_errors is not None:
            self._say(self._trial_errors)
            self._trial_errors = None
        if self.verdict.seen and get_event_storage().iter + 1 in _TRIED_AGAIN and not again:
            self._known.test_again()
        return again

    def state_dict(self) -> dict[str, Any]:
        """The facts learned of the model, in plain types, with which a resumed run goes on."""
        spared = self._pretended.spared if self._pretended is not None else ()
        state = self._known.state_dict()
        return {**state, "spared": sorted(spared)} if state else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if "broken" not in state or not self._known.trials_left:
            return
        self._known.load_state_dict(state)
        if self._pretended is not None:
            self._pretended.spared.update(state["spared"])

    def described(self) -> list[str]:
        """Places in the code whose counts are the window's, and how they are known."""
        lines: set[str] = set()
        for site in self._known.used_sites:
            how = "from the annotations" if site in self._known.rules else "by a forward more"
            lines.update(f"{file}:{line} ({how})" for file, line in site[1][:1])
        return sorted(lines)

    def _test(self, window: Window) -> None:
        """Test the weights on the window's images."""
        images = window.images_waiting
        tells = count_objects(images) > 0 or not may_have_objects(images)
        findings = None
        error = "" if images else "batches cannot be cut into images"
        found = ""
        if images and (tells or not self.verdict.seen):  # images without objects: once
            try:
                findings, error = self._tried(images)
            except CommunicationError as e:
                found = str(e)
        of_ranks, errors, all_tell, all_found = zip(
            *comm.all_gather((findings, error, tells, found))
        )
        raise_on_all(all_found)
        tried = [f for f in of_ranks if f is not None]
        self._check(tried)
        self._known.learn(tried, any(all_tell), _NO_MEMORY not in errors)
        if any(all_tell) and not self._known.needs_trial:
            self._trial_errors = [e for e in errors if e]

    def _tried(self, images: Sequence[Any]) -> tuple[Optional[Findings], str]:
        """The findings of a trial, or the error of the last one."""
        logger.info("Testing what losses are divided by, with images of this window")
        error = ""
        for number in (3, 2):  # the third one has no objects
            try:
                return self._trial.run(trial_images(images, number)), ""
            except Exception as e:  # of the model's code
                is_news = isinstance(e, CommunicationError) and not self.communication.known
                if is_news and self._ranks > 1:
                    raise
                error = _one_line(e)
            release_memory(next(self._model.parameters()).device)
        return None, error

    def _check(self, found: Sequence[Findings]) -> None:
        """Raise :class:`ConfigError`, on all ranks, if a count has nothing to do with a loss."""
        losses = list(dict.fromkeys(name for f in found for name in f.whole))
        for pattern in self._by_objects if found else ():
            if not any(fnmatchcase(name, pattern) for name in losses):
                raise ConfigError(
                    f"MEMFIT.NORMALIZERS.LOSSES: no loss matches {pattern!r}. The model's losses "
                    f"are {', '.join(losses)}"
                )
        unused = [set(f.unused) for f in found if len(f.off) > 1]
        for kind, place, _ in set.intersection(*unused) if unused else ():
            if kind == sites.SUM:  # for the log
                continue
            file, line = place[0]
            raise ConfigError(
                f"window_count in {file}:{line}: no loss depends on what it returns. Divide the "
                "loss by it, in the same forward"
            )

    def _part(self, window: Window, micro_batch_size: Optional[int]) -> tuple[Counts, int]:
        """This rank's images and objects, and in how many micro-batches they are."""
        window.load()
        while window.take(micro_batch_size, self._is_cut) is not None:
            pass
        objects = sum(count_objects(m.data) for m in window.micro_batches)
        part: Counts = {sites.IMAGES: window.num_images, sites.OBJECTS: objects}
        number = len(window.micro_batches)
        window.start_over()
        return part, number

    def _new_answers(self, totals: Optional[Totals] = None) -> Answers:
        pretended = self._pretended if self.verdict.way == OVER_RANKS else None
        weights = self.verdict.weights if totals else {}
        return Answers(self.communication.handle, totals, weights, pretended)

    def _total(self, kind: str, of_ranks: Sequence[Counts]) -> Counts:
        """The counts of the images that a count of this kind is about."""
        if kind == sites.MEAN and self._is_whole:  # each rank has its own mean, as in Detectron2
            return of_ranks[comm.get_rank()]
        return sites.added_up(of_ranks)

    def _counted(
        self, window: Window, micro_batch_size: Optional[int], forward: Callable[..., Any]
    ) -> Sequence[Counts]:
        """Each rank's counts, by a forward of all images without gradients."""
        self._answers = self._new_answers()
        found = error = ""
        may_recover = self.communication.may_recover
        try:
            with without_traces(self._model):
                run_to_count(
                    self._model, window, forward, micro_batch_size, self._is_cut, may_recover
                )
        except CommunicationError as e:
            found = str(e)
            window.start_over()
        except Exception as e:
            if not (may_recover and is_out_of_memory(e)):
                raise
            error = error_line(e)
        own = sites.added_up(self._answers.counts)
        all_found, errors, of_ranks = zip(*comm.all_gather((found, error, own)))
        raise_on_all(all_found)
        if any(errors):
            raise OutOfMemoryError(
                "there was no memory to count what losses are divided by "
                f"({next(filter(None, errors))}). Lower MEMFIT.MICRO_BATCH, or set "
                "MEMFIT.NORMALIZERS.POLICY off"
            )
        return of_ranks

    def _say(self, errors: Sequence[str]) -> None:
        """Log which losses are not the full batch's."""
        distances = self.verdict.distances
        if errors and not distances:
            logger.warning(
                "What losses are divided by could not be tested (%s). Micro-batches count by their "
                "images: %s",
                errors[0],
                _HELP,
            )
        wrong = [n for n in self.verdict.wrong if n in self._with_gradient - self._said]
        self._said.update(wrong)
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


def _one_line(error: Exception) -> str:
    if is_out_of_memory(error):
        return _NO_MEMORY
    place = traceback.extract_tb(error.__traceback__)[-1]
    file = "/".join(Path(place.filename).parts[-2:])
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]} in {file}:{place.lineno}"
