# Copyright (c) the d2_memfit developers.
"""A test of what losses are divided by: it compares gradients of images together and in parts.

A window must have the gradient of one forward over all its images. The test runs images of the job
(:mod:`.variants`) together and in parts. It compares the gradient of all losses, and then that of
each loss that may differ, for each way of weighting: by images, and with the counts that are
declared. A count must add up: the count of the images together is the sum of the counts of the
parts. What a forward changes in the model stays for the next part, as in training.

After the test, the model is as before. During the test, random numbers do not depend on the batch,
and there is no dropout (:class:`SameDraws`).
"""

import math
import re
import traceback
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Optional

import torch
from torch import nn

from ...compat.pytorch import BatchNorm
from ...errors import ConfigError, MemfitError, one_line
from ...job import size_of
from ...memory import is_out_of_memory, release_memory, with_room
from . import sites
from .answers import Totals
from .causes import Evidence, cause_of, weights_of_parts
from .pairs import LIMIT, MOST_PAIRS, Pair, Pairs
from .published import Published, published
from .rules import CLOSE, EXACT, NOT_KNOWN, OTHER, Rules, Term, formula_of
from .runs import Forwards, Subject
from .sites import Counts, Site
from .variants import images_of_one_size, images_of_two_sizes, shrunk

__all__ = ["GradientTest", "UntestableError", "Way", "gradient_test", "text_of"]

_ROUNDING = 2e-5  # of float32
_OF_FLOAT64 = 1e-9
_SMALL = 1e-5  # of the gradient of all losses; smaller gradients are compared with this
_DIVIDED = 0.75  # a loss that is divided by a count is about halved if the count is doubled
_MOST_FORWARDS = 60  # images through the model
_MUCH = 1.05  # a larger gain or loss in the distance of all losses counts
# Images that go through the model together, and the number by which their pixels are divided. After
# an out-of-memory error, the next entry is tried; the last one runs without gradients.
_SMALLER = ((3, 1), (3, 4), (2, 4), (2, 16), (3, 16))
# Images of a part, whether one has no labels, and whether batch normalisation uses its running
# statistics. After an error of the model's code, the next entry is tried.
_SAMPLES = ((1, True, False), (1, False, False), (2, False, False))
_FROZEN = ((1, True, True), (1, False, True), (2, False, True))
_OWN_IMAGES = 4
_MOST_PIXELS = 2**17  # of the images together
_BORDERS = 10  # a distance up to so many times what weights leave unexplained is due to borders
_PADDING = 0.05  # the largest such distance that is not named
_PADDED = (
    "in images of different sizes, it is a mean over padded images. Take the mean of each image"
)
_PADDED_OR_BORDERS = (
    "in images of different sizes, padding changes it. Features near borders do that, which is of "
    "the data, and so does a mean over padded images: take the mean of each image"
)
_FROZE = (
    "it could only be tested with the running statistics of batch normalisation, and training uses "
    "those of a micro-batch. Use MODEL.*.NORM FrozenBN or GN, or larger micro-batches"
)
_KINDS = (sites.SUM, sites.COUNT, sites.MEAN)
_NO_MEMORY = "memory ran out"


class UntestableError(MemfitError):
    """The losses of a model cannot be tested. The message is the model's error, in one line."""


@dataclass(frozen=True)
class Way:
    """A way of weighting losses.

    Attributes:
        pair: the images of the test, weighted in this way, with all losses. Batch normalisation
            uses its running statistics: those of a micro-batch would hide what losses are divided
            by.
        unused: places of ``window_count`` on which no loss depends.
        broken: for each count that does not add up, the losses that depend on it, and a text.
        counted: names of losses that depend on a declared count.
    """

    rules: Rules
    pair: Pair
    unused: Sequence[str] = ()
    broken: Sequence[tuple[Sequence[str], str]] = ()
    counted: frozenset[str] = frozenset()


