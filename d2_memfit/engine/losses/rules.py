# Copyright (c) the d2_memfit developers.
"""What the losses of a job are weighted by. A value: it can be printed, saved and compared."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Optional

import torch

from . import sites
from .sites import Counts, Site

__all__ = ["CLOSE", "EXACT", "NOT_KNOWN", "OTHER", "Formula", "Rules", "Term", "formula_of"]

# The four words about a loss in micro-batches, against one forward over all images.
EXACT = "exact"  # to 1e-3 of the gradient
CLOSE = "close"  # up to the distance that docs/ACCUMULATION.md states for the code of the loss
OTHER = "other"
NOT_KNOWN = "not known"
_WORDS = (EXACT, CLOSE, NOT_KNOWN, OTHER)  # from good to bad

# The formula of a count that follows from the annotations, such as DETR's num_boxes or its class
# weights: a number per object, and a number per image.
Formula = tuple[float, float]

_SAME = 1e-5  # relative; weights of classes are float32


class Term(NamedTuple):
    """The result of the test for one loss.

    Attributes:
        word: one of the four.
        distance: of its gradient, relative.
        why: the cause and a remedy; "" if the loss is exact.
    """

    word: str
    distance: float
    why: str = ""

    def worse(self, other: "Term") -> "Term":
        return max(self, other, key=lambda term: (_WORDS.index(term.word), term.distance))


@dataclass(frozen=True)
class Rules:
    """What the losses of a job are weighted by: images, or counts of the window.

    Attributes:
        is_answered: whether counts are answered with the window's. If not, all losses are weighted
            by images.
        counts: the counts that are answered with the window's, each with the formula by which it
            follows from the annotations; None if only a forward can count it.
        weights: for some losses, the count by which micro-batches are weighted, not images.
        places: where counts were taken in the test, answered or not.
        terms: the result of the test for each loss.
        zero: losses that were zero in the test, so that it says nothing about them.
        not_finite: losses that are infinite or NaN for an image without labels.
        left_out: what the test had to leave out, because the model cannot be run with it.
        pretends: whether a model that is alone is told of a second rank, and so adds up its counts.
    """

    is_answered: bool = False
    counts: Mapping[Site, Optional[Formula]] = field(default_factory=dict)
    weights: Mapping[str, Site] = field(default_factory=dict)
    places: frozenset[Site] = frozenset()
    terms: Mapping[str, Term] = field(default_factory=dict)
    zero: frozenset[str] = frozenset()
    not_finite: frozenset[str] = frozenset()
    left_out: str = ""
    pretends: bool = False

    @property
    def needs_forward(self) -> bool:
        """Whether a window's counts are known only after a forward of all of its images."""
        return None in self.counts.values()

    def count(self, site: Site, annotated: Counts) -> Optional[torch.Tensor]:
        """The count of some images by the formula of its site; None if it has no formula."""
        formula = self.counts[site]
        if formula is None:
            return None
        per_object, per_image = formula
        return per_object * annotated[sites.OBJECTS] + per_image * annotated[sites.IMAGES]

    def broken(self, counts: Counts) -> set[Site]:
        """Sites for which a forward's counts do not follow the formula."""
        told = {site: self.count(site, counts) for site in self.counts}
        zero = torch.zeros(1, dtype=torch.float64)
        return {
            site
            for site, count in told.items()
            if count is not None and not _is_same(count, counts.get(site, zero))
        }

    def without(self, broken: set[Site]) -> "Rules":
        """The rules, in which some of the counts need a forward."""
        known = {site: None if site in broken else formula for site, formula in self.counts.items()}
        return replace(self, counts=known)

    def after(self, earlier: "Rules") -> "Rules":
        """These rules, with the earlier ones for losses that were zero in the new test only."""
        kept = (self.zero - earlier.zero) & earlier.terms.keys()
        if not kept:
            return self
        return replace(
            self,
            is_answered=self.is_answered or earlier.is_answered,
            counts={**earlier.counts, **self.counts},
            weights={**{k: w for k, w in earlier.weights.items() if k in kept}, **self.weights},
            places=self.places | earlier.places,
            terms={**self.terms, **{name: earlier.terms[name] for name in kept}},
            zero=self.zero - kept,
            not_finite=self.not_finite | (earlier.not_finite & kept),
            pretends=self.pretends or earlier.pretends,
        )

    def knows(self, counts: Counts) -> bool:
        """Whether all sites of a forward's counts were already in the test."""
        return {site[:2] for site in counts} <= {site[:2] for site in self.places}

    def state_dict(self) -> dict[str, Any]:
        """The rules in plain types."""
        return {
            "is_answered": self.is_answered,
            "counts": list(self.counts.items()),
            "weights": dict(self.weights),
            "places": sorted(self.places),
            "terms": {name: tuple(term) for name, term in self.terms.items()},
            "zero": sorted(self.zero),
            "not_finite": sorted(self.not_finite),
            "left_out": self.left_out,
            "pretends": self.pretends,
        }

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> "Rules":
        return cls(
            is_answered=state["is_answered"],
            counts=dict(state["counts"]),
            weights=dict(state["weights"]),
            places=frozenset(state["places"]),
            terms={name: Term(*term) for name, term in state["terms"].items()},
            zero=frozenset(state["zero"]),
            not_finite=frozenset(state["not_finite"]),
            left_out=state["left_out"],
            pretends=state["pretends"],
        )


def formula_of(site: Site, counts: Sequence[Counts]) -> Optional[Formula]:
    """The formula that a site's counts follow in all forwards of a test; None if there is none."""
    own = [n.get(site, torch.zeros(1, dtype=torch.float64)) for n in counts]
    known = torch.stack([torch.cat([n[sites.OBJECTS], n[sites.IMAGES]]) for n in counts])
    if len(own) < 3 or any(len(n) != 1 for n in own) or torch.linalg.matrix_rank(known) < 2:
        return None
    values = torch.stack(own)
    formula = torch.linalg.lstsq(known, values).solution
    if not all(map(_is_same, known @ formula, values)):
        return None
    per_object, per_image = formula.flatten().tolist()
    return per_object, per_image


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    pairs = zip(one.tolist(), other.tolist())
    return len(one) == len(other) and all(
        math.isclose(a, b, rel_tol=_SAME, abs_tol=_SAME) for a, b in pairs
    )
