# Copyright (c) the d2_memfit developers.
"""A test of what losses are divided by: the gradient of images together against that of parts.

A window must have the gradient of one forward over all its images. The test takes images of the
job (:mod:`.variants`), together and in parts, and compares the gradients, first of all losses, then
of each loss that may differ. It does so with each way of weighting that there is: by images, and
with the counts that are declared. A count must add up: the count of the images together is the sum
of those of the parts. What a forward changes in the model is kept from part to part, as in
training.

Nothing is left behind. Random numbers do not depend on the batch, and nothing is dropped
(:class:`SameDraws`).
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

from ...compat.pytorch import BatchNorm
from ...errors import ConfigError, MemfitError, one_line
from ...job import size_of
from ...memory import is_out_of_memory, release_memory, with_room
from . import sites
from .answers import Totals
from .causes import Evidence, cause_of, weights_of_parts
from .published import Published, published
from .rules import CLOSE, EXACT, NOT_KNOWN, OTHER, Rule, Rules, Term, rule_of
from .runs import Run, Subject
from .sites import Counts, Site
from .sketch import relative
from .variants import images_of_one_size, images_of_two_sizes, shrunk

__all__ = [
    "BY_IMAGES",
    "LIMIT",
    "GradientTest",
    "UntestableError",
    "Way",
    "chosen_way",
    "decided",
    "error_text",
    "try_ways",
]

LIMIT = 1e-3  # relative distance of a gradient that is right
_ROUNDING = 2e-5  # of float32
_OF_FLOAT64 = 1e-9
_SMALL = 1e-3  # of the gradient of all losses; one of a smaller loss is compared with this
_DIVIDED = 0.75  # a loss that is divided by a count has about half, if the count is doubled
_MOST_FORWARDS = 60  # images through the model
_MOST_PAIRS = 5  # of random numbers
_MUCH = 1.05  # a larger gain or loss in the distance of all losses counts
_SURE = 6  # standard errors
# Images together, images of a part, and by how much they have fewer pixels, in turn.
_TRIED = ((3, 1, 1), (4, 2, 1), (3, 1, 4), (2, 1, 4), (2, 1, 16), (3, 1, 16))  # no gradient
_MOST_PIXELS = 2**17  # of the images together
_BORDERS = 10  # the effect of padding, which no weights have, may make a distance so much larger
_PADDING = 0.05  # it is not named up to here
_PADDED = (
    "in images of different sizes, it is a mean over padded images. Take the mean of each image"
)
_KINDS = (sites.SUM, sites.COUNT, sites.MEAN)

_NO_MEMORY = "memory ran out"

# Names of ways.
BY_IMAGES = "images"  # all losses by images
_DECLARED = "declared"  # counts that an adapter, a weighted cross entropy or the user declares
_OVER_RANKS = "over ranks"  # these, and counts that the model adds up over ranks


class UntestableError(MemfitError):
    """The losses of a model cannot be tested. The message is the model's error, in one line."""


@dataclass(frozen=True)
class Way:
    """A way of weighting losses, as one rank has found it. Plain data: all ranks get it.

    Attributes:
        name: the same on all ranks.
        distance: relative distance of the gradient of the parts from that of the images together.
        num_wrong: losses whose values are not those of the images together.
        spoils: whether a loss is wrong that is right if micro-batches count by their images.
        unused: places of ``window_count`` on which no loss depends.
        broken: counts that do not add up: losses that depend on one, and a text about it.
    """

    name: str
    rules: Rules
    distance: float
    num_wrong: int = 0
    spoils: bool = False
    unused: frozenset[str] = frozenset()
    broken: tuple[tuple[tuple[str, ...], str], ...] = ()