def gradient_test(
    subject: Subject,
    images: Sequence[Any],
    patterns: Sequence[Sequence[str]] = (),
    of_micro_batch: Optional[int] = None,
) -> "GradientTest":
    """Test the losses with the first kinds of images with which the model runs.

    Args:
        patterns: of MEMFIT.NORMALIZERS.LOSSES: names of losses, and what they are weighted by.
        of_micro_batch: images that a micro-batch may have. The images of the test together have at
            most as many pixels as these; None: at most :data:`_MOST_PIXELS`.

    Raises:
        UntestableError: the model runs with none of them.
        ConfigError: the losses cannot be trained on, or are declared twice.
    """
    error = ""
    norms = _trained_norms(subject.model)
    for number, share in _SMALLER:
        if (number, share) == _SMALLER[-1]:
            subject = replace(subject, has_gradients=False)
        kind = ""  # of the error of a sample with all kinds of images
        for of_part, with_empty, freezes in (*_SAMPLES, *(_FROZEN if norms else ())):
            try:
                height, width = size_of(list(images))
                fits = height * width * of_micro_batch if of_micro_batch else _MOST_PIXELS
                of_size = shrunk(images, min(fits, _MOST_PIXELS) / share / number)
                left_out = f"no image without labels ({kind})" if kind and not with_empty else ""
                options = of_part, with_empty, freezes, left_out
                return GradientTest(subject, of_size, patterns, number, *options)
            except ConfigError:
                raise
            except Exception as e:  # of the model's code. Its traceback would keep its tensors
                error = text_of(e)
                kind = type(e).__name__ if with_empty else kind
            release_memory(subject.device)
            if error == _NO_MEMORY:
                break
        else:
            break
    raise UntestableError(error)


def text_of(error: Exception) -> str:
    """An error of the model's code in one line."""
    if is_out_of_memory(error):
        return _NO_MEMORY
    place = traceback.extract_tb(error.__traceback__)[-1]
    file = "/".join(Path(place.filename).parts[-2:])
    return f"{type(error).__name__}: {one_line(error)[:200]} in {file}:{place.lineno}"


