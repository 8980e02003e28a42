# Copyright (c) the d2_memfit developers.
"""The search for the fastest choice that fits, with few dry runs."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Optional

from ...techniques import TIERS, get_technique
from ..estimates import DryJob
from .selective import BLOCKWISE, with_best_blocks
from .trials import Choice, Trials, choice_of

__all__ = ["Fastest"]

_WORTH_IT = 0.98  # a larger change must take less than this share of the time
_DEAR = 0.9  # share of the time; with a smaller gain, a job without techniques gets none for speed
_FAR = 1.3  # times the limit; a job that needs more may not fit with all techniques together
_LITTLE = 0.1  # share of an image's memory; smaller savings do not allow a larger micro-batch

_Names = tuple[str, ...]


class Fastest:
    """Finds the fastest choice within a limit of memory that does the least harm.

    A rival is tried only if it can win. Times are interpolated between micro-batch sizes, exact to
    0.3%. Memory always comes from a dry run.

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
        start = choice_of((), self._images)
        found = start if self._trials.fits(start) else self._with_some((), exact, least)
        if found == start and prefer != "speed":
            return start
        if found is not None and prefer == "speed":
            faster = tuple(name for name in precision if self._is_faster(name))
            rival = self._with_some(faster, exact, least) if faster else None
            if rival is not None and self._is_worth_it(rival, found):
                found = rival
        if found is None:
            found = self._with_least_harm(precision, exact, least)
        if found is None and recipes:
            least = self._least_images(tiers)
            found = self._with_least_harm((*precision, *recipes), exact, least)
        if found is None:
            return None
        blockwise = [name for name in BLOCKWISE if name in exact]
        sizes = [n for n in self._sizes() if n >= least]
        return with_best_blocks(self._trials, found, sizes, blockwise)

    def smallest(self, tiers: Sequence[str]) -> Choice:
        """The choice with all techniques of these tiers."""
        names = [name for tier in tiers for name in self._trials.names(tier)]
        least = self._least_images(tiers)
        return choice_of(self._that_run((), self._trials.usable(names), least), least)

    def _helpful(self, names: Iterable[str]) -> list[str]:
        """The techniques that change the job."""
        return [name for name in names if self._trials.helps(name)]

    def _is_worth_it(self, rival: Choice, found: Choice) -> bool:
        return self._seconds(rival) < _WORTH_IT * self._seconds(found)

    def _least_images(self, tiers: Sequence[str]) -> int:
        return 1 if self._trials.micro_batch_tier in tiers else self._images

    def _is_faster(self, name: str) -> bool:
        """Whether a technique makes an iteration faster.

        On a CPU this depends on its instructions, which the device model does not know.
        """
        can_be = self._trials.device.is_gpu and not get_technique(name).never_faster
        if not can_be or not self._trials.helps(name):
            return False
        return self._added_seconds(name) < (_WORTH_IT - 1) * self._few().seconds()

    def _with_some(self, lead: _Names, more: Sequence[str], least: int) -> Optional[Choice]:
        """The fastest choice with all of ``lead``, and with some of ``more`` if these help."""
        if not self._trials.runs(choice_of(lead, least)):
            return None
        fits = self._trials.fits(choice_of(lead, least))
        names = lead if fits else self._cheapest(lead, more, least)
        if names is None:
            return None
        best = choice_of(names, self._most_images(names, least))
        if best.num_images == self._images:
            return best
        for rival in self._rivals(best, more):
            num_images = self._most_images(rival, best.num_images)
            with_more = choice_of(rival, num_images)
            if num_images > best.num_images and self._is_worth_it(with_more, best):
                best = self._without_what_is_not_needed(with_more, names)
        return best

    def _rivals(self, best: Choice, more: Iterable[str]) -> Iterator[_Names]:
        """Techniques that may allow larger, and so faster, micro-batches."""
        at_once_s = self._seconds_with(best.names, self._images)
        enough_s = self._seconds(best) * (_WORTH_IT if best.names else _DEAR)
        if at_once_s > enough_s:
            return
        one, two = (self._dry_job((), n).training_bytes() for n in (1, 2))
        others = (n for n in more if n not in best.names and not get_technique(n).never_faster)
        for name in self._helpful(others):
            saved = one - self._dry_job((name,), 1).training_bytes()
            may_win = at_once_s + self._added_seconds(name) < enough_s
            if may_win and saved > _LITTLE * (two - one):
                yield (*best.names, name)

    def _cheapest(self, lead: _Names, more: Sequence[str], num_images: int) -> Optional[_Names]:
        """``lead`` plus the techniques of ``more`` that make it fit in the least time."""
        if not self._may_fit_with(lead, more, num_images):
            return None
        helpful = sorted(self._helpful(more), key=self._added_seconds)
        alone = self._first_that_fits_alone(lead, helpful, num_images)
        if alone is not None:  # only several that cost less together can be better than one
            helpful = helpful[: helpful.index(alone)]
        with_one = None if alone is None else (*lead, alone)
        names = self._that_run(lead, helpful, num_images)
        if names == lead or not self._trials.fits(choice_of(names, num_images)):
            return with_one
        for name in reversed(helpful):
            without = tuple(n for n in names if n != name)
            if name in names and self._trials.fits(choice_of(without, num_images)):
                names = without
        added = sum(self._added_seconds(name) for name in names if name not in lead)
        return with_one if alone is not None and self._added_seconds(alone) < added else names

    def _may_fit_with(self, lead: _Names, more: Sequence[str], num_images: int) -> bool:
        """Whether some of ``more`` may be enough. If ``lead`` is far too large, all are tried."""
        if self._dry_job(lead, num_images).training_bytes() <= _FAR * self._trials.limit_bytes:
            return True
        with_all = self._that_run(lead, self._trials.usable(more), num_images)
        return self._trials.fits(choice_of(with_all, num_images))

    def _first_that_fits_alone(
        self, lead: _Names, names: Iterable[str], num_images: int
    ) -> Optional[str]:
        """The first technique that makes ``lead`` fit without others; None if none does.

        A technique is tried only if the memory that it saves without ``lead`` would be enough.
        """
        needs = self._dry_job(lead, num_images).training_bytes()
        without = self._few().training_bytes()
        for name in names:
            saved = (without - self._few(name).training_bytes()) * num_images / self._trials.few
            is_enough = needs - saved <= self._trials.limit_bytes
            if is_enough and self._trials.fits(choice_of((*lead, name), num_images)):
                return name
        return None

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
                return self._with_some(tuple(n for n in needed.names if n in lead), more, least)
        return None

    def _without_what_is_not_needed(self, choice: Choice, kept: Sequence[str]) -> Choice:
        """Drop techniques outside ``kept`` that are not needed, most harmful first."""
        for name in [n for n in reversed(choice.names) if n not in kept]:
            without = choice_of((n for n in choice.names if n != name), choice.num_images)
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
        sizes = [n for n in self._sizes() if n >= least]
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

    def _sizes(self) -> list[int]:
        """The smallest micro-batch for each number of micro-batches in an iteration, sorted."""
        sizes = {-(-self._window // number) for number in range(1, self._window + 1)}
        return sorted({min(size, self._images) for size in sizes})

    def _bytes_with(self, names: _Names, num_images: int) -> float:
        """Predicted bytes, on a line through the two largest micro-batches that were tried."""
        tried = self._trials.tried(names)
        two = sorted({1, 2, *tried})[-2:]
        (x1, y1), (x2, y2) = ((n, self._dry_job(names, n).training_bytes()) for n in two)
        return y2 + (y1 - y2) / (x1 - x2) * (num_images - x2)

    def _seconds_with(self, names: _Names, num_images: int) -> float:
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