def chosen_way(of_ranks: Sequence[Sequence[Way]]) -> Way:
    """The way that is taken on all ranks: the nearest that spoils no loss on any rank.

    Rules from annotations are kept if they are the same on all ranks.
    """
    best: Optional[Way] = None
    for name in dict.fromkeys(way.name for ways in of_ranks for way in ways):
        found = [way for ways in of_ranks for way in ways if way.name == name]
        if len(found) < len(of_ranks):  # the ways of a rank depend on its images
            continue
        first = found[0].rules
        kept = set.intersection(*(set(way.rules.counts) for way in found))
        counts = {site: _common(site, found) for site in first.counts if site in kept}
        way = Way(
            name,
            replace(
                first,
                counts=counts,
                weights={k: w for way in found for k, w in way.rules.weights.items()},
                places=frozenset().union(*(way.rules.places for way in found)),
            ),
            max(way.distance for way in found),
            max(way.num_wrong for way in found),
            any(way.spoils for way in found),
        )
        if best is None or (not way.spoils and _is_nearer(way, best)):
            best = way
    assert best is not None
    ways = [way for ways in of_ranks for way in ways]
    unused = [way.unused for way in ways if way.name != BY_IMAGES]
    return replace(
        best,
        unused=frozenset.intersection(*unused) if unused else frozenset(),
        broken=tuple(dict.fromkeys(item for way in ways for item in way.broken)),
    )


def _is_nearer(way: Way, other: Way) -> bool:
    """Whether a way with counts is better. One loss may hide in the gradient of all what others
    gain. If both ways are right, so are counts for images that differ more than those of the test.
    """
    if way.distance <= _ROUNDING:
        return True
    is_no_worse = way.distance <= _MUCH * other.distance
    ranks = [(w.num_wrong, w.distance) for w in (way, other)]
    return is_no_worse and ranks[0] < ranks[1]


def _common(site: Site, ways: Sequence[Way]) -> Optional[Rule]:
    rules = [way.rules.counts[site] for way in ways]
    first = rules[0]
    if first is None or None in rules:
        return None
    told = torch.tensor(rules, dtype=torch.float64)
    return first if torch.allclose(told, told[0], rtol=1e-5, atol=1e-5) else None


def try_ways(
    subject: Subject,
    images: Sequence[Any],
    patterns: Sequence[Sequence[str]] = (),
    of_micro_batch: Optional[int] = None,
) -> tuple["GradientTest", list[Way]]:
    """The test on images that the model can be run with, and the ways that it has found.

    Args:
        of_micro_batch: images that a micro-batch may have. Those of the test together are as small
            as these; None: they are as small as :data:`_MOST_PIXELS`.

    Raises:
        UntestableError: there are no such images.
        ConfigError: as for :class:`GradientTest`.
    """
    device = next(subject.model.parameters()).device
    without = error = ""
    for i, (number, of_part, share) in enumerate(_TRIED):
        subject.has_gradients = i < len(_TRIED) - 1
        height, width = size_of(list(images))
        fits = height * width * of_micro_batch if of_micro_batch else _MOST_PIXELS
        of_size = shrunk(images, min(fits, _MOST_PIXELS) / share / number)
        for with_empty, freezes in ((True, False), (False, False), (True, True), (False, True)):
            options = patterns, number, of_part
            try:
                test = GradientTest(subject, of_size, *options, with_empty, freezes)
                if bad := test.not_finite:
                    test = GradientTest(subject, of_size, *options, False, freezes)
                    test.not_finite = bad
                test.without = without if not with_empty else ""
                return test, with_room(test.ways, device)
            except ConfigError:
                raise
            except Exception as e:  # of the model's code. Its traceback would keep its tensors
                error = error_text(e)
                kind = type(e).__name__
            if with_empty:
                without = f"no image without labels ({kind})"
            release_memory(device)
        if i > 0 and error != _NO_MEMORY:
            break
    raise UntestableError(error)


def error_text(error: Exception) -> str:
    """An error of the model's code in one line."""
    if is_out_of_memory(error):
        return _NO_MEMORY
    place = traceback.extract_tb(error.__traceback__)[-1]
    file = "/".join(Path(place.filename).parts[-2:])
    return f"{type(error).__name__}: {one_line(error)[:200]} in {file}:{place.lineno}"