class GradientTest:
    """A test of a model's losses, which finds the ways of weighting that there are.

    Args:
        subject: the model and its losses.
        images: the images of the window.
        patterns: as for :func:`gradient_test`.
        number: images that go through the model together; at least those of two parts.
        of_part: images of a part.
        with_empty: whether the third image has no labels.
        freezes: whether batch normalisation uses its running statistics. Some models can only be
            tested so.
        left_out: kinds of images that the test had to leave out; "" if there are none.

    Attributes:
        ways: the ways of weighting; the first one is by images.
        nearest: the way to take.
        changed: names of what forwards change in the model.
        counters: those of numbers that count forwards.
        names: names of the losses.
        statistics: sums over ranks of many numbers that do not add up, as text.
        not_finite: names of losses that only an image without labels makes infinite or NaN.

    Raises:
        Exception: whatever the model's code raises.
        ConfigError: as for :func:`gradient_test`.
    """

    def __init__(
        self,
        subject: Subject,
        images: Sequence[Any],
        patterns: Sequence[Sequence[str]],
        number: int,
        of_part: int,
        with_empty: bool,
        freezes: bool,
        left_out: str,
    ) -> None:
        self._subject = subject
        self._images = images
        self._patterns = patterns
        self._freezes = freezes
        self._left_out = left_out
        # The statistics of a micro-batch change what a model finds, and so what its losses count.
        has_norms = not freezes and bool(_trained_norms(subject.model))
        self._when_choosing = {"freezes": True} if has_norms else {}
        self._repeats_backward = True
        number = max(number, 2 * of_part)
        with_empty &= number > 2 * of_part
        self.not_finite: list[str] = []
        while True:
            chosen = images_of_one_size(images, subject.model, number, with_empty)
            self._together = [chosen]
            self._apart = [chosen[i : i + of_part] for i in range(0, number, of_part)]
            self._whole = self._run(self._together)
            self._by_images = self._run(self._apart, looks=True)
            last = self._by_images.each[-1].losses
            bad = [name for name, loss in last.items() if not math.isfinite(loss)]
            if not (bad and with_empty and self._whole.is_finite):
                break
            self.not_finite = bad
            with_empty = False
        self._counts = self._whole.each[0].counts
        self.changed = self._by_images.changed
        self.counters = self._by_images.counters
        self.names = list(self._whole.each[0].losses)
        parts = sites.added_up(part.counts for part in self._by_images.each)
        self.statistics = [
            text
            for site, text in self._whole.large.items()
            if site not in parts or not _is_same(self._counts[site], parts[site])
        ]
        self.ways = self._find_ways()
        self.nearest = self._nearest()

    @property
    def forwards(self) -> int:
        """Images that went through the model."""
        return self._subject.forwards

    @property
    def unused(self) -> list[str]:
        """Calls of ``window_count`` on which no loss depends, in any way of weighting."""
        of_ways = [set(way.unused) for way in self.ways[1:]]
        return sorted(set.intersection(*of_ways)) if of_ways else []

    def rules(self, way: Way) -> Rules:
        """The rules of a way, with the word, distance and cause for each loss."""
        broken: set[Site] = set()
        try:
            terms, broken = with_room(lambda: self._judged(way), self._subject.device)
        except Exception as e:  # of the model's code
            terms = dict.fromkeys(self.names, Term(NOT_KNOWN, 0.0, text_of(e)))
        return replace(
            way.rules.without(broken),
            terms=terms,
            zero=frozenset(name for name in self.names if self._whole.loss(name) == 0),
            not_finite=frozenset(self.not_finite),
            left_out=self._left_out,
        )

    def _run(self, groups: Sequence[Sequence[Any]], **options: Any) -> Forwards:
        freezes = options.pop("freezes", False) or self._freezes
        return self._subject.run(groups, freezes=freezes, **options)

    # The ways of weighting.

    def _find_ways(self) -> list[Way]:
        whole, by_images = self._whole, self._by_images
        if self._when_choosing:
            whole, by_images = map(self._choosing, (self._together, self._apart))
        places = frozenset().union(*(part.counts for part in by_images.each))
        by_image = Way(Rules(places=places), Pair(whole, by_images))
        ways = [by_image]
        if self._subject.pretended is not None:
            told = self._choosing(self._together, pretends=True, with_gradient=False).each[0].counts
            if any(site[0] == sites.SUM for site in told):
                ways.append(self._way(by_image, told, pretends=True))
        nearest = min(way.pair.distance for way in ways)
        is_declared = self._whole.is_asked or self._patterns
        if is_declared and (len(ways) == 1 or nearest > self._rounding):
            ways.append(self._way(by_image, whole.each[0].counts, pretends=False))
        return ways

    def _choosing(self, groups: Sequence[Sequence[Any]], **options: Any) -> Forwards:
        return self._run(groups, **self._when_choosing, **options)

    def _way(self, by_image: Way, told: Counts, pretends: bool) -> Way:
        """Test the parts with answers: the counts of the images together."""
        of_parts = set(by_image.rules.places)
        if pretends:
            first = self._choosing(self._apart[:1], pretends=True, with_gradient=False)
            of_parts.update(first.each[0].counts)
        # If images together have more counts than a single one, the model counts each image.
        for_itself = {site[:2] for site in told.keys() - of_parts}
        counts = {s: n for s, n in told.items() if s[0] in _KINDS and s[:2] not in for_itself}
        depends, divided = self._effects(counts, pretends)
        unused = [s for s in counts if s[0] == sites.COUNT and not depends[s]]
        counts = {s: n for s, n in counts.items() if depends[s] or s[0] == sites.MEAN}
        parts = self._answered(counts, depends, divided, pretends)
        sums = sites.added_up(part.counts for part in parts.each)
        broken = {s: n for s, n in counts.items() if s not in sums or not _is_same(n, sums[s])}
        texts = [(tuple(depends[s]), _sums(s, n, sums.get(s))) for s, n in broken.items()]
        if broken:
            counts = {site: n for site, n in counts.items() if site not in broken}
            parts = self._answered(counts, depends, divided, pretends)
        of_each = [part.counts for part in parts.each]
        rules = Rules(
            True,
            {site: formula_of(site, of_each) for site in counts},
            self._weights(counts, depends, divided),
            frozenset().union(*of_each),
            pretends=(pretends or self._subject.pretended is None)
            and any(site[0] == sites.SUM for site in counts),
        )
        if any(rules.counts.values()):
            own = self._counts_of_own_images(counts, pretends)
            rules = rules.without(set().union(*map(rules.broken, own)))
        counted = frozenset().union(*(depends[site] for site in counts))
        pair = Pair(by_image.pair.whole, parts)
        return Way(rules, pair, [*map(sites.place_of, unused)], texts, counted)

    def _counts_of_own_images(self, counts: Counts, pretends: bool) -> list[Counts]:
        """Counts of the job's unchanged images, one by one.

        The images of the test are so similar that counts of other things, such as labelled pixels,
        may seem to follow from the number of objects.
        """
        groups = [[image] for image in self._images[:_OWN_IMAGES]]
        totals = self._totals(counts)
        try:
            run = self._choosing(groups, totals=totals, pretends=pretends, with_gradient=False)
        except Exception:  # of the model's code, such as for an image without labels
            return []
        return [part.counts for part in run.each]

    def _answered(
        self,
        counts: Counts,
        depends: Mapping[Site, frozenset[str]],
        divided: Sequence[str],
        pretends: bool,
    ) -> Forwards:
        totals, weights = self._totals(counts), self._weights(counts, depends, divided)
        return self._choosing(self._apart, totals=totals, weights=weights, pretends=pretends)

    def _totals(self, counts: Counts) -> Totals:
        images = len(self._together[0])
        known = {site: self._counts[site] for site in (sites.IMAGES, sites.OBJECTS)}
        return Totals({**known, **counts}, images, images)

    def _effects(
        self, counts: Counts, pretends: bool
    ) -> tuple[dict[Site, frozenset[str]], list[str]]:
        """Losses that depend on each count, and those that are divided by a sum over ranks.

        A mean stands in its loss itself.
        """

        def losses_with(changed: Counts) -> Mapping[str, float]:
            totals = self._totals({**counts, **changed})
            options = {"totals": totals, "pretends": pretends, "with_gradient": False}
            return self._choosing(self._apart[:1], **options).each[0].losses

        asked = {site: n for site, n in counts.items() if site[0] != sites.MEAN}
        depends: dict[Site, frozenset[str]] = dict.fromkeys(counts, frozenset())
        if not asked:
            return depends, []
        given = losses_with({})
        for site, n in asked.items():
            more = n * torch.linspace(2, 3, len(n)) + 2  # in another ratio, if there are several
            changed = losses_with({site: more})
            depends[site] = frozenset(k for k in self.names if given.get(k) != changed.get(k))
        sums = {site: 2 * n for site, n in asked.items() if site[0] == sites.SUM}
        doubled = losses_with(sums) if sums else given
        divided = [k for k, n in given.items() if n and doubled.get(k, n) / n < _DIVIDED]
        return depends, divided

    def _weights(
        self, counts: Counts, depends: Mapping[Site, frozenset[str]], divided: Sequence[str]
    ) -> dict[str, Site]:
        """For some losses, what they are weighted by, if not by images.

        Raises:
            ConfigError: what a loss is divided by is declared twice.
        """
        kinds = {s[0]: s for s in (sites.OBJECTS, sites.IN_FULL)}
        summed = {k for s in counts if s[0] == sites.SUM for k in depends[s]}
        weights = {name: sites.IN_FULL for name in divided if name in summed}
        for name in self.names:
            told = {kind for pattern, kind in self._patterns if fnmatchcase(name, pattern)}
            if not told:
                continue
            asked = [sites.place_of(site) for site in counts if name in depends[site]]
            if asked or len(told) > 1:
                ways = ", ".join([*sorted(told), *(f"the count in {place}" for place in asked)])
                raise ConfigError(
                    f"MEMFIT.NORMALIZERS.LOSSES: what {name} is divided by is declared twice, by "
                    f"{ways}. Leave one of them"
                )
            weights[name] = kinds[told.pop()]
        return weights

    def _nearest(self) -> Way:
        """The way with the nearest gradient. Losses that are right by images must stay right.

        In the gradient of all losses, one loss may hide that others are nearer. So losses that are
        off are counted first. If two ways are right, counts are taken: they are also right for
        images that differ more than those of the test.
        """
        best = self.ways[0]
        right = [name for name in self.names if not best.pair.is_off(name)]
        for way in self.ways:
            pair, nearest = way.pair, best.pair
            spoils = any(map(pair.is_off, right))
            wrong = [sum(map(p.is_off, self.names)) for p in (pair, nearest)]
            is_no_worse = pair.distance <= _MUCH * nearest.distance
            is_nearer = (wrong[0], pair.distance) < (wrong[1], nearest.distance)
            if not spoils and ((is_no_worse and is_nearer) or pair.distance <= _ROUNDING):
                best = way
        return best

    # The words for losses.

    @property
    def _rounding(self) -> float:
        """If the distance of all losses together is smaller than this, each loss is right."""
        is_double = next(self._subject.model.parameters()).dtype == torch.float64
        return _OF_FLOAT64 if is_double else _ROUNDING

    def _judged(self, way: Way) -> tuple[dict[str, Term], set[Site]]:
        """The terms, and sites whose formula does not hold for images of another size."""
        if not self._subject.has_gradients:
            why = "there was no memory for the gradient of two images"
            return dict.fromkeys(self.names, Term(NOT_KNOWN, 0.0, why)), set()
        terms = self._terms(way)
        if self._freezes:
            terms = {
                name: Term(NOT_KNOWN, term.distance, _FROZE) if term.word != OTHER else term
                for name, term in terms.items()
            }
        exact = [name for name, term in terms.items() if term.word == EXACT]
        wrong, broken = self._in_two_sizes(way, exact)
        return {**terms, **wrong}, broken

    def _terms(self, way: Way) -> dict[str, Term]:
        """The terms for images of one size."""
        terms = {
            name: Term(NOT_KNOWN, math.inf, "it is not finite")
            for name, loss in self._whole.each[0].losses.items()
            if not math.isfinite(loss)
        }
        names = [name for name in self.names if name not in terms]
        [found] = self._pairs(way, [names], 2)
        if found.word == EXACT and found.distance <= self._rounding:
            terms.update(dict.fromkeys(names, Term(EXACT, found.distance)))
            # The gradient of one loss may be too small to be seen in that of all losses.
            names = [name for name in names if found.pairs[0].is_off(name)]
        off = {name: found.offset_and_noise(name) for name in names}
        noisy = [name for name, (_, noise) in off.items() if noise > LIMIT]
        fixed = [name for name in names if name not in noisy]
        groups = self._pairs(way, _criteria(fixed, found.pairs[0]), 1)
        # If all differences are far within the noise, more pairs cannot decide.
        may_settle = any(off[name][0] > 2 * off[name][1] for name in noisy)
        for group in self._pairs(
            way, _criteria(noisy, found.pairs[0]), MOST_PAIRS if may_settle else 1
        ):
            group.is_noisy = True
            groups.append(group)
        is_exact = all(group.word == EXACT for group in groups)
        stated = {} if is_exact else self._published()
        wrong = [group for group in groups if group.word == OTHER]
        causes = dict(zip(map(id, wrong), self._causes(way, wrong)))
        for group in groups:
            for name in group.names:
                noise = max(group.noise, off[name][1]) if group.is_noisy else 0.0
                why = causes.get(id(group), f"noise {noise:.1g}")
                terms[name] = _term(group, noise, stated.get(name, Published()), why)
        return terms

    def _run_pairs(
        self,
        way: Way,
        groups: Sequence[Sequence[str]],
        images: Sequence[Any] = (),
        **options: Any,
    ) -> list[Pair]:
        """The gradient of each group of losses for images together, and in parts.

        If a model's backward cannot run twice, such as that of a compiled model, each group has its
        own forward. If these are too many, all groups get the result of all their losses together.

        Args:
            images: used in place of the test's images, one per part.
            options: of :meth:`Subject.run`; ``carries`` applies to the parts only.
        """
        if not groups:
            return []
        if len(groups[0]) == len(self.names) and not images:
            if options == self._when_choosing:
                return [way.pair]
            if not options and way is self.ways[0]:
                return [Pair(self._whole, self._by_images)]
        if len(groups) == 1 or self._repeats_backward:
            try:
                return self._run_at_once(way, groups, images, **options)
            except Exception as e:
                if len(groups) == 1 or isinstance(e, ConfigError) or is_out_of_memory(e):
                    raise
                self._repeats_backward = False
        number = len(images) or len(self._together[0])
        if self.forwards + 2 * number * len(groups) > _MOST_FORWARDS:
            names = [name for group in groups for name in group]
            return self._run_at_once(way, [names], images, **options) * len(groups)
        return [self._run_at_once(way, [group], images, **options)[0] for group in groups]

    def _run_at_once(
        self, way: Way, groups: Sequence[Sequence[str]], images: Sequence[Any], **options: Any
    ) -> list[Pair]:
        together = [images] if images else self._together
        apart = [[image] for image in images] if images else self._apart
        pretends = way.rules.pretends and self._subject.pretended is not None
        shared = {**options, "losses": groups}
        whole = told = self._run(together, **{**shared, "carries": True})
        if pretends:  # sums over ranks are seen only with a pretended rank
            told = self._run(together, pretends=True, with_gradient=False, **shared)
        known = {*way.rules.counts, sites.IMAGES, sites.OBJECTS}
        counts = {site: n for site, n in told.each[0].counts.items() if site in known}
        number = len(together[0])
        totals = Totals(counts, number, number) if way.rules.is_answered else None
        weights = way.rules.weights
        parts = self._run(apart, totals=totals, weights=weights, pretends=pretends, **shared)
        return [Pair(whole.of_group(i), parts.of_group(i)) for i in range(len(groups))]

    def _pairs(self, way: Way, groups: Sequence[Sequence[str]], most: int) -> list[Pairs]:
        """Pairs with different random numbers, until the mean of their differences is known."""
        least = _SMALL * float(self._whole.gradient.norm())
        first = self._run_pairs(way, groups)
        of_groups = [Pairs(group, [pair], least) for group, pair in zip(groups, first)]
        for seed in range(1, most):
            if all(pairs.is_settled for pairs in of_groups) or not self._has_time:
                break
            for pairs, pair in zip(of_groups, self._run_pairs(way, groups, seed=seed)):
                pairs.pairs.append(pair)
        return of_groups

    @property
    def _has_time(self) -> bool:
        return self._subject.forwards + 2 * len(self._together[0]) <= _MOST_FORWARDS

    def _causes(self, way: Way, wrong: Sequence[Pairs]) -> list[str]:
        """Why groups of losses are wrong, and what helps."""
        names = [group.names for group in wrong]
        norms = _trained_norms(self._subject.model)
        looks = bool(self._when_choosing)
        frozen = self._run_pairs(way, names, freezes=True) if looks else []
        restored = self._run_pairs(way, names, carries=False) if self.changed else []
        return [
            cause_of(
                Evidence(
                    group.names,
                    group.pairs[0],
                    [text for losses, text in way.broken if {*losses} & {*group.names}],
                    looks and frozen[i].is_right(group.names),
                    bool(restored) and restored[i].is_right(group.names),
                    self.changed,
                    norms,
                )
            )
            for i, group in enumerate(wrong)
        ]

    def _published(self) -> dict[str, Published]:
        """The distances that the documentation states for losses of well-known code."""
        found: dict[str, Published] = {}

        def losses(model: Any, batch: Any) -> Any:
            computed = self._subject.losses(model, batch)
            found.update({name: published(name, loss) for name, loss in computed.items()})
            return computed

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it is slow
            with torch.autograd.detect_anomaly(check_nan=False):
                replace(self._subject, losses=losses).run(self._apart[:1])
        return found

    def _in_two_sizes(self, way: Way, names: Sequence[str]) -> tuple[dict[str, Term], set[Site]]:
        """Test losses that are exact so far with images of two sizes, which are padded.

        A small image has less padding alone than in a batch with a larger one. This changes
        features near borders. That is an effect of the data, so a small distance is not named. A
        larger one is named as a mean over padded images if weights of the images explain the
        distance, or if values differ as much. Otherwise the result is "not known", because in a
        deep model, borders can change a fifth of a gradient. A loss that depends on a count, or
        that is wrong by images, is not a mean over padded images. If random numbers are drawn, such
        as by a sampler, they differ with the padding: then there is no result.
        """
        found: dict[str, Term] = {}
        means = [name for name in names if not self.ways[0].pair.is_off(name)]
        names = [name for name in means if name not in way.counted]
        images = images_of_two_sizes(self._images)
        if not images or not (names or way.rules.counts) or not self._has_time:
            return found, set()
        try:  # without a pretended rank, which would be taken for the cause of an error
            self._run([images, *([image] for image in images)], with_gradient=False)
        except Exception:  # such as torch.stack: all images must have one size
            return found, set()
        [everything] = self._run_pairs(way, [names], images)
        broken = set().union(*(way.rules.broken(part.counts) for part in everything.parts.each))
        if everything.distance <= self._rounding or everything.has_drawn:
            return found, broken
        groups = _criteria(names, everything)
        least = _SMALL * float(everything.whole.gradient.norm())
        for group, pair in zip(groups, self._run_pairs(way, groups, images)):
            _, rest = weights_of_parts(pair.whole.gradient, pair.parts.gradients)
            distance = Pairs(group, [pair], least).distance
            most = _BORDERS * rest
            if distance <= max(LIMIT, min(most, _PADDING)):
                continue
            is_mean = distance > most or pair.values_off(group) > _PADDING
            word, why = (OTHER, _PADDED) if is_mean else (NOT_KNOWN, _PADDED_OR_BORDERS)
            found.update(dict.fromkeys(group, Term(word, distance, why)))
        return found, broken


