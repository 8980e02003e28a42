# Copyright (c) the d2_memfit developers.
"""The search for the fastest choice that fits, with few dry runs."""

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Optional

from ...techniques import TIERS, get_technique
from ..estimates import DryJob
from .selective import BLOCKWISE, most_saved, with_blocks
from .trials import Choice, Trials, choice_of

__all__ = ["Fastest"]

_FAR = 1.3  # times the limit; a job that needs more may not fit with all techniques together
_WORTH_IT = 0.98  # share of the time; a choice that takes more is not preferred to another

_Names = tuple[str, ...]


class Fastest:
    """Finds the fastest choice within a limit of memory that does the least harm.

    The limit decides which choices fit, and nothing else about the order in which they are
    preferred, so that more memory makes none slower. A choice is tried only if it can win: times
    are interpolated between micro-batch sizes, exact to 0.3%. Memory always comes from a dry run.

    Args:
        trials: makes the dry runs, and has the limit.
    """

    def __init__(self, trials: Trials) -> None:
        self._trials = trials
        self._window = trials.job.geometry.window
        self._images = trials.job.geometry.largest_micro_batch

    def choice(self, tiers: Sequence[str], prefer: str = "exact") -> Optional[Choice]:
        """Find the fastest choice that does the least harm and fits; None if none fits.

        A job that fits is not changed. Techniques of the tiers "precision" and "recipe" are used
        only if nothing else fits, as many as needed, the least harmful first: predicted times do
        not decide about harm.

        Args:
            prefer: "speed" lets the tiers "exact" and "precision" compete in predicted time alone.
        """
        exact, precision, recipes = (self._trials.names(t) if t in tiers else () for t in TIERS)
        least = self._least_images([tier for tier in tiers if tier != "recipe"])
        found = self._fastest((), exact, least)
        if prefer == "speed" and precision:
            faster = tuple(name for name in precision if self._is_faster(name))
            rival = self._fastest(faster, (*precision, *exact), least)
            if rival is not None and (
                found is None or self._seconds(rival) < _WORTH_IT * self._seconds(found)
            ):
                found = rival
        if found is None:
            found = self._with_least_harm(precision, exact, least)
        if found is None and recipes:
            least = self._least_images(tiers)
            found = self._with_least_harm((*precision, *recipes), exact, least)
        return found

    def smallest(self, tiers: Sequence[str]) -> Choice:
        """The choice with all techniques of these tiers."""
        names = [name for tier in tiers for name in self._trials.names(tier)]
        least = self._least_images(tiers)
        return choice_of(self._that_run((), self._trials.usable(names), least), least)

    def _helpful(self, names: Iterable[str]) -> list[str]:
        """The techniques that change the job."""
        return [name for name in names if self._trials.helps(name)]

    def _least_images(self, tiers: Sequence[str]) -> int:
        return 1 if self._trials.micro_batch_tier in tiers else self._images

    def _is_faster(self, name: str) -> bool:
        """Whether a technique makes an iteration faster.

        On a CPU this depends on its instructions, which the device model does not know.
        """
        can_be = self._trials.device.is_gpu and not get_technique(name).never_faster
        with_it, without = choice_of((name,), self._images), choice_of((), self._images)
        if not can_be or not self._trials.is_usable(name) or not self._trials.runs(with_it):
            return False
        return self._seconds(with_it) < _WORTH_IT * self._seconds(without)

    def _fastest(self, lead: _Names, more: Sequence[str], least: int) -> Optional[Choice]:
        """The fastest choice that fits with all of ``lead`` and some of ``more``."""
        all_at_once = choice_of(lead, self._images)
        if self._trials.fits(all_at_once):
            return all_at_once
        if not self._trials.runs(all_at_once) or not self._trials.runs(choice_of(lead, least)):
            return None
        more = [name for name in more if name not in lead]
        if self._trials.fits(choice_of(lead, least)):
            best = choice_of(lead, self._most_images(lead, least))
            if self._seconds(all_at_once) >= _WORTH_IT * self._seconds(best):
                return best
            return self._with_some(lead, more, least, best)
        if not self._may_fit_with(lead, more, least):
            return None
        found = self._with_some(lead, more, least)
        if found is None:
            found = choice_of(self._that_run(lead, self._helpful(more), least), least)
            found = self._without_what_is_not_needed(found, lead)
        return found if self._trials.fits(found) else None

    def _may_fit_with(self, lead: _Names, more: Sequence[str], num_images: int) -> bool:
        """Whether some of ``more`` may be enough. If ``lead`` is far too large, all are tried."""
        if self._dry_job(lead, num_images).training_bytes() <= _FAR * self._trials.limit_bytes:
            return True
        with_all = self._that_run(lead, self._trials.usable(more), num_images)
        return self._trials.fits(choice_of(with_all, num_images))

    def _with_some(
        self, lead: _Names, more: Sequence[str], least: int, best: Optional[Choice] = None
    ) -> Optional[Choice]:
        """The fastest choice that fits with some of ``more``; ``best`` if that is as fast."""
        best_s = math.inf if best is None else self._seconds(best)
        blockwise = [name for name in BLOCKWISE if name in more and self._trials.is_usable(name)]
        for names, spare_s in self._levels(lead, more):
            saved = most_saved(self._trials, choice_of(names, self._trials.few), blockwise)
            of_blocks = 1.0  # factor of the time; larger micro-batches need as many, or more
            for num_images in self._sizes(least):
                plain_s = self._seconds_with(names, num_images)
                enough_s = _WORTH_IT * best_s
                needs = self._bytes_with(names, num_images) - saved * num_images / self._trials.few
                can_fit = needs <= self._trials.limit_bytes
                if not can_fit or plain_s * of_blocks >= enough_s + spare_s:
                    continue
                plain = choice_of(names, num_images)
                found, seconds = with_blocks(self._trials, plain, blockwise, enough_s + spare_s)
                of_blocks = seconds / plain_s
                if found is not None and seconds >= enough_s:
                    found = self._without_what_is_not_needed(found, lead)
                if found is not None and self._seconds(found) < enough_s:
                    best, best_s = found, self._seconds(found)
        return None if best is None else self._without_what_is_not_needed(best, lead)

    def _levels(self, lead: _Names, more: Iterable[str]) -> Iterator[tuple[_Names, float]]:
        """``lead`` with more and more techniques that change no blocks, the cheapest first.

        Each level takes noticeably longer than the one before. With it come the seconds that all
        its techniques but the dearest may add to an iteration.
        """
        few = self._trials.few
        others = self._trials.usable(n for n in more if n not in BLOCKWISE)
        step_s = (1 - _WORTH_IT) * self._few().seconds()
        every = choice_of((*lead, *others), few)
        if self._trials.runs(every):  # most often all of them together take little
            added_s = self._seconds(every) - self._seconds(choice_of(lead, few))
            if added_s <= step_s:
                yield every.names, max(added_s, 0)
                return
        level, names, since_level_s, before_s = lead, lead, 0.0, 0.0
        for name in sorted(self._that_save(lead, others), key=self._added_seconds):
            since_level_s += self._added_seconds(name)
            if since_level_s > step_s:
                if names == lead or self._saves(names, level):
                    yield names, before_s
                    level = names
                elif level == lead:
                    yield lead, 0.0
                since_level_s = self._added_seconds(name)
            before_s = sum(self._added_seconds(n) for n in names if n not in lead)
            names = (*names, name)
        if names == lead or self._saves(names, level):
            yield names, before_s

    def _saves(self, names: _Names, others: _Names) -> bool:
        """Whether the job runs with some techniques, and needs less memory than with others."""
        one, other = (choice_of(n, self._trials.few) for n in (names, others))
        if not self._trials.runs(one):
            return False
        return self._trials.dry_job(one).total_bytes() < self._trials.dry_job(other).total_bytes()

    def _that_save(self, lead: _Names, names: Iterable[str]) -> list[str]:
        """The techniques that save memory alone; all that help, if together they save more."""
        helpful = self._helpful(names)
        saving = [name for name in helpful if self._saves((name,), ())]
        return helpful if self._saves((*lead, *helpful), (*lead, *saving)) else saving

    def _with_least_harm(
        self, harmful: Sequence[str], more: Sequence[str], least: int
    ) -> Optional[Choice]:
        """The fastest choice with the least harmful techniques that are needed besides ``more``."""
        if not harmful or not self._may_fit_with((), (*harmful, *more), least):
            return None
        harmful, more = self._helpful(harmful), self._helpful(more)
        for i in range(1, len(harmful) + 1):
            lead = tuple(harmful[:i])
            names = self._that_run(lead, more, least)
            if self._trials.fits(choice_of(names, least)):
                needed = self._without_what_is_not_needed(choice_of(names, least), more)
                return self._fastest(tuple(n for n in needed.names if n in lead), more, least)
        return None

    def _without_what_is_not_needed(self, choice: Choice, kept: Sequence[str]) -> Choice:
        """Drop techniques outside ``kept`` that are not needed, most harmful first.

        The modules of a technique that has some are needed.
        """
        kept = (*kept, *dict(choice.modules))
        for name in [n for n in reversed(choice.names) if n not in kept]:
            others = (n for n in choice.names if n != name)
            without = choice_of(others, choice.num_images, choice.modules)
            if self._trials.fits(without):
                choice = without
        return choice

    def _that_run(self, lead: _Names, more: Sequence[str], num_images: int) -> _Names:
        """All of ``lead``, and the techniques of ``more`` with which the job runs together."""
        names = lead
        if self._trials.runs(choice_of((*lead, *more), num_images)):
            return (*lead, *more)
        for name in more:
            if self._trials.runs(choice_of((*names, name), num_images)):
                names = (*names, name)
        return names

    def _most_images(self, names: _Names, least: int) -> int:
        """The largest micro-batch that fits, given that ``least`` fits."""
        sizes = self._sizes(least)
        most, too_many = least, self._images + 1
        while True:
            between = [n for n in sizes if most < n < too_many]
            likely = [n for n in between if self._bytes_with(names, n) <= self._trials.limit_bytes]
            if not likely:
                return most
            if self._trials.fits(choice_of(names, likely[-1])):
                most = likely[-1]
            else:
                too_many = likely[-1]

    def _sizes(self, least: int) -> list[int]:
        """The smallest micro-batch for each number of micro-batches in an iteration, sorted."""
        sizes = {-(-self._window // number) for number in range(1, self._window + 1)}
        return sorted({min(max(size, least), self._images) for size in sizes})

    def _bytes_with(self, names: _Names, num_images: int) -> float:
        """Predicted bytes, on a line through the two largest micro-batches that were tried."""
        tried = {self._trials.few, *self._trials.tried(names)}
        if num_images in tried:
            return self._dry_job(names, num_images).training_bytes()
        two = sorted({1, 2, *tried})[-2:]
        (x1, y1), (x2, y2) = ((n, self._dry_job(names, n).training_bytes()) for n in two)
        return y2 + (y1 - y2) / (x1 - x2) * (num_images - x2)

    def _seconds_with(self, names: _Names, num_images: int) -> float:
        if num_images in (self._trials.few, *self._trials.tried(names)):
            return self._dry_job(names, num_images).seconds()
        for size in (1, 2):
            self._dry_job(names, size)
        seconds = self._trials.interpolated_seconds(names, num_images)
        assert seconds is not None
        return seconds

    def _added_seconds(self, name: str) -> float:
        """Seconds that a technique alone adds to an iteration."""
        return self._few(name).seconds() - self._few().seconds()

    def _few(self, *names: str) -> DryJob:
        """The dry run with which techniques are compared, or the one with some techniques."""
        return self._dry_job(names, self._trials.few)

    def _seconds(self, choice: Choice) -> float:
        return self._trials.dry_job(choice).seconds()

    def _dry_job(self, names: _Names, num_images: int) -> DryJob:
        return self._trials.dry_job(choice_of(names, num_images))