def decided(subject: Subject, images: Sequence[Any]) -> tuple[Rules, Rules]:
    """The rules that one process finds for its losses, and what holds if all count by images.

    Raises:
        UntestableError: the model cannot be tested.
    """
    test, ways = try_ways(subject, images)
    found = []
    for way in (chosen_way([ways]), ways[0]):
        terms = test.terms(way)
        found.append(
            replace(
                way.rules.without(test.broken_rules),
                terms=terms,
                zero=test.zero,
                not_finite=frozenset(test.not_finite),
                left_out=test.without,
            )
        )
    return found[0], found[1]


class GradientTest:
    """The test on images of one rank.

    Args:
        subject: the model and its losses.
        images: those of the window.
        patterns: of MEMFIT.NORMALIZERS.LOSSES: names of losses, and what weighs them.
        number: images that go through the model together, at least two.
        of_part: those of a part.
        with_empty, freezes: whether the third one has no labels; whether batch normalisation uses
            its running statistics. Some models can only be tested so.

    Attributes:
        changed, counters: names of what forwards change in the model, and of numbers among them
            that count forwards.
        names: of the losses.
        without: what it had to leave out; "" if it has all.
        statistics: sums over ranks of many numbers that do not add up, as text.
        broken_rules: counts whose rule does not hold for images of another size.
        not_finite: names of losses that only an image without labels makes infinite or NaN.

    Raises:
        Exception: whatever the model's code raises.
        ConfigError: the losses cannot be trained on, or are told in two ways.
    """

    def __init__(
        self,
        subject: Subject,
        images: Sequence[Any],
        patterns: Sequence[Sequence[str]] = (),
        number: int = 3,
        of_part: int = 1,
        with_empty: bool = True,
        freezes: bool = False,
    ) -> None:
        self._subject = subject
        self._images = images
        self._patterns = patterns
        self._freezes = freezes
        with_empty &= number > 2 * of_part
        chosen = images_of_one_size(images, subject.model, number, with_empty)
        self._together = [chosen]
        self._apart = [chosen[i : i + of_part] for i in range(0, number, of_part)]
        self._whole = self._run(self._together)
        self._by_images = self._run(self._apart, looks=True)
        self.changed = self._by_images.changed
        self.counters = self._by_images.counters
        self.names = list(self._whole.parts[0].losses)
        whole, parts = self._whole.parts[0].counts, [p.counts for p in self._by_images.parts]
        self.statistics = [
            text
            for site, text in self._whole.large.items()
            if not _is_same(whole[site], sites.added_up(parts).get(site, whole[site] + 1))
        ]
        self.without = ""
        self.broken_rules: set[Site] = set()
        self._tried: dict[str, tuple[Counts, Run]] = {}
        last = self._by_images.parts[-1].losses
        is_cause = with_empty and self._whole.is_finite
        self.not_finite = [k for k, v in last.items() if is_cause and not math.isfinite(v)]

    @property
    def _rounding(self) -> float:
        """Distance of all losses below which each of them is right."""
        is_double = next(self._subject.model.parameters()).dtype == torch.float64
        return _OF_FLOAT64 if is_double else _ROUNDING

    @property
    def zero(self) -> frozenset[str]:
        """Losses about which the test says nothing."""
        return frozenset(name for name in self.names if self._whole.loss(name) == 0)

    def ways(self) -> list[Way]:
        """Test each way of weighting that there is; the first one is by images."""
        places = frozenset().union(*(part.counts for part in self._by_images.parts))
        wrong = sum(self._is_off(k, self._by_images) for k in self.names)
        plain = Way(BY_IMAGES, Rules(places=places), self._off(self._by_images), wrong)
        ways = [plain]
        if self._subject.pretended is not None:
            told = self._run(self._together, pretends=True, with_gradient=False)
            if any(site[0] == sites.SUM for site in told.parts[0].counts):
                ways.append(self._way(_OVER_RANKS, told.parts[0].counts, True))
        nearest = min(way.distance for way in ways)
        is_declared = self._whole.is_asked or self._patterns
        if is_declared and (len(ways) == 1 or nearest > self._rounding):
            ways.append(self._way(_DECLARED, self._whole.parts[0].counts, False))
        return ways

    def terms(self, way: Way) -> dict[str, Term]:
        """The word, distance and cause for each loss, with the weights of a way."""
        if not self._subject.has_gradients:
            why = "there was no memory for the gradient of two images"
            return dict.fromkeys(self.names, Term(NOT_KNOWN, 0.0, why))
        terms = {
            name: Term(NOT_KNOWN, math.inf, "it is not finite")
            for name, loss in self._whole.parts[0].losses.items()
            if not math.isfinite(loss)
        }
        names = [name for name in self.names if name not in terms]
        found = self._pairs(way, names, 2)
        if found.word == EXACT and found.distance <= self._rounding:
            terms.update(dict.fromkeys(names, Term(EXACT, found.distance)))
            return {**terms, **self._in_two_sizes(way, names)}
        noisy = [name for name in names if found.noise_of(name) > LIMIT]
        # More pairs cannot settle what is far within the noise.
        may_settle = any(found.offset_of(k) > 2 * found.noise_of(k) for k in noisy)
        groups = [self._pairs(way, noisy, _MOST_PAIRS if may_settle else 1)] if noisy else []
        for group in groups:
            group.is_noisy = True
        fixed = [name for name in names if name not in noisy]
        groups += [self._pairs(way, g, 1) for g in self._groups(fixed, found.pairs[0].parts)]
        is_exact = all(group.word == EXACT for group in groups)
        stated = {} if is_exact else self._published()
        wrong = [group for group in groups if group.word == OTHER]
        causes = dict(zip(map(id, wrong), self._causes(way, wrong)))
        for group in groups:
            for name in group.names:
                noise = max(group.noise, found.noise_of(name)) if group.is_noisy else 0.0
                why = causes.get(id(group), f"noise {noise:.1g}")
                terms[name] = _term(group, noise, stated.get(name, Published()), why)
        exact = [name for name, term in terms.items() if term.word == EXACT]
        return {**terms, **self._in_two_sizes(way, exact)}

    def _run(self, groups: Sequence[Sequence[Any]], **options: Any) -> Run:
        freezes = options.pop("freezes", False) or self._freezes
        return self._subject.run(groups, freezes=freezes, **options)

    def _off(self, parts: Run) -> float:
        return relative(parts.gradient - self._whole.gradient, self._whole.gradient)

    def _is_off(self, name: str, parts: Run) -> bool:
        """Whether the value of a loss is not that of the images together."""
        whole = self._whole.loss(name)
        return abs(parts.loss(name) - whole) > LIMIT * abs(whole)

    def _way(self, name: str, told: Counts, pretends: bool) -> Way:
        """Test the parts with answers, which are what the images together have counted."""
        of_parts = {site for part in self._by_images.parts for site in part.counts}
        if pretends:  # sums over ranks are seen only so
            first = self._run(self._apart[:1], pretends=True, with_gradient=False)
            of_parts.update(first.parts[0].counts)
        # Where more is counted for several images, each of them is counted for itself.
        by_image = {site[:2] for site in told.keys() - of_parts}
        counts = {s: n for s, n in told.items() if s[0] in _KINDS and s[:2] not in by_image}
        depends = {site: self._depending(site, counts, pretends) for site in counts}
        divided = self._divided(counts, pretends) if any(s[0] == sites.SUM for s in counts) else []
        parts = self._answered(counts, self._weights(depends, divided), pretends)
        sums = sites.added_up(part.counts for part in parts.parts)
        broken = {s: n for s, n in counts.items() if s not in sums or not _is_same(n, sums[s])}
        of_broken = {site: tuple(depends[site]) for site in broken}
        if broken:
            depends = {site: n for site, n in depends.items() if site not in broken}
            counts = {site: n for site, n in counts.items() if site not in broken}
            parts = self._answered(counts, self._weights(depends, divided), pretends)
        self._tried[name] = counts, parts
        of_each = [part.counts for part in parts.parts]
        used = [site for site in counts if depends[site] or site[0] == sites.MEAN]
        rules = Rules(
            True,
            {site: rule_of(site, of_each) for site in used},
            self._weights(depends, divided),
            frozenset().union(*of_each),
        )
        unused = [s for s in counts if s[0] == sites.COUNT and not depends[s]]
        texts = [(of_broken[s], _sums(s, n, sums.get(s))) for s, n in broken.items()]
        was_right = [k for k in self.names if not self._is_off(k, self._by_images)]
        return Way(
            name,
            rules,
            self._off(parts),
            sum(self._is_off(loss, parts) for loss in self.names),
            any(self._is_off(loss, parts) for loss in was_right),
            frozenset(map(sites.place_of, unused)),
            tuple(texts),
        )

    def _answered(self, counts: Counts, weights: Mapping[str, Site], pretends: bool) -> Run:
        totals = self._totals(counts)
        return self._run(self._apart, totals=totals, weights=weights, pretends=pretends)

    def _totals(self, counts: Counts) -> Totals:
        images = len(self._together[0])
        annotated = self._whole.parts[0].counts
        known = {site: annotated[site] for site in (sites.IMAGES, sites.OBJECTS)}
        return Totals({**known, **counts}, images, images)

    def _depending(self, site: Site, counts: Counts, pretends: bool) -> frozenset[str]:
        """Losses that depend on a count. That of a mean stands in its loss itself."""
        if site[0] == sites.MEAN:
            return frozenset()
        n = counts[site]
        more = n * torch.linspace(2, 3, len(n)) + 2  # in another ratio, if there are several
        losses = [self._losses_with({**counts, site: m}, pretends) for m in (n, more)]
        return frozenset(name for name in self.names if losses[0].get(name) != losses[1].get(name))

    def _divided(self, counts: Counts, pretends: bool) -> list[str]:
        """Losses that are divided by what the model adds up over ranks."""
        doubled = {s: 2 * n if s[0] == sites.SUM else n for s, n in counts.items()}
        one, two = (self._losses_with(c, pretends) for c in (counts, doubled))
        return [k for k, loss in one.items() if loss and two.get(k, loss) / loss < _DIVIDED]

    def _losses_with(self, counts: Counts, pretends: bool) -> dict[str, float]:
        """The losses of the first part if counts are answered."""
        options = {"totals": self._totals(counts), "pretends": pretends}
        return self._run(self._apart[:1], with_gradient=False, **options).parts[0].losses

    def _weights(
        self, depends: Mapping[Site, frozenset[str]], divided: Sequence[str]
    ) -> dict[str, Site]:
        """What weighs some losses in place of images.

        Raises:
            ConfigError: a loss is told in two ways.
        """
        kinds = {s[0]: s for s in (sites.OBJECTS, sites.IN_FULL)}
        summed = {k for s, names in depends.items() if s[0] == sites.SUM for k in names}
        weights = {name: sites.IN_FULL for name in divided if name in summed}
        for name in self.names:
            told = {kind for pattern, kind in self._patterns if fnmatchcase(name, pattern)}
            if not told:
                continue
            asked = [sites.place_of(site) for site, names in depends.items() if name in names]
            if asked or len(told) > 1:
                ways = ", ".join([*sorted(told), *(f"the count in {place}" for place in asked)])
                raise ConfigError(
                    f"MEMFIT.NORMALIZERS.LOSSES: what {name} is divided by is declared twice, by "
                    f"{ways}. Leave one of them"
                )
            weights[name] = kinds[told.pop()]
        return weights

    def _pair(self, way: Way, names: Sequence[str], seed: int = 0, **options: Any) -> "_Pair":
        """The gradient of some losses for the images together, and in parts."""
        counts, parts = self._tried.get(way.name, ({}, self._by_images))
        kept = {site: n for site, n in counts.items() if site in way.rules.counts}
        is_known = len(names) == len(self.names) and not seed and not options
        if is_known and len(kept) == len(counts):
            return _Pair(self._whole, parts)
        shared = {"terms": names, "seed": seed, **options}
        whole = self._run(self._together, **{**shared, "carries": True})
        parts = self._run(
            self._apart,
            totals=self._totals(kept) if way.rules.is_answered else None,
            weights=way.rules.weights,
            pretends=way.rules.pretends,
            **shared,
        )
        return _Pair(whole, parts)

    def _pairs(self, way: Way, names: Sequence[str], most: int) -> "_Pairs":
        """Pairs with other random numbers, until the mean of their differences is known."""
        least = _SMALL * float(self._whole.gradient.norm())
        pairs = _Pairs(names, [self._pair(way, names)], least)
        first = pairs.pairs[0]
        if pairs.distance <= LIMIT and not first.has_drawn:
            return pairs
        while len(pairs.pairs) < most and self._has_time:
            pairs.pairs.append(self._pair(way, names, len(pairs.pairs)))
            if pairs.noise <= LIMIT / 3:
                break
        return pairs

    @property
    def _has_time(self) -> bool:
        return self._subject.forwards + 2 * len(self._together[0]) <= _MOST_FORWARDS

    def _groups(self, names: Sequence[str], parts: Run, images: int = 0) -> list[list[str]]:
        """Losses of one criterion, such as those of all layers, if their values are as right.

        If these are too many to be tested, there are two groups, by values.
        """
        left = _MOST_FORWARDS - self._subject.forwards
        most = left // (2 * (images or len(self._together[0])))
        groups: dict[Any, list[str]] = {}
        by_value: dict[Any, list[str]] = {}
        for name in names:
            is_off = self._is_off(name, parts)
            groups.setdefault((re.sub(r"\d+", "", name), is_off), []).append(name)
            by_value.setdefault(is_off, []).append(name)
        return list((groups if len(groups) <= most else by_value).values())

    def _causes(self, way: Way, wrong: Sequence["_Pairs"]) -> list[str]:
        """Why groups of losses are wrong, and what helps."""
        names = [name for group in wrong for name in group.names]
        norms = [
            name
            for name, part in self._subject.model.named_modules()
            if isinstance(part, BatchNorm) and part.training
        ]
        looks = bool(wrong) and not self._freezes
        frozen = self._pair(way, names, freezes=True) if norms and looks else None
        restored = self._pair(way, names, carries=False) if self.changed and wrong else None
        causes = []
        for group in wrong:
            first = group.pairs[0]
            objects = [part.counts[sites.OBJECTS].item() for part in first.parts.parts]
            evidence = Evidence(
                group.names,
                first.whole.gradient,
                sum(map(first.whole.loss, group.names)),
                first.parts.gradients,
                [sum(part.losses.get(k, 0.0) for k in group.names) for part in first.parts.parts],
                objects,
                LIMIT,
                [text for losses, text in way.broken if {*losses} & {*group.names}],
                frozen is not None and frozen.is_right(group.names),
                restored is not None and restored.is_right(group.names),
                self.changed,
                norms,
            )
            causes.append(cause_of(evidence))
        return causes

    def _published(self) -> dict[str, Published]:
        """For losses of well-known code, the distances that are stated."""
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

    def _in_two_sizes(self, way: Way, names: Sequence[str]) -> dict[str, Term]:
        """Test losses that are exact so far with images of two sizes, which are padded.

        Other padding also changes features near borders. That is of the data, and no loss is named
        for a little of it. A loss is, if its images have other weights because of their sizes.
        """
        images = images_of_two_sizes(self._images)
        if not images or not (names or way.rules.counts) or not self._has_time:
            return {}
        try:  # without a second rank first, which would be taken for the cause of an error
            self._run([images], with_gradient=False)
        except Exception:  # such as torch.stack: all images must have one size
            return {}
        everything = self._pair_of_sizes(way, images, names)
        for part in everything.parts.parts:
            self.broken_rules |= way.rules.broken(part.counts)
        if everything.distance <= self._rounding:
            return {}
        found = {}
        for group in self._groups(names, everything.parts, images=len(images)):
            pair = self._pair_of_sizes(way, images, group)
            _, rest = weights_of_parts(pair.whole.gradient, pair.parts.gradients)
            distance = float(pair.difference.norm()) / max(
                float(pair.whole.gradient.norm()), _SMALL * float(everything.whole.gradient.norm())
            )
            if distance > max(LIMIT, min(_BORDERS * rest, _PADDING)):
                found.update(dict.fromkeys(group, Term(OTHER, distance, _PADDED)))
        return found

    def _pair_of_sizes(self, way: Way, images: Sequence[Any], names: Sequence[str]) -> "_Pair":
        whole = self._run([images], pretends=way.rules.pretends, terms=names)
        known = {*way.rules.counts, sites.IMAGES, sites.OBJECTS}
        counts = {s: n for s, n in whole.parts[0].counts.items() if s in known}
        parts = self._run(
            [[image] for image in images],
            totals=Totals(counts, len(images), len(images)) if way.rules.is_answered else None,
            weights=way.rules.weights,
            pretends=way.rules.pretends,
            terms=names,
        )
        return _Pair(whole, parts)