def _criteria(names: Sequence[str], pair: Pair) -> list[list[str]]:
    """Groups of losses of one criterion, such as of all layers; right and wrong ones apart."""
    groups: dict[Any, list[str]] = {}
    for name in names:
        groups.setdefault((re.sub(r"\d+", "", name), pair.is_off(name)), []).append(name)
    return list(groups.values())


def _trained_norms(model: nn.Module) -> list[str]:
    """Names of the model's batch normalisation that takes the statistics of a forward."""
    parts = model.named_modules()
    return [name for name, part in parts if isinstance(part, BatchNorm) and part.training]


def _term(group: Pairs, noise: float, known: Published, why: str) -> Term:
    """The result for a loss of a group. ``known``: the stated distance of its code."""
    if group.word == EXACT:
        return Term(EXACT, group.distance)
    if group.distance + noise <= known.distance:
        return Term(CLOSE, group.distance, f"{known.code}, up to {known.distance:g}")
    return Term(group.word, group.distance, why)


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and torch.allclose(one, other, rtol=1e-5, atol=1e-5)


def _sums(site: Site, together: torch.Tensor, parts: Optional[torch.Tensor]) -> str:
    def few(numbers: Optional[torch.Tensor]) -> str:
        values = [] if numbers is None else [f"{n:.6g}" for n in numbers[:3].tolist()]
        return ", ".join(values) + (", ..." if numbers is not None and len(numbers) > 3 else "")

    return (
        f"{sites.place_of(site)} counts {few(together)} for some images together, and "
        f"{few(parts)} for them one by one"
    )
