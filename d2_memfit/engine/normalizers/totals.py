# Copyright (c) the d2_memfit developers.
"""The counts of a window, before its first forward."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Optional

import numpy as np
from torch import nn

from ...memory import is_out_of_memory, release_memory
from ..window import MicroBatch, Window
from .answers import Noted, Site
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
    def through(cls, site: Site, noted: Sequence[Noted]) -> Optional["Rule"]:
        """The rule that explains a site's counts in some forwards; None if there is none."""
        known = np.array([(n.objects, n.images) for n in noted], dtype=float)
        counts = np.array([n.count(site) for n in noted])
        rule = cls(*np.linalg.lstsq(known, counts, rcond=None)[0].tolist())
        is_known = np.linalg.matrix_rank(known) == 2
        return rule if is_known and all(rule.explains(site, n) for n in noted) else None

    def predicted(self, noted: Noted) -> float:
        return self.per_object * noted.objects + self.per_image * noted.images

    def explains(self, site: Site, noted: Noted) -> bool:
        count = noted.count(site)
        other = self.predicted(noted)
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
    hopeless = None
    try:
        with without_traces(model):
            while (micro_batch := window.take(images, across_batches)) is not None:
                if _fits(micro_batch, forward, recovers):
                    continue
                release_memory(next(model.parameters()).device)
                if micro_batch.can_be_split:
                    images = micro_batch.num_images // 2
                if micro_batch.can_be_split or micro_batch.data is not hopeless:
                    hopeless = micro_batch.data  # if it fails once more
                    window.put_back()
    finally:
        window.start_over()


def _fits(micro_batch: MicroBatch, forward: Callable[[MicroBatch], Any], recovers: bool) -> bool:
    try:
        forward(micro_batch)
    except Exception as e:
        if not (recovers and is_out_of_memory(e)):
            raise
        return False
    return True