@dataclass
class _Pair:
    """Images together and in parts, with the same random numbers."""

    whole: Run
    parts: Run

    @property
    def difference(self) -> torch.Tensor:
        return self.parts.gradient - self.whole.gradient

    @property
    def distance(self) -> float:
        return relative(self.difference, self.whole.gradient)

    @property
    def has_drawn(self) -> bool:
        return self.whole.has_drawn or self.parts.has_drawn

    def is_right(self, names: Sequence[str]) -> bool:
        """Whether the gradient is right, or at least the values of these losses."""
        pairs = [(self.whole.loss(name), self.parts.loss(name)) for name in names]
        has_values = all(abs(a - b) <= LIMIT * abs(a) for a, b in pairs)
        return self.distance <= LIMIT or has_values


@dataclass
class _Pairs:
    """Pairs with different random numbers, about the same losses."""

    names: Sequence[str]
    pairs: list[_Pair]
    least: float  # norm of a gradient with which a smaller one is compared
    is_noisy: bool = False  # whether values of its losses differ from pair to pair

    def noise_of(self, name: str) -> float:
        """By how much the difference of a loss's value differs from pair to pair, relative."""
        differences = [pair.parts.loss(name) - pair.whole.loss(name) for pair in self.pairs]
        scale = max(abs(pair.whole.loss(name)) for pair in self.pairs)
        return (max(differences) - min(differences)) / scale if scale else 0.0

    def offset_of(self, name: str) -> float:
        """By how much the value of a loss is off in the mean of the pairs, relative."""
        differences = [pair.parts.loss(name) - pair.whole.loss(name) for pair in self.pairs]
        scale = max(abs(pair.whole.loss(name)) for pair in self.pairs)
        return abs(sum(differences)) / len(differences) / scale if scale else 0.0

    @property
    def noise(self) -> float:
        """Standard error of the mean difference, relative."""
        number = len(self.pairs)
        if number == 1:
            return 0.0
        differences = torch.stack([pair.difference for pair in self.pairs])
        spread = float((differences - differences.mean(0)).norm())
        return spread / math.sqrt(number * (number - 1)) / self._scale

    @property
    def distance(self) -> float:
        """Relative norm of the mean difference, less what noise adds to it."""
        mean = torch.stack([pair.difference for pair in self.pairs]).mean(0)
        return math.sqrt(max((float(mean.norm()) / self._scale) ** 2 - self.noise**2, 0.0))

    @property
    def word(self) -> str:
        distance, noise = self.distance, self.noise
        if not math.isfinite(distance):
            return OTHER
        is_sure = len(self.pairs) == _MOST_PAIRS and distance >= _SURE * noise
        is_cut_short = self.is_noisy and len(self.pairs) == 1
        if (noise > LIMIT / 3 and not is_sure) or (is_cut_short and distance > LIMIT):
            return NOT_KNOWN
        return OTHER if distance > LIMIT else EXACT

    @property
    def _scale(self) -> float:
        norms = [float(pair.whole.gradient.norm()) for pair in self.pairs]
        return max(sum(norms) / len(norms), self.least) or 1.0


def _term(group: _Pairs, noise: float, known: Published, why: str) -> Term:
    """The result for a loss of a group, whose code may have a stated distance."""
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
