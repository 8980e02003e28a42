# Copyright (c) the d2_memfit developers.
"""What is known of a model's counts."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from math import isclose
from typing import Any, Optional

import numpy as np

from ...counts import Place
from . import sites
from .sites import Counts, Site
from .trial import OVER_RANKS, Findings
from .verdict import Verdict, judged

__all__ = ["Known"]

_EXACT = 1e-5  # relative; weights of classes are float32

# A count that follows from the annotations, such as DETR's num_boxes or its class weights: so many
# per object, and so many per image.
Rule = tuple[float, float]


class Known:
    """What is known of a model's counts: all ranks have the same, and so has a resumed run.

    It follows from the findings of trials and from rules that were broken, and from nothing else.

    Args:
        most_trials: windows that may have a trial.

    Attributes:
        verdict: how micro-batches are weighted.
        needs_trial: whether the next window has a trial.
        trials_left: windows that may still have one.
        rules: of used sites whose counts follow from the annotations. They only save a forward:
            each window's real counts are compared with them before the step.
    """

    def __init__(self, most_trials: int) -> None:
        self.verdict = Verdict()
        self.needs_trial = most_trials > 0
        self.trials_left = most_trials
        self.rules: dict[Site, Rule] = {}
        self._findings: list[Findings] = []
        self._broken: set[Site] = set()
        self._places: set[tuple[str, Place]] = set()  # with the kind of count

    @property
    def used_sites(self) -> set[Site]:
        """Sites whose totals are needed."""
        if self.verdict.is_by_images:
            return set()
        used = {site for found in self._findings for site in found.used}
        return {s for s in used if self.verdict.way == OVER_RANKS or s[0] != sites.SUM}

    def predicted(self, site: Site, counts: Counts) -> float:
        """What a site's rule says of some images."""
        per_object, per_image = self.rules[site]
        return per_object * counts[sites.OBJECTS] + per_image * counts[sites.IMAGES]

    def is_new(self, counts: Counts) -> bool:
        """Whether a forward counts where none did in a trial, if there was one."""
        return len(self._places) > 0 and not {site[:2] for site in counts} <= self._places

    def broken_rules(self, counts: Counts) -> set[Site]:
        """Rules that a forward's counts do not follow."""
        return {
            site
            for site in self.rules.keys() & self.used_sites
            if not _is_same(self.predicted(site, counts), counts.get(site, 0.0))
        }

    def learn(self, found: list[Findings], is_over: bool, has_memory: bool) -> None:
        """Learn from a window's trial.

        Args:
            found: by all ranks that could make it.
            is_over: whether there were objects, if there are any in the dataset.
            has_memory: whether there was enough on all ranks. If not, another window may have it.
        """
        if found:
            # An open question gets more findings. Otherwise the old ones were contradicted.
            self._conclude([*self._findings, *found] if self.verdict.is_open else found)
        if is_over:
            self.trials_left -= 1
            self.needs_trial = self.verdict.is_open or not has_memory
            self.needs_trial &= self.trials_left > 0

    def correct(self, broken: Iterable[Site]) -> None:
        """Count at these sites from now on: their rules were broken."""
        self._broken.update(broken)
        self._conclude(self._findings)

    def test_again(self) -> None:
        """Let the next window, or this one's next run, be tested anew."""
        self.needs_trial = self.trials_left > 0

    def forget(self) -> None:
        """Weight micro-batches by images, and test again."""
        self._conclude([])
        self.trials_left = max(self.trials_left - 1, 0)
        self.test_again()

    def state_dict(self) -> dict[str, Any]:
        """All of it in plain types; empty if nothing is known."""
        if not self._findings:
            return {}
        return {
            "needs_trial": self.needs_trial,
            "trials_left": self.trials_left,
            "findings": [asdict(f) for f in self._findings],
            "broken": sorted(self._broken),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.needs_trial = state["needs_trial"]
        self.trials_left = state["trials_left"]
        self._broken = set(state["broken"])
        self._conclude([Findings(**f) for f in state["findings"]])

    def _conclude(self, findings: list[Findings]) -> None:
        self._findings = findings
        self.verdict = judged(findings)
        self._places = {site[:2] for f in findings for counts in f.counts for site in counts}
        rules = {site: _rule(site, findings) for site in self.used_sites - self._broken}
        self.rules = {site: rule for site, rule in rules.items() if rule is not None}


def _rule(site: Site, findings: list[Findings]) -> Optional[Rule]:
    """The rule that a site's counts follow in all trials that know it; None if there is none."""
    counts = [n for found in findings if site in found.used for n in found.counts]
    known = np.array([(n[sites.OBJECTS], n[sites.IMAGES]) for n in counts], dtype=float)
    own = np.array([n.get(site, 0.0) for n in counts])
    if np.linalg.matrix_rank(known) < 2:
        return None
    per_object, per_image = np.linalg.lstsq(known, own, rcond=None)[0].tolist()
    follows = map(_is_same, known @ (per_object, per_image), own)
    return (per_object, per_image) if all(follows) else None


def _is_same(one: float, other: float) -> bool:
    return isclose(one, other, rel_tol=_EXACT, abs_tol=_EXACT)
