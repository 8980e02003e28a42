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
from torch import nn

from ...counts import PretendedRanks
from ...errors import ConfigError, OutOfMemoryError
from ...job import NormalizerOptions
from ...memory import error_line, is_out_of_memory, release_memory
from ..window import MicroBatch, Window, count_objects, may_have_objects
from . import sites
from .adapters import adapt_criteria
from .answers import Answers, Totals
from .communication import Communication, CommunicationError
from .known import Known
from .sites import Counts, Site
from .totals import run_for_counts
from .trial import Findings, Trial, trial_images
from .verdict import Verdict, published_distance

__all__ = ["CountReport", "Normalizers"]

logger = logging.getLogger(__name__)

_MOST_TRIALS = 4  # windows with a trial
_MOST_RUNS = 4  # runs of one window
_NO_MEMORY = "memory ran out"
_HELP = "docs/ACCUMULATION.md#what-losses-are-divided-by"


@dataclass
class CountReport:
    """One rank's report about the counts of its window. It is pickled, and small.

    Attributes:
        communicates: a collective that was not expected; "" if there was none.
        surprises: counts of micro-batches that what was observed so far does not explain.
        is_untested: whether a loss is not zero that was zero, or missing, in all trials.
    """

    communicates: str = ""
    surprises: list[Counts] = field(default_factory=list)
    is_untested: bool = False


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
        self._told = [pattern for pattern, _ in options.losses]
        self._is_cut = is_cut
        self._is_whole = accumulation_steps == 1 and not is_cut
        self._ranks = comm.get_world_size()
        self._pretended = PretendedRanks() if self._ranks == 1 else None
        handle = self.communication.handle_alone
        self._trial = Trial(model, losses, handle, self._pretended, self._told)
        self._runs = 1  # of this window
        self._answers: Optional[Answers] = None  # None: nothing stands around the model
        self._to_say: Optional[list[str]] = None  # errors of the last trial, until they are logged
        self._with_gradient: set[str] = set()
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

    def begin(self, window: Window, images: Optional[int], forward: Callable[..., Any]) -> None:
        """Find what a window's losses are divided by, before its first forward.

        Args:
            images: images per micro-batch, as for :meth:`Window.take`.
            forward: the trainer's forward of a micro-batch.

        Raises:
            CommunicationError: on every rank. Something was learned of the model, and the window
                must begin anew.
            ConfigError: on every rank, if the model cannot be trained so.
            OutOfMemoryError: on every rank, if one cannot even begin to count.
        """
        self.communication.found = ""
        self._answers = None
        self.lacks_counts = False
        known = self._known
        is_by_images = self.verdict.is_by_images and not known.needs_trial
        if is_by_images and not self.communication.known:
            if self._ranks > 1:
                self._answers = self._new_answers(None)
            return
        parts, numbers = zip(*comm.all_gather(self._part(window, images)))
        self.lacks_counts = self._ranks == 1 and numbers[0] == 1
        if self.lacks_counts:  # its own counts are the window's
            return
        if known.needs_trial:
            self._test(window)
        if self.verdict.is_by_images and self._ranks == 1:
            return
        self.communication.check(numbers)
        everything = sites.added_up(parts)
        of_rank = parts[comm.get_rank()] if self._is_whole else everything
        totals = {
            site: known.rules[site].predicted(of_rank if sites.is_of_rank(site) else everything)
            for site in known.used_sites & known.rules.keys()
        }
        if missing := known.used_sites - {sites.OBJECTS, *totals}:
            totals.update(self._counted(missing, window, images, forward))
        totals.update(everything)
        self._answers = self._new_answers(Totals(totals, of_rank[sites.IMAGES], self._ranks))

    def of(self, micro_batch: MicroBatch, replays: bool = False) -> AbstractContextManager[None]:
        """Count during a micro-batch's forward, and again (``replays``) during its backward.

        In it, :class:`CommunicationError` says that the model communicates unexpectedly, or cannot
        work with what it is told of other ranks.
        """
        return nullcontext() if self._answers is None else self._answers.of(micro_batch, replays)

    def weighted(self, losses: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """The losses of the running micro-batch, for which its images are the right weight."""
        if self._to_say is not None:
            self._with_gradient.update(n for n, loss in losses.items() if loss.requires_grad)
        return losses if self._answers is None else self._answers.weighted(losses)

    def report(self, window: Window) -> CountReport:
        """The facts by which ranks agree whether the window ran with the right counts."""
        report = CountReport(self.communication.found)
        counts = map(sites.added_up, ([n] for n in self._answers.noted)) if self._answers else ()
        report.surprises = [n for n in counts if not self._known.explains(n)]
        if self._known.trials_left and self.verdict.seen:
            losses = [item for m in window.micro_batches for item in m.losses.items()]
            report.is_untested = any(k not in self.verdict.seen and v.item() for k, v in losses)
        return report

    def must_run_again(self, reports: Sequence[CountReport]) -> bool:
        """Learn from a window, and return whether all ranks must run it again.

        Args:
            reports: of all ranks, so that all learn the same.

        Raises:
            ConfigError: on every rank, if the model communicates and cannot be trained so.
        """
        found = next((r.communicates for r in reports if r.communicates), "")
        surprises = [counts for r in reports for counts in r.surprises]
        is_untested = any(r.is_untested for r in reports)
        if found:
            self._hear_of(found)
        if surprises:
            self._known.correct(surprises)
        if is_untested:
            self._known.test_again()
        is_contradicted = self.may_run_again and (is_untested or len(surprises) > 0)
        again = (found != "" or is_contradicted) and self._runs < _MOST_RUNS
        self._runs = self._runs + 1 if again else 1
        if found and not again:
            raise ConfigError(
                f"the model communicates in its forward, {found}, and its window still ended "
                f"there in run {_MOST_RUNS}. Train without it, or set MEMFIT.NORMALIZERS.POLICY off"
            )
        if not again and self._to_say is not None:
            self._say(self._to_say)
            self._to_say = None
        return again

    def state_dict(self) -> dict[str, Any]:
        """What was learned of the model, in plain types. The same run goes on with it."""
        spared = self._pretended.spared if self._pretended is not None else ()
        state = self._known.state_dict()
        return {**state, "spared": sorted(spared)} if state else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if "observed" not in state or not self._known.trials_left:
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
        if images and (tells or not self.verdict.seen):  # images without objects: once
            findings, error = self._tried(images)
        reports = comm.all_gather((findings, error, tells, self.communication.found))
        of_ranks, of_errors, all_tell, heard = zip(*reports)
        if not self.communication.known:
            self.communication.hear(heard)
        self.communication.found = ""
        found = [f for f in of_ranks if f is not None]
        errors = [e for e in of_errors if e]
        self._check(found)
        self._known.learn(found, any(all_tell), _NO_MEMORY not in errors)
        if any(all_tell) and not self._known.needs_trial:
            self._to_say = errors

    def _tried(self, images: Sequence[Any]) -> tuple[Optional[Findings], str]:
        """The findings of a trial, or the error of the last one."""
        error = ""
        for number in (3, 2):  # the third one has no objects
            try:
                return self._trial.run(trial_images(images, number)), ""
            except Exception as e:  # of the model's code
                error = _one_line(e)
            release_memory(next(self._model.parameters()).device)
        return None, error

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
        for _, place, _ in set.intersection(*unused) if unused else ():
            file, line = place[0]
            raise ConfigError(
                f"window_count in {file}:{line}: no loss depends on what it returns. Divide the "
                "loss by it, in the same forward"
            )

    def _hear_of(self, found: str) -> None:
        """Learn, on all ranks, of a collective that was not expected."""
        self.communication.found = ""
        if self._ranks > 1:
            self.communication.allow(found)
            return
        # A function was told of a second rank, and is no more. What it counted is not known now.
        self._known.forget()

    def _part(self, window: Window, images: Optional[int]) -> tuple[Counts, int]:
        """This rank's images and objects, and in how many micro-batches they are."""
        window.load()
        while window.take(images, self._is_cut) is not None:
            pass
        objects = sum(count_objects(m.data) for m in window.micro_batches)
        part: Counts = {sites.IMAGES: window.num_images, sites.OBJECTS: objects}
        number = len(window.micro_batches)
        window.start_over()
        return part, number

    def _new_answers(self, totals: Optional[Totals]) -> Answers:
        pretended = self._pretended if self.verdict.answers else None
        return Answers(self.communication.handle, totals, self.verdict.weights, pretended)

    def _counted(
        self,
        missing: set[Site],
        window: Window,
        images: Optional[int],
        forward: Callable[..., Any],
    ) -> dict[Site, float]:
        """Counts that no rule tells, by a forward of all images without gradients."""
        self._answers = self._new_answers(None)
        recovers = self.communication.may_recover
        found = error = ""
        try:
            run_for_counts(self._model, window, (images, self._is_cut), forward, recovers)
        except CommunicationError as e:
            found = str(e)
        except Exception as e:
            if not (recovers and is_out_of_memory(e)):
                raise
            error = error_line(e)
        own = sites.added_up(self._answers.noted)
        all_found, errors, of_ranks = zip(*comm.all_gather((found, error, own)))
        self.communication.hear(all_found)
        if any(errors):
            raise OutOfMemoryError(
                "there was no memory to count what losses are divided by "
                f"({next(filter(None, errors))}). Lower MEMFIT.MICRO_BATCH, or set "
                "MEMFIT.NORMALIZERS.POLICY off"
            )
        everything = sites.added_up(of_ranks)
        of_rank = own if self._is_whole else everything
        return {s: (of_rank if sites.is_of_rank(s) else everything).get(s, 0.0) for s in missing}

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
        wrong = [n for n in self.verdict.wrong if n in self._with_gradient]
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
