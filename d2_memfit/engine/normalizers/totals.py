# Copyright (c) the d2_memfit developers.
"""The counts of a window, before its first forward."""

from collections.abc import Callable, Sequence
from itertools import dropwhile
from typing import Any, NamedTuple, Optional

import numpy as np
from torch import nn

from ...memory import is_out_of_memory, release_memory
from ..window import MicroBatch, Window
from . import sites
from .sites import Counts, Site
from .trial_forwards import without_traces

__all__ = ["Rule", "run_for_counts"]

_EXACT = 1e-5  # relative; weights of classes are float32


class Rule(NamedTuple):
    """A count that follows from the annotations: DETR's ``num_boxes``, or its class weights.

    It only saves a forward. Each window's real counts are compared with it before the step.
    """

    per_object: float
    per_image: float

    @classmethod
    def through(cls, site: Site, observed: Sequence[Counts]) -> Optional["Rule"]:
        """The rule that explains a site's counts in some forwards; None if there is none.

        Args:
            observed: what they counted. Those before the first one that counts at the site are left
                out: a model may count there only after a while.
        """
        observed = list(dropwhile(lambda n: site not in n, observed))
        known = np.array([(n[sites.OBJECTS], n[sites.IMAGES]) for n in observed], dtype=float)
        counts = np.array([n.get(site, 0.0) for n in observed])
        if np.linalg.matrix_rank(known) < 2:
            return None
        rule = cls(*np.linalg.lstsq(known, counts, rcond=None)[0].tolist())
        return rule if all(rule.explains(site, n) for n in observed) else None

    def predicted(self, counts: Counts) -> float:
        return self.per_object * counts[sites.OBJECTS] + self.per_image * counts[sites.IMAGES]

    def explains(self, site: Site, counts: Counts) -> bool:
        count = counts.get(site, 0.0)
        other = self.predicted(counts)
        return abs(count - other) <= _EXACT * max(abs(count), abs(other), 1.0)


def run_for_counts(
    model: nn.Module,
    window: Window,
    take: tuple[Optional[int], bool],
    forward: Callable[[MicroBatch], Any],
    recovers: bool,
) -> None:
    """Run a window's forwards without gradients, for their counts, then put its images back.

    Args:
        take: arguments of :meth:`Window.take`.
        recovers: whether images that do not fit are run again in smaller pieces. An image that does
            not fit alone is left out. Training handles it later with stronger means.
    """
    images, across_batches = take

    def fits(micro_batch: MicroBatch) -> bool:
        try:
            forward(micro_batch)
        except Exception as e:
            if not (recovers and is_out_of_memory(e)):
                raise
            return False
        return True

    try:
        with without_traces(model):
            while (micro_batch := window.take(images, across_batches)) is not None:
                if fits(micro_batch):
                    continue
                release_memory(next(model.parameters()).device)
                if micro_batch.can_be_split:
                    images = micro_batch.num_images // 2
                    window.put_back()
                else:
                    fits(micro_batch)  # once more
    finally:
        window.start_over()
