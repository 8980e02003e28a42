# Copyright (c) the d2_memfit developers.
"""What losses are divided by: counts of the whole window, in place of those of a micro-batch.

Micro-batches are weighted by their images, which is right for a loss that is a mean over images. A
loss that is divided by a number of objects needs the number of the whole window. A model declares
it by adding it up over ranks, by :func:`window_count`, or by a weighted ``F.cross_entropy``. A
window's counts are taken first, from the annotations or in a forward without gradients. Then each
micro-batch gets them as answers.
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, Optional, TypeVar, Union

import torch
import torch.distributed as dist
from detectron2.utils import comm
from detectron2.utils.events import EventStorage, get_event_storage
from torch import nn

from ..common.snapshot import Snapshot
from ..errors import ConfigError, OutOfMemoryError
from ..memory import error_line, is_out_of_memory
from ..settings import NormalizerOptions
from . import collectives
from .attempts import run_to_count
from .collectives import Collective, place_of_caller
from .loss_check import LIMIT, LossReport, Numbers, Site, added, check_losses, log_report
from .window import Cutter, MicroBatch, Window, count_objects, may_have_objects

__all__ = ["Answers", "Counts", "window_count"]

logger = logging.getLogger(__name__)

Number = TypeVar("Number", float, torch.Tensor)

_FEW = 16  # numbers in a sum over ranks that are taken for counts, if they do not add up
_MOST_CHECKS = 3
_SAME = 1e-5  # relative; weights of classes are float32
_ENOUGH, _MOST_KEPT = 4, 64  # forwards from which a formula is taken

OBJECTS: Site = ("objects", (), 0)
IMAGES: Site = ("images", (), 0)
_ZERO = torch.zeros(1, dtype=torch.float64)


def window_count(count: Number, minimum: float = 1.0) -> Number:
    """Divisor for a loss that is a sum over objects, positives, or the like.

    Call it in a criterion, once in each forward for each count, in place of an ``all_reduce`` and a
    ``clamp``::

        num_boxes = window_count(sum(len(t["labels"]) for t in targets))
        loss = l1.sum() / num_boxes

    While an :class:`AccumulatingTrainer` accumulates, it returns this micro-batch's share of the
    count of all micro-batches of all ranks. The sum of their gradients is then the gradient of one
    forward over all images. Elsewhere it returns the mean over ranks, as the ``all_reduce`` did.

    Args:
        count: the count of the batch in this forward: a number, or a tensor, which stays on its
            device. A vector has the counts of several losses, or of classes.
        minimum: lower limit of the whole window's count.
    """
    if collectives.counts is not None:
        return collectives.counts.count(count, minimum)
    if isinstance(count, torch.Tensor):
        count = count.detach().float()
        if comm.get_world_size() > 1:
            count = count.clone()
            dist.all_reduce(count)
            count = count / comm.get_world_size()
        return count.clamp(min=minimum)
    return max(sum(comm.all_gather(count)) / comm.get_world_size(), minimum)


class Answers:
    """Notes the counts of forwards, and answers them with those of the window.

    A count without a total is answered with the forward's own, as if all ranks had the same.

    Args:
        model: the model that runs.
        on_other: handles collectives that are not counts.
        report: how the counts of the model are taken.
        totals: the window's counts, of all ranks.
        images: images behind ``totals``, and behind those of means.
        ranks: number of ranks that take part.
    """

    def __init__(
        self,
        model: nn.Module,
        on_other: Callable[[Collective], bool],
        report: LossReport,
        totals: Optional[Numbers] = None,
        images: tuple[float, float] = (0.0, 0.0),
        ranks: int = 1,
        is_exact: bool = False,
    ) -> None:
        self.noted: list[Numbers] = []  # of each forward
        self.estimates = False  # whether a running mean over windows was asked for
        self._model, self._on_other, self._report = model, on_other, report
        self._totals, self._images, self._ranks = totals or {}, images, ranks
        self._is_exact = is_exact
        self._own_images, self._calls = 0, Counter[Any]()

    @contextmanager
    def around(self, micro_batch: MicroBatch, replays: bool = False) -> Iterator[None]:
        """Answer in a micro-batch's forward, or in its backward (``replays``), which may compute
        parts of the forward again.
        """
        self._calls.clear()
        if not replays:
            self._own_images = micro_batch.num_images
            objects = torch.tensor([count_objects(micro_batch.data)])
            self.noted.append({OBJECTS: objects, IMAGES: torch.tensor([self._own_images])})
        with ExitStack() as stack:
            stack.enter_context(collectives.answering_counts(self))
            stack.enter_context(collectives.noticed_collectives(self._handle))
            stack.enter_context(collectives.cross_entropies_answered())
            stack.enter_context(collectives.means_answered(self._model, self._is_exact))
            if self._report.pretends:
                stack.enter_context(collectives.second_rank_pretended())
            yield

    @property
    def share(self) -> float:
        """Images of the running micro-batch over those of the window."""
        self.estimates = True
        return self._own_images / self._images[1] if self._images[1] else 1.0

    def count(self, own: Number, minimum: float) -> Number:
        """Answer :func:`window_count`: this forward's share of the window's count."""
        return self._answer("count", own, minimum, self._images[0])

    def factor(self, own: Number, minimum: float) -> Number:
        """Factor that makes a loss, a mean over ``own`` elements, the window's mean."""
        return _limited(own, minimum) / self._answer("mean", own, minimum, self._images[1])

    def weighted(self, losses: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The losses, so that the micro-batch's share of the images is the right weight of each."""
        share = self._own_images / self._images[0] if self._images[0] else 1.0
        factors = {"sum": 1 / (share * self._ranks), "objects": 1.0}
        if OBJECTS in self._totals:  # a batch without any object is divided by 1
            own, whole = float(self.noted[-1][OBJECTS]), float(self._totals[OBJECTS])
            factors["objects"] = max(own, 1.0) / (max(whole, 1.0) * share)
        weights = self._report.weights
        return {k: v * factors[weights[k]] if k in weights else v for k, v in losses.items()}

    def _answer(self, kind: str, own: Number, minimum: float, images: float) -> Number:
        site = self._note(kind, own)
        if site not in self._totals:
            return _limited(own, minimum)
        answer = self._totals[site].clamp(min=minimum) * (self._own_images / images)
        if isinstance(own, torch.Tensor):
            dtype = own.dtype if own.is_floating_point() else torch.float32
            return answer.reshape(own.shape).to(own.device, dtype)
        return answer.item()

    def _handle(self, call: Collective) -> bool:
        if not call.is_count:
            return self._on_other(call)
        tensor = call.tensors[0].detach()
        site = self._note("sum", tensor)
        if site in self._totals:
            answer = self._totals[site] / self._ranks * (call.scale or 1)
            answer = answer if tensor.is_floating_point() else answer.round()
            tensor.copy_(answer.reshape(tensor.shape))
            return True
        if self._ranks > 1 and tensor.numel() > _FEW:
            return self._on_other(call)
        return call.run_alone()

    def _note(self, kind: str, value: Any) -> Site:
        place = place_of_caller()
        site = (kind, place, self._calls[kind, place])
        self._calls[kind, place] += 1
        self.noted[-1][site] = torch.as_tensor(value).detach().clone()
        return site


def _limited(own: Number, minimum: float) -> Number:
    if isinstance(own, torch.Tensor):
        return own.detach().float().clamp(min=minimum)
    return max(own, minimum)


class Counts:
    """Weights the losses of a trainer's windows, by images or by counts.

    Args:
        model: without DDP around it.
        losses: called as ``losses(model, batch)``, under the training's autocast.
        options: which counts are taken over the window.
        recovers: whether each rank may run images again on its own.
        cutter: cuts the trainer's windows.
        is_accumulating: whether a window has several of the loader's batches.
        limit: relative distance of a gradient that is right.

    Attributes:
        report: the result of the check of the losses.
        communicates: the model's first collective that is not a count, as text.
        is_one_piece: whether the window is one micro-batch, which needs counts only if it is cut.
    """

    def __init__(
        self,
        model: nn.Module,
        losses: Callable[[nn.Module, Any], Mapping[str, torch.Tensor]],
        options: NormalizerOptions,
        recovers: bool,
        cutter: Cutter,
        is_accumulating: bool,
        limit: float = LIMIT,
    ) -> None:
        self.report = LossReport()
        self.communicates = ""
        self.is_one_piece = False
        self._model, self._losses, self._options = model, losses, options
        self._recovers, self._cutter = recovers, cutter
        self._is_whole = not is_accumulating and not cutter.is_configured
        self._limit = limit
        self._ranks = comm.get_world_size()
        self._is_on = options.policy != "off"
        self._is_exact = options.policy == "exact"
        self._answers: Optional[Answers] = None  # None: nothing stands around the model
        self._checks_left = _MOST_CHECKS if self._is_on else 0
        self._is_due = self._is_on
        self._seen: dict[str, list[torch.Tensor]] = {}  # losses that were not in the check
        self._counters: list[str] = []  # that were not named yet
        self._formulas: dict[Site, tuple[float, ...]] = {}  # per object and image; () if none holds
        self._history: list[Numbers] = []

    @property
    def may_recover(self) -> bool:
        """Whether a rank may run a forward again after an out-of-memory error."""
        return self._recovers and not self.communicates

    def prepare(self, window: Window, forward: Callable[..., Any]) -> None:
        """Find the counts of a window, before its first forward. All ranks call it.

        Args:
            forward: the trainer's forward of a micro-batch.

        Raises:
            ConfigError: on every rank, if the model cannot be trained with these options.
            OutOfMemoryError: on every rank, if one rank has no memory to count.
        """
        self._learn()
        self._answers = self._new_answers() if self._ranks > 1 else None
        self.is_one_piece = False
        is_due = self._checks_left > 0 and any(comm.all_gather(self._is_due))
        if not (is_due or self.report.is_answered or self.communicates):
            return
        window.load_all()
        may_have = is_due and may_have_objects(window.images_waiting)
        while self._cutter.take(window) is not None:
            pass
        sizes = [m.num_images for m in window.micro_batches]
        objects = sum(count_objects(m.data) for m in window.micro_batches)
        window.put_all_back()
        own = added([{IMAGES: sum(sizes), OBJECTS: objects}])
        rows = comm.all_gather((objects, len(sizes), may_have))
        numbers = [n for _, n, _ in rows]
        if is_due and (max(numbers) > 1 or (self._recovers and self._ranks > 1)):
            self._check(window, [o for o, _, _ in rows], any(m for _, _, m in rows), max(sizes))
        self.is_one_piece = self._ranks == 1 and len(sizes) == 1
        if self.is_one_piece:  # the forward's own counts are those of the window
            return
        for name in self._counters if max(numbers) > 1 else ():
            logger.warning(
                "%s counts forwards, %d times per iteration with accumulation. What depends on "
                "it, such as a warm-up, comes earlier by that factor: lengthen it",
                name,
                max(numbers),
            )
        self._counters = []
        if self.communicates and len(set(numbers)) > 1:
            raise ConfigError(
                f"the model communicates in its forward, {self.communicates}, so all ranks need "
                f"the same number of micro-batches, and they have {numbers}. Give all ranks the "
                "same number of images, or train without that, such as with MODEL.*.NORM GN in "
                "place of SyncBN"
            )
        if self.report.is_answered:
            self._answers = self._new_answers(*self._totals(window, forward, own))

    def around(self, micro_batch: MicroBatch, replays: bool = False) -> AbstractContextManager[Any]:
        """Count during a micro-batch's forward, and again (``replays``) during its backward."""
        return self._answers.around(micro_batch, replays) if self._answers else nullcontext()

    def weighted(self, losses: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """The losses, so that the micro-batch's share of the images is the right weight of each."""
        for name in losses.keys() - self.report.names:
            self._seen.setdefault(name, []).append(losses[name].detach())
        return self._answers.weighted(losses) if self._answers else losses

    def state_dict(self) -> dict[str, Any]:
        """What was found, in plain types, for a resumed run; empty before the check."""
        if not self.report.names:
            return {}
        formulas = list(self._formulas.items())
        state = {"is_due": self._is_due, "checks_left": self._checks_left, "formulas": formulas}
        return {**state, "options": self._plain_options, "report": vars(self.report)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Use what a checkpoint has, if it belongs to the same options."""
        if self._is_on and state.get("options") == self._plain_options:
            self.report = LossReport(**state["report"])
            self._formulas = dict(state["formulas"])
            self._is_due, self._checks_left = state["is_due"], state["checks_left"]

    def _check(
        self, window: Window, objects: Sequence[int], may_have_objects: bool, largest: int
    ) -> None:
        """Check the losses with the images of the rank with the most objects, for all ranks."""
        if may_have_objects and not any(objects) and self.report.names:
            return  # these images tell little
        self._is_due = may_have_objects and not any(objects)
        self._checks_left -= not self._is_due
        tester = objects.index(max(objects))
        found: Union[LossReport, str, None] = None
        if comm.get_rank() == tester:
            try:
                found = check_losses(
                    self._model,
                    self._losses,
                    window.images_waiting,
                    partial(Answers, self._model, is_exact=self._is_exact),
                    self._options.losses,
                    largest,
                    self._ranks == 1,
                    self._limit,
                )
            except ConfigError as e:
                found = str(e)
        report = comm.all_gather(found)[tester]
        if isinstance(report, str):
            raise ConfigError(report)
        if report.collective and self._ranks > 1:
            self._allow(report.collective)
        log_report(report, self.report.off)
        self._counters = [n for n in report.counters if n not in self.report.counters]
        for name in set(self.report.names) - {*report.names}:  # it is zero this time
            report.names.append(name)
            if name in self.report.weights:
                report.weights[name] = self.report.weights[name]
        report.counts += [s for s in self.report.counts if s not in report.counts]
        self.report = report

    def _totals(
        self, window: Window, forward: Callable[..., Any], own: Numbers
    ) -> tuple[Numbers, tuple[float, float]]:
        """The window's counts, and the images behind them and behind those of means."""
        error = ""
        counts = {site: self._by_formula(site, own) for site in self.report.counts}
        if any(count is None for count in counts.values()):
            may_recover = self.may_recover
            try:
                counts = self._counted(window, forward)
            except Exception as e:
                if not (may_recover and is_out_of_memory(e)):
                    raise
                error = error_line(e)
        errors, of_ranks = zip(*comm.all_gather((error, {**counts, **own})))
        if any(errors):
            raise OutOfMemoryError(
                "there was no memory to count what losses are divided by "
                f"({next(filter(None, errors))}). Lower MEMFIT.MICRO_BATCH, or set "
                "MEMFIT.NORMALIZERS.POLICY off"
            )
        everywhere = added(of_ranks)
        # If no batches are accumulated, each rank has its own mean, as in Detectron2.
        of_means = {**counts, **own} if self._is_whole else everywhere
        sites = {*self.report.counts, OBJECTS}
        totals = {s: (of_means if s[0] == "mean" else everywhere).get(s, _ZERO) for s in sites}
        return totals, (everywhere[IMAGES].item(), of_means[IMAGES].item())

    def _counted(self, window: Window, forward: Callable[..., Any]) -> Numbers:
        """This rank's counts, by a forward of all images without gradients."""
        report = LossReport(pretends=self.report.pretends)
        self._answers = Answers(self._model, _run_alone, report, is_exact=self._is_exact)
        named = self._model.named_parameters()
        before = Snapshot(self._model, [p for n, p in named if n in self.report.changed])
        try:
            with torch.no_grad(), EventStorage(get_event_storage().iter):
                run_to_count(self._model, window, self._cutter, forward, self.may_recover)
        finally:
            before.restore()
        each = [added([noted]) for noted in self._answers.noted]
        self._history = [*self._history, *each][-_MOST_KEPT:]
        for site in set(self.report.counts) - self._formulas.keys():
            formula = formula_of(site, self._history)
            if formula is not None:
                self._formulas[site] = formula
        return added(each)

    def _learn(self) -> None:
        """Compare the last window's counts with the formulas, and look for new losses."""
        broken = set()
        for noted in self._answers.noted if self._answers and self._formulas else ():
            counts = added([noted])
            broken |= {
                site
                for site in self.report.counts
                if (told := self._by_formula(site, counts)) is not None
                and not torch.allclose(told, counts.get(site, _ZERO), rtol=_SAME, atol=_SAME)
            }
        for site in broken:
            self._formulas[site] = ()
            logger.warning(
                "The count in %s:%d no longer follows from the annotations, so the losses of the "
                "last iteration were divided by another one. From now on it is counted by a "
                "forward of the whole window",
                *site[1][0],
            )
        if self.report.names:
            is_new = any(loss.item() for losses in self._seen.values() for loss in losses)
            self._is_due = self._checks_left > 0 and (self._is_due or is_new)
        self._seen = {}

    def _by_formula(self, site: Site, counts: Numbers) -> Optional[torch.Tensor]:
        formula = self._formulas.get(site)
        return formula[0] * counts[OBJECTS] + formula[1] * counts[IMAGES] if formula else None

    def _new_answers(
        self, totals: Optional[Numbers] = None, images: tuple[float, float] = (0.0, 0.0)
    ) -> Answers:
        report = self.report
        on_other = _run_alone if self._ranks == 1 else self._communicate
        return Answers(self._model, on_other, report, totals, images, self._ranks, self._is_exact)

    def _communicate(self, call: Collective) -> bool:
        """Let a collective that is not a count run: the other ranks make the same call."""
        if call.num_ranks > 1 and not self.communicates:
            self._allow(str(call))
        return False

    def _allow(self, call: str) -> None:
        if self._recovers and not self._cutter.is_configured:
            raise ConfigError(
                f"MEMFIT.OOM.POLICY split cannot run a rank's images again, because {call} "
                "communicates with other ranks in each forward. Train without it, such as with "
                "MODEL.*.NORM GN in place of SyncBN; or set MEMFIT.OOM.POLICY raise"
            )
        logger.warning(
            "The model communicates in its forward, %s. Each micro-batch communicates with one "
            "micro-batch of every other rank. If losses are divided by the result, use "
            "d2_memfit.window_count",
            call,
        )
        self.communicates = call
        self._cutter.forget()

    @property
    def _plain_options(self) -> dict[str, Any]:
        losses = [list(pair) for pair in self._options.losses]
        return {"policy": self._options.policy, "losses": losses}


def _run_alone(call: Collective) -> bool:
    return call.num_ranks > 1 and call.run_alone()


def formula_of(site: Site, each: Sequence[Numbers]) -> Optional[tuple[float, ...]]:
    """The numbers per object and per image that a count follows in forwards.

    Returns:
        None if these forwards tell too little, () if there are none.
    """
    known = torch.stack([torch.cat([n[OBJECTS], n[IMAGES]]) for n in each])
    own = [n.get(site, _ZERO) for n in each]
    if any(len(n) != 1 for n in own):
        return ()
    if len(each) < _ENOUGH or torch.linalg.matrix_rank(known) < 2:
        return None
    formula = torch.linalg.lstsq(known, torch.stack(own)).solution
    fits = torch.allclose(known @ formula, torch.stack(own), rtol=_SAME, atol=_SAME)
    return tuple(formula.flatten().tolist()) if fits else ()
