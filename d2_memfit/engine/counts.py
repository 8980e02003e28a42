# Copyright (c) the d2_memfit developers.
"""What losses are divided by: counts of the whole window, in place of those of a micro-batch.

Micro-batches are weighted by their images, which is right for a loss that is a mean over images. A
loss that is divided by a number of objects needs the number of the whole window. A model declares
it by adding it up over ranks, by :func:`window_count`, or by a weighted ``F.cross_entropy``. A
window's counts are taken first, from the annotations or in a forward without gradients. Then each
micro-batch gets them as answers.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Optional

import torch
import torch.distributed as dist
from detectron2.utils import comm
from detectron2.utils.events import EventStorage, get_event_storage

from ..common import compat
from ..common.errors import ConfigError, OutOfMemoryError
from ..common.snapshot import Snapshot, weights_that_may_change
from ..config.settings import NormalizerOptions
from ..job import objects_in
from ..memory import error_line, is_out_of_memory
from . import collectives
from .collectives import IMAGES, OBJECTS, Answers, Collective, Number, Numbers, Site, added, is_same
from .loss_check import LIMIT, LIMIT_OF_16_BITS, check_losses
from .loss_report import LossReport
from .window import MicroBatch, Window, count_objects, dataset_dicts

logger = logging.getLogger(__name__)

_FORWARDS = 6  # from which a formula is taken
_ZERO = torch.zeros(1, dtype=torch.float64)


def window_count(count: Number, minimum: float = 1.0) -> Number:
    """Divisor for a loss that is a sum over objects, positives, or the like.

    Call it in a criterion, once in each forward for each count, in place of an ``all_reduce`` and a
    ``clamp``::

        num_boxes = window_count(sum(len(t["labels"]) for t in targets))
        loss = l1.sum() / num_boxes

    While an :class:`AccumulatingTrainer` accumulates, it returns this micro-batch's share of the
    count of all micro-batches of all ranks. The sum of their gradients is then the gradient of one
    forward over all images. Never clamp it: a share may be below 1. Elsewhere it returns the mean
    over ranks, as the ``all_reduce`` did.

    Args:
        count: the count of the batch in this forward: a number, or a tensor, which stays on its
            device. A vector has the counts of several losses, or of classes.
        minimum: lower limit of the whole window's count.
    """
    if collectives.counts is not None:
        return collectives.counts.count(count, minimum)
    if isinstance(count, torch.Tensor):
        count = count.detach().float().clone()
        if comm.get_world_size() > 1:
            dist.all_reduce(count)
        return (count / comm.get_world_size()).clamp(min=minimum)
    return max(sum(comm.all_gather(count)) / comm.get_world_size(), minimum)


class Counts:
    """Weights the losses of a trainer's windows, by images or by counts.

    Args:
        trainer: an ``AccumulatingTrainer``, whose cutter cuts the windows.
        options: which counts are taken over the window.

    Attributes:
        report: the result of the check of the losses.
        is_one_piece: whether the window is one micro-batch, which needs counts only if it is cut.
    """

    def __init__(self, trainer: Any, options: NormalizerOptions) -> None:
        self.report = LossReport()
        self.is_one_piece = False
        self._cutter, self._recovers = trainer.cutter, trainer.recovery is not None
        self._is_whole = trainer.accumulation_steps == 1 and not trainer.cutter.is_configured
        self._ranks = comm.get_world_size()
        self._options = repr(options)
        self._model = model = compat.without_ddp(trainer.model)
        on_other = self._communicate if self._ranks > 1 else Collective.run_alone
        self._new_answers = partial(Answers, model, options.policy == "exact", on_other)
        limit = LIMIT if trainer.precision.dtype == torch.float32 else LIMIT_OF_16_BITS
        self._test = partial(check_losses, model, trainer.losses_of, options=options, limit=limit)
        self._answers: Optional[Answers] = None  # None: nothing stands around the model
        self._is_due = options.policy != "off"  # whether the losses are still to be checked
        self._communicates = False  # whether a collective was warned of that is not a count
        self._history: list[Numbers] = []  # counts of forwards without gradients

    def prepare(self, window: Window, run_forwards: Callable[[], None]) -> None:
        """Find the counts of a window, before its first forward. All ranks call it.

        A window that was one piece, and is cut after an error, is prepared again.

        Args:
            run_forwards: runs the trainer's forwards of all micro-batches, and no backward.

        Raises:
            ConfigError: on every rank, if the model cannot be trained with these options.
            OutOfMemoryError: on every rank, if one rank has no memory to count.
        """
        self._compare_formulas()
        self._answers, self.is_one_piece = None, False
        if self._ranks > 1:
            self._answers = self._new_answers(LossReport(), ranks=self._ranks)
        if not (self._is_due or self._is_answered):
            return
        images = window.load_all()
        pieces = list(iter(partial(self._cutter.take, window), None))
        window.put_all_back()
        objects = sum(count_objects(m.data) for m in pieces)
        own = added([{IMAGES: sum(m.num_images for m in pieces), OBJECTS: objects}])
        if self._is_due:
            self._check(images, objects, len(pieces))
        self.is_one_piece = self._ranks == 1 and len(pieces) == 1
        if self._is_answered and not self.is_one_piece:  # one forward's are the window's
            totals = self._totals(window, run_forwards, own)
            self._answers = self._new_answers(self.report, *totals, self._ranks)

    @property
    def _is_answered(self) -> bool:
        """Whether losses are weighted by more than images."""
        return bool(self.report.counts or self.report.weights or self.report.estimates)

    def around(self, micro_batch: MicroBatch) -> AbstractContextManager[Any]:
        """Count during a micro-batch's forward and backward."""
        return self._answers.around(micro_batch) if self._answers else nullcontext()

    def weighted(self, losses: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """The losses, so that the micro-batch's share of the images is the right weight of each."""
        return self._answers.weighted(losses) if self._answers else losses

    def state_dict(self) -> dict[str, Any]:
        """What was found, in plain types, for a resumed run; empty before the check."""
        found = {"report": vars(self.report), "options": self._options}
        return found if self.report.names else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Use what a checkpoint has, if it belongs to the same options."""
        if state.get("options") == self._options:
            self.report, self._is_due = LossReport(**state["report"]), False

    def _check(self, images: Sequence[Any], objects: int, pieces: int) -> None:
        """Check the losses once, with the images of the rank with the most objects, for all."""
        is_empty = not objects and any(objects_in(i) is not None for i in dataset_dicts(images))
        of_ranks, numbers, are_empty = zip(*comm.all_gather((objects, pieces, is_empty)))
        is_cut = max(numbers) > 1 or (self._recovers and self._ranks > 1)
        if is_cut and not all(are_empty):
            self._is_due = False
            tester, error = of_ranks.index(max(of_ranks)), ""
            if comm.get_rank() == tester:
                try:
                    self.report = self._test(images)
                except ConfigError as e:
                    error = str(e)
            error, self.report = comm.all_gather((error, self.report))[tester]
            if error:
                raise ConfigError(error)
            logger.info("Losses of micro-batches, checked %s", self.report)
            for line in self.report.complaints():
                logger.warning("%s", line)

    def _totals(
        self, window: Window, run_forwards: Callable[[], None], own: Numbers
    ) -> tuple[Numbers, tuple[float, float]]:
        """The window's counts, and its images, of all ranks and of this one."""
        error, mine = "", {**self._by_formula(own), **own}
        if not mine.keys() >= {*self.report.counts}:
            try:
                mine.update(self._counted(window, run_forwards))
            except Exception as e:
                if not is_out_of_memory(e):
                    raise
                error = error_line(e)  # the other ranks wait for it
        errors, of_ranks = zip(*comm.all_gather((error, mine)))
        if any(errors):
            raise OutOfMemoryError(next(filter(None, errors)))
        totals = added(of_ranks)
        # Without micro-batches, each rank has its own means, as in Detectron2.
        for site in [s for s in mine if self._is_whole and s[0] == "mean"]:
            totals[site] = mine[site] * totals[IMAGES] / mine[IMAGES]
        images = totals[IMAGES].item(), mine[IMAGES].item()
        return {s: totals.get(s, _ZERO) for s in (*self.report.counts, OBJECTS)}, images

    def _counted(self, window: Window, run_forwards: Callable[[], None]) -> Numbers:
        """This rank's counts, by a forward of all images without gradients."""
        report = LossReport(simulates_ranks=self.report.simulates_ranks)
        self._answers = self._new_answers(report)
        before = Snapshot(self._model, weights_that_may_change(self._model))
        try:
            with torch.no_grad(), EventStorage(get_event_storage().iter):
                run_forwards()
        finally:
            before.restore()
            window.put_all_back()
        each = [added([noted]) for noted in self._answers.noted]
        self._history = [*self._history, *each][-16 * _FORWARDS :]
        for site in set(self.report.counts) - self.report.formulas.keys():
            self.report.formulas.update(_formula_of(site, self._history))
        return added(each)

    def _compare_formulas(self) -> None:
        """Compare the counts of the last window's forwards with the formulas."""
        for noted in self._answers.noted if self._answers and self.report.formulas else ():
            counts = added([noted])
            for site, count in self._by_formula(counts).items():
                if not is_same(count, counts.get(site, _ZERO)):
                    self.report.formulas[site] = ()
                    logger.warning("%s:%d no longer follows from annotations", *site[1][0])

    def _by_formula(self, counts: Numbers) -> Numbers:
        of_sites = [(s, f) for s, f in self.report.formulas.items() if f]
        return {s: f[0] * counts[OBJECTS] + f[1] * counts[IMAGES] for s, f in of_sites}

    def _communicate(self, call: Any) -> bool:
        """Let a collective that is not a count run: the other ranks make the same call."""
        if self._recovers:
            raise ConfigError(
                f"MEMFIT.OOM.POLICY split cannot run a rank's images again: {call} communicates. "
                "Use MODEL.*.NORM GN in place of SyncBN, or set MEMFIT.OOM.POLICY raise"
            )
        if not self._communicates:
            self._communicates = True
            text = f"The model communicates in its forward, {call}: ranks need as many pieces"
            logger.warning("%s. For counts that losses are divided by, use window_count", text)
        return False


def _formula_of(site: Site, each: Sequence[Numbers]) -> dict[Site, Sequence[float]]:
    """The numbers per object and per image that a count follows in forwards: none if it follows
    none, and nothing at all if these forwards tell too little.
    """
    known = torch.stack([torch.cat([n[OBJECTS], n[IMAGES]]) for n in each])
    own = [n.get(site, _ZERO) for n in each]
    if len(each) < _FORWARDS or torch.linalg.matrix_rank(known) < 2 or any(len(n) > 1 for n in own):
        return {}
    formula = torch.linalg.lstsq(known, torch.stack(own)).solution
    return {site: formula.flatten().tolist() if is_same(known @ formula, torch.stack(own)) else ()}
