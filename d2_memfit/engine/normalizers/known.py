# Copyright (c) the d2_memfit developers.
"""What is known of a model's counts."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from . import sites
from .sites import Counts, Site
from .totals import Rule
from .trial import Findings
from .verdict import Verdict, judged

__all__ = ["Known"]


class Known:
    """What is known of a model's counts: all ranks have the same, and so has a resumed run.

    It follows from the findings of trials and from counts of forwards, and from nothing else.

    Args:
        most_trials: windows that may have a trial.

    Attributes:
        verdict: how micro-batches are weighted.
        needs_trial: whether the next window has a trial.
        trials_left: windows that may still have one.
        rules: of sites whose counts follow from the annotations.
    """

    def __init__(self, most_trials: int) -> None:
        self.verdict = Verdict()
        self.needs_trial = most_trials > 0
        self.trials_left = most_trials
        self.rules: dict[Site, Rule] = {}
        self._findings: list[Findings] = []
        self._observed: list[Counts] = []

    @property
    def sites(self) -> set[Site]:
        """Sites where a forward has counted."""
        return {sites.IMAGES, sites.OBJECTS}.union(*self._observed)

    @property
    def used_sites(self) -> set[Site]:
        """Sites whose totals are needed."""
        answered = {s for s in self.sites if s[0] in (sites.SUM, sites.COUNT, sites.MEAN)}
        used = answered if self.verdict.answers else set()
        return used.union(self.verdict.weights.values()) - {sites.IN_FULL}

    def explains(self, counts: Counts) -> bool:
        """Whether a forward's counts are at known sites, and follow from the rules."""
        used = self.used_sites & self.rules.keys()
        is_known = counts.keys() <= self.sites
        return is_known and all(self.rules[site].explains(site, counts) for site in used)

    def learn(self, found: Sequence[Findings], is_over: bool, has_memory: bool) -> None:
        """Learn from a window's trial.

        Args:
            found: by all ranks that could make it.
            is_over: whether there were objects, if there are any in the dataset.
            has_memory: whether there was enough on all ranks. If not, another window may have it.
        """
        if found:
            # An open question gets more findings. Otherwise the old ones were contradicted.
            self._findings = [*self._findings, *found] if self.verdict.is_open else [*found]
            self.verdict = judged(self._findings)
            self._observe([*self._observed, *(counts for f in found for counts in f.counts)])
        if is_over:
            self.trials_left -= 1
            is_open = self.verdict.is_open or not has_memory
            self.needs_trial = is_open and self.trials_left > 0

    def correct(self, surprises: Sequence[Counts]) -> None:
        """Learn from counts that were not explained."""
        if any(counts.keys() - self.sites for counts in surprises):
            self.test_again()
        self._observe([*self._observed, *surprises])

    def test_again(self) -> None:
        """Let the next window, or this one's next run, be tested anew."""
        self.needs_trial = self.trials_left > 0

    def forget(self) -> None:
        """Weight micro-batches by images, and test again."""
        self.verdict = Verdict()
        self._findings = []
        self.trials_left = max(self.trials_left, 1)
        self.needs_trial = True

    def state_dict(self) -> dict[str, Any]:
        """All of it in plain types; empty if nothing is known."""
        if not self.verdict.seen:
            return {}
        return {
            "needs_trial": self.needs_trial,
            "trials_left": self.trials_left,
            "findings": [asdict(f) for f in self._findings],
            "observed": self._observed,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.needs_trial = state["needs_trial"]
        self.trials_left = state["trials_left"]
        self._findings = [Findings(**f) for f in state["findings"]]
        self.verdict = judged(self._findings)
        self._observe(state["observed"])

    def _observe(self, observed: list[Counts]) -> None:
        """Take counts as those that were observed, and find the rules that they follow."""
        self._observed = observed
        rules = {site: Rule.through(site, observed) for site in self.sites if site[1]}
        self.rules = {site: rule for site, rule in rules.items() if rule is not None}
