# Copyright (c) the d2_memfit developers.
"""One check of losses: do images in parts have the gradient of one forward over all of them?

Three images of the job, resized to one size, run together and one by one. The third has no objects.
Values and gradients of each loss are compared. Random numbers do not depend on the batch, and there
is no dropout (:class:`_SameDraws`). What a forward changes in the model stays for the next part, as
in training. The weights are moved a little, because heads that start at zero, or teachers that
start as their student, hide what later differs. Afterwards the model is as before.
"""

import copy
import logging
import math
import random
import re
import time
import zlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any, Optional

import numpy as np
import torch
import torch.nn.functional as F
from detectron2.utils import comm
from detectron2.utils.events import EventStorage, get_event_storage
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.overrides import TorchFunctionMode
from tqdm import tqdm

from ..common.random_state import RandomState
from ..common.snapshot import Snapshot, plain_attributes
from ..compat.pytorch import BatchNorm, compiled_frames, forget_compiled
from ..errors import ConfigError, one_line
from ..job import resize_to, size_of
from ..memory import is_out_of_memory, release_memory
from .collectives import IMAGES, OBJECTS, Collective, Numbers, Site, added, is_same
from .window import MicroBatch, count_objects

__all__ = ["LIMIT", "LossReport", "check_losses", "log"]

logger = logging.getLogger(__name__)

HELP = "docs/ACCUMULATION.md#a-loss-that-is-off"
LIMIT = 1e-3  # relative distance of a gradient that is right
LIMIT_OF_16_BITS = 0.05  # the same under autocast
_SMALL = 1e-5  # of the gradient of all losses; smaller gradients are compared with this
_ROUNDING = 2e-5  # distance of all losses together for which each is right
_DIVIDED = 0.75  # a loss that is divided by a count is about halved if the count is doubled
_MOST_FORWARDS = 24  # images through the model
_MOST_PIXELS = 2**17  # of the images together
_ESTIMATED = 0.2  # what a running mean that is estimated within a window may be off
_ELEMENTS = 2**20
_MOST_TEXT = 1000  # of an object of the project's own
_MOST_SITES = 3  # that are tried one by one
_LEAVE = "Return the losses, and leave backward and step to the trainer"
_FEW = 16  # numbers in a sum over ranks that are counts in any case; more may be statistics
# The functions at import: other contexts may replace them later.
_RANDPERM = torch.randperm
_DRAWS = (
    *(_RANDPERM, torch.bernoulli, torch.rand, torch.rand_like, torch.randint, torch.randint_like),
    *(torch.randn, torch.randn_like, torch.Tensor.bernoulli_, torch.Tensor.normal_),
    *(torch.Tensor.uniform_, torch.Tensor.exponential_),
)
_DROPOUT = (F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout)


@dataclass
class LossReport:
    """Result of the check. Plain data: all ranks and checkpoints get it.

    Attributes:
        counts: sites that are answered with the window's counts.
        weights: "sum" or "objects" for losses that are not weighted by images.
        estimates: whether a loss is divided by a running mean, estimated within a window.
        pretends: whether one rank is told of a second one, so that it adds up its counts.
        names: of the losses that the check has seen and that were not zero.
        off: the relative distance of the gradient of each loss that is off.
        unchecked: why a loss, or all ("losses"), could not be checked.
        changed: names of what a forward changes in the model.
        counters: those of numbers that grow by one with each forward.
        collective: a collective that is not a count, as text.
        forwards, seconds: cost of the check.
        seen: the counts of its images, one by one.
    """

    counts: list[Site] = field(default_factory=list)
    weights: dict[str, str] = field(default_factory=dict)
    estimates: bool = False
    pretends: bool = False
    names: list[str] = field(default_factory=list)
    off: dict[str, float] = field(default_factory=dict)
    unchecked: dict[str, str] = field(default_factory=dict)
    changed: list[str] = field(default_factory=list)
    counters: list[str] = field(default_factory=list)
    collective: str = ""
    forwards: int = 0
    seconds: float = 0.0
    seen: list[Numbers] = field(default_factory=list)

    @property
    def is_answered(self) -> bool:
        """Whether losses are weighted by more than images."""
        return bool(self.counts or self.weights or self.estimates)

    def changed_weights(self, model: nn.Module) -> list[nn.Parameter]:
        """Parameters that a forward changes, such as a teacher's."""
        root = type(model).__name__
        named = model.named_parameters()
        return [p for n, p in named if {n, f"{root}.{n}"} & {*self.changed}]

    def __str__(self) -> str:
        exact = [k for k in self.names if k not in self.off and k not in self.unchecked]
        lines = [f"like one forward over all images: {', '.join(exact)}"] if exact else []
        for why in dict.fromkeys(self.unchecked.values()):
            names = [k for k, w in self.unchecked.items() if w == why]
            lines.append(f"not checked: {', '.join(names)} ({why})")
        if self.changed:
            lines.append(f"each forward changes {', '.join(self.changed)}")
        return f"in {self.forwards} forwards, {self.seconds:.2g} s: {'; '.join(lines)}"

    def complaints(self) -> list[str]:
        """A line for each criterion that is off, or for a check that failed."""
        why = self.unchecked.get("losses")
        lines = [f"the losses of micro-batches are not checked: {why}. See {HELP}"] if why else []
        for distance in dict.fromkeys(self.off.values()):
            names = ", ".join(k for k, d in self.off.items() if d == distance)
            by = f"{distance:.2g} of the gradient" if math.isfinite(distance) else "not finite"
            lines.append(f"{names}: {by} off in micro-batches. See {HELP}")
        return lines

    def after(self, earlier: "LossReport") -> "LossReport":
        """This report, with an earlier one's for losses that are zero in this one."""
        weights = {k: w for k, w in earlier.weights.items() if k not in self.names}
        names = [*dict.fromkeys([*earlier.names, *self.names])]
        counts = [*dict.fromkeys([*earlier.counts, *self.counts])]
        return replace(self, counts=counts, names=names, weights={**weights, **self.weights})


def check_losses(
    model: nn.Module,
    losses: Callable[[nn.Module, Any], Mapping[str, torch.Tensor]],
    answers: Callable[..., Any],
    patterns: Optional[Sequence[Sequence[str]]],
    limit: float,
    images: Sequence[Any],
    most_images: float = math.inf,
) -> LossReport:
    """Check the losses of a job with three of its images. The model is then as before.

    Args:
        losses: called as ``losses(model, batch)``.
        answers: makes the ``Answers`` that stand around a forward.
        patterns: of MEMFIT.NORMALIZERS.LOSSES; None: no counts are answered.
        limit: relative distance of a gradient that is right.
        images: the images of a window.
        most_images: images of a micro-batch. Those of the check have at most as many pixels.

    Raises:
        ConfigError: the losses cannot be trained on, or a pattern matches none.
    """
    found = LossReport(unchecked={"losses": "batches cannot be cut into images"})
    height, width = size_of(list(images))
    settings = losses, answers, patterns, limit
    pixels = min(max(height * width, 1) * most_images, _MOST_PIXELS) / 3
    for with_empty, share in ((True, 1), (False, 1), (False, 4)) if images else ():
        release_memory(next(model.parameters()).device)
        start, check = Snapshot(model, model.parameters()), _Check(model, *settings)
        no_step = register_optimizer_step_pre_hook(_refuse_step)
        try:
            return check.report(_chosen(images, with_empty, pixels / share))
        except ConfigError:
            raise
        except Exception as e:  # of the model's code. Its traceback would keep its tensors
            why = "memory ran out" if is_out_of_memory(e) else f"{type(e).__name__}: {one_line(e)}"
        finally:
            no_step.remove()
            start.restore()
            model.zero_grad(set_to_none=True)
        found.changed, found.counters = check.found.changed, check.found.counters
        found.unchecked["losses"] = why
    return found


class _Run:
    """Forwards of one run, weighted by their images.

    Attributes:
        values: of the losses.
        gradients: the gradient of each group of losses.
        counts: of each forward.
        has_drawn: whether random numbers were drawn.
        estimates: whether a running mean of windows was asked for.
        nearly: losses of Detectron2's heads, for which images are nearly the right weights.
    """

    def __init__(self) -> None:
        self.values: dict[str, float] = {}
        self.gradients: list[Any] = []
        self.counts: list[Numbers] = []
        self.nearly: set[str] = set()
        self.has_drawn = self.estimates = False

    def off(self, whole: "_Run") -> list[str]:
        """Losses whose value differs from that of the images together."""
        pairs = [(k, v, self.values.get(k, 0.0)) for k, v in whole.values.items()]
        return [k for k, v, own in pairs if not abs(own - v) <= LIMIT * abs(v)]

    def distance(self, whole: "_Run", i: int = 0, least: float = 0.0) -> float:
        """Relative distance of the gradient of a group from that of the images together."""
        off = float((self.gradients[i] - whole.gradients[i]).norm())
        scale = max(float(whole.gradients[i].norm()), least)
        return off / (scale or 1e-30) if math.isfinite(off + scale) else math.inf


class _Check:
    def __init__(self, model: nn.Module, *settings: Any) -> None:
        self._model = model
        self._losses, self._answers, self._patterns, self._limit = settings
        self._may_pretend = comm.get_world_size() == 1 and self._patterns is not None
        self._trained = [p for p in model.parameters() if p.requires_grad]
        self._state: Optional[Snapshot] = None
        self.found = LossReport()
        self._totals: Numbers = {}  # the counts of the images together
        self._names: list[str] = []
        self._forwards = 0
        self._progress = tqdm(total=_MOST_FORWARDS, disable=None, leave=False)

    def report(self, images: Sequence[Any]) -> LossReport:
        """Run the check."""
        self._together, self._apart = [images], [[image] for image in images]
        forget_compiled()
        began, compiled = time.perf_counter(), compiled_frames()
        generator = torch.Generator().manual_seed(0)
        for p in self._trained:
            noise = torch.randn(p.shape, generator=generator).to(p)
            p.data.add_(noise * (0.01 * p.data.square().mean().sqrt() + 1e-4))
        before = state_of(self._model)
        found = self._first_forward()
        found.changed, found.counters = changed_by_forward(before, state_of(self._model))
        seconds = 8 * (time.perf_counter() - began)
        logger.info("Checking how the losses add up: about %.2g s, once", seconds)
        if set(found.changed) - {*found.counters}:  # a queue fills
            self._run([*self._apart, *self._apart[:1]], found, backward=False)
        self._state = Snapshot(self._model, found.changed_weights(self._model))
        whole = self._run(self._together)
        if self._patterns is not None:
            self._find_counts()
        parts = self._run(self._apart, found)
        # The truth may be nearer.
        if found.pretends and self._has_left(3) and self._is_wrong(parts, whole):
            told = {k: w for k, w in found.weights.items() if w == "objects"}
            counts = [site for site in found.counts if site[0] != "sum"]
            truth = replace(found, pretends=False, counts=counts, weights=told)
            others = self._run(self._apart, truth)
            if _badness(others, whole) < _badness(parts, whole):
                self.found, parts = truth, others
        self._judge(whole, parts)
        found = self.found
        if compiled_frames() != compiled:
            why = "compiled code ran, whose counts are not seen"
            found.unchecked.update({k: why for k in found.names if k not in found.off})
        self._progress.close()
        return replace(found, forwards=self._forwards, seconds=time.perf_counter() - began)

    def _first_forward(self) -> LossReport:
        """Note the counts of the images together; on one rank, as if there was a second one."""
        for pretends in (True, False) if self._may_pretend else (False,):
            self.found.pretends = pretends
            start = Snapshot(self._model)
            try:
                run = self._run(self._together, self.found, backward=False)
                self._totals, self.found.estimates = run.counts[0], run.estimates
                break
            except Exception as e:  # code without a second rank may raise anything
                if isinstance(e, ConfigError) or is_out_of_memory(e) or not pretends:
                    raise
            start.restore()
        return self.found

    def _find_counts(self) -> None:
        """Find the counts that add up and change a loss, and the weights of losses."""
        found, totals = self.found, self._totals
        found.weights = {}
        sites = [s for s in totals if s not in (OBJECTS, IMAGES)]
        apart = self._run(self._apart, found, backward=False) if sites else _Run()
        found.seen, sums = apart.counts, added(apart.counts)
        # If images together have more counts than a single one, the model counts each image.
        for_itself = {site[:2] for site in sites if site not in sums}
        for site in sites:
            if site[:2] not in for_itself and is_same(totals[site], sums[site]):
                found.counts.append(site)
            elif site[0] == "sum" and len(totals[site]) > _FEW:
                found.collective = found.collective or "all_reduce in {}:{}".format(*site[1][0])

        def losses_with(changed: Numbers) -> dict[str, float]:
            self._totals = {**totals, **changed}
            run = self._run(self._apart[:1], found, backward=False)
            self._totals = totals
            return run.values

        asked = [site for site in found.counts if site[0] != "mean"]
        given = losses_with({}) if asked else {}
        for site in asked[:_MOST_SITES]:  # another value, in another ratio
            n = totals[site]
            has_any = apart.counts[0].get(site, n).any()
            if has_any and losses_with({site: n * torch.linspace(2, 3, len(n)) + 2}) == given:
                found.counts.remove(site)  # no loss depends on it
        of_ranks = [site for site in found.counts if site[0] == "sum"]
        halved = losses_with({s: 2 * totals[s] for s in of_ranks}) if of_ranks else given
        found.weights = {k: "sum" for k, v in given.items() if v and halved[k] / v < _DIVIDED}
        found.pretends &= bool(of_ranks)
        for pattern, kind in self._patterns:
            names = [name for name in self._names if fnmatchcase(name, pattern)]
            found.weights.update(dict.fromkeys(names, kind))
            if not names:
                raise ConfigError(
                    f"MEMFIT.NORMALIZERS.LOSSES: no loss matches {pattern!r}. The model's losses "
                    f"are {', '.join(self._names)}"
                )

    def _has_left(self, forwards: int) -> bool:
        return self._forwards + forwards <= _MOST_FORWARDS

    def _is_wrong(self, parts: _Run, whole: _Run) -> bool:
        return parts.distance(whole) > _ROUNDING or bool(parts.off(whole))

    def _judge(self, whole: _Run, parts: _Run) -> None:
        """Find the losses that are off: layers of one criterion together, right and wrong apart."""
        found, values, off = self.found, whole.values, parts.off(whole)
        found.names = [k for k, v in values.items() if v != 0 or k in off]
        zero = "it is zero for these images"
        found.unchecked = {k: zero for k in values if k not in found.names}
        if not self._is_wrong(parts, whole):
            return
        groups: dict[Any, list[str]] = {}
        for name in found.names:
            groups.setdefault((re.sub(r"\d+", "", name), name in off), []).append(name)
        least, names = _SMALL * float(whole.gradients[0].norm()), list(groups.values())
        has_drawn = whole.has_drawn or parts.has_drawn
        if self._has_left(9 if has_drawn else 6):
            whole = self._run(self._together, names=names)
            parts = self._run(self._apart, found, names)
        else:
            names = [off or found.names]
        other = None
        for i, of_group in enumerate(names):
            distance = parts.distance(whole, i, 0.0 if of_group[0] in off else least)
            noise, why = _ESTIMATED if found.estimates else 0.0, "the running mean of windows"
            if distance > self._limit and has_drawn and (other or self._has_left(3)):
                other = other or self._run(self._together, names=names, seed=1)
                noise, why = other.distance(whole, i, least), "random numbers"
            if distance > noise and set(of_group) <= parts.nearly:
                noise, why = math.inf, "the number of proposals or pixels"
            if self._limit < distance <= noise:
                why = f"{distance:.1g} off, as {why} may make it"
                found.unchecked.update(dict.fromkeys(of_group, why))
            elif distance > self._limit:
                found.off.update(dict.fromkeys(of_group, distance))

    def _run(
        self,
        groups: Sequence[Sequence[Any]],
        report: Optional[LossReport] = None,
        names: Sequence[Sequence[str]] = (),
        seed: int = 0,
        backward: bool = True,
    ) -> _Run:
        """Run groups of images, one forward and backward each.

        Args:
            report: how the losses are weighted; None: by images, and nothing is answered.
            names: groups of losses, whose gradients are computed one by one.
        """
        if self._state is not None:
            self._state.restore()
        number = sum(map(len, self._apart))
        known = {*report.counts, OBJECTS} if report else ()
        totals = {s: n for s, n in self._totals.items() if s in known}
        report, images = report or LossReport(), (number, number) if totals else (0, 0)
        scale = 1 if self._limit == LIMIT else 1024  # gradients of 16 bits may be too small
        answers, run = self._answers(self._answer, report, totals, images), _Run()
        for module in self._model.modules():
            if isinstance(module, nn.MultiheadAttention):
                module.dropout = 0.0
        # On the CPU, oneDNN would keep 30 MB of code for each new size of images.
        flags = torch.backends.mkldnn.flags(enabled=False, allow_tf32=None)
        with (
            EventStorage(get_event_storage().iter),
            flags,
            torch.enable_grad(),
        ):
            for group in groups:
                micro_batch = MicroBatch(copy.deepcopy(group))  # models may change images
                with _SameDraws(seed) as draws, answers.around(micro_batch):
                    before = RandomState(self._trained[0].device)
                    losses = answers.weighted(self._checked(micro_batch.batch))
                    is_same = before.draws_the_same(RandomState(self._trained[0].device))
                run.has_drawn |= draws.has_drawn or not is_same
                share, self._names = len(group) / number, list(losses)
                for name, loss in losses.items():
                    run.values[name] = run.values.get(name, 0.0) + share * float(loss.detach())
                for i, of_group in enumerate((names or [self._names]) if backward else ()):
                    total: Any = sum(losses[k] for k in of_group if k in losses) * share * scale
                    if isinstance(total, torch.Tensor) and total.requires_grad:
                        with _SameDraws(seed), answers.around(micro_batch, replays=True):
                            total.backward(retain_graph=i + 1 < len(names))
                    run.gradients += [0.0] * (i + 1 - len(run.gradients))
                    run.gradients[i] += gradient_of(self._trained)
                    self._model.zero_grad(set_to_none=True)
                self._progress.update(len(group))
                self._forwards += len(group)
        run.counts = [added([noted]) for noted in answers.noted]
        run.estimates, run.nearly = answers.estimates, answers.nearly
        return run

    def _answer(self, call: Collective) -> bool:
        if call.num_ranks > 1:
            self.found.collective = self.found.collective or str(call)
            if not call.run_alone():
                raise NotImplementedError(f"it communicates, {call}")
        return call.num_ranks > 1

    def _checked(self, batch: Any) -> Mapping[str, torch.Tensor]:
        losses = self._losses(self._model, batch)
        if not isinstance(losses, Mapping):
            name = type(losses).__name__
            raise ConfigError(f"the model must return a loss or a dict of losses, got a {name}")
        for name, loss in losses.items():
            if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
                got = list(getattr(loss, "shape", [type(loss).__name__]))
                raise ConfigError(f"{name} must be a tensor with one number, got {got}")
        if any(p.grad is not None for p in self._trained):
            raise ConfigError(
                f"the model's forward or loss_fn calls backward() by itself. {_LEAVE}"
            )
        return losses


def _refuse_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    step = f"{type(optimizer).__name__}.step"
    raise ConfigError(f"the model's forward or loss_fn steps by itself ({step}). {_LEAVE}")


def _badness(parts: _Run, whole: _Run) -> tuple[int, float]:
    # In the gradient of all losses, one loss may hide others. So losses are counted first.
    return len(parts.off(whole)), parts.distance(whole)


def log(report: LossReport, earlier: LossReport, forwards: int) -> None:
    """Log the result. Warnings of an earlier report do not come again.

    Args:
        forwards: micro-batches of an iteration.
    """
    logger.info("Losses of micro-batches, checked %s", report)
    new = {k: d for k, d in report.off.items() if k not in earlier.off}
    for line in replace(report, off=new).complaints():
        logger.warning("%s", line)
    for name in [k for k in report.counters if k not in earlier.counters]:
        logger.warning(
            "%s counts forwards, %d times per iteration with accumulation. What depends on it, "
            "such as a warm-up, comes earlier by that factor: lengthen it",
            *(name, forwards),
        )


def gradient_of(parameters: Sequence[nn.Parameter]) -> torch.Tensor:
    """The gradient: every n-th element of each parameter's, about a million in all."""
    step = -(-sum(p.numel() for p in parameters) // _ELEMENTS)
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad.to_dense() for p in parameters]
    return torch.cat([gradient.flatten()[::step] for gradient in gradients])


def state_of(model: nn.Module) -> dict[str, Any]:
    """Everything in the model that may change, by name: a number, or one that differs after a
    change.
    """
    state: dict[str, Any] = {}
    for path, part in model.named_modules():
        if not isinstance(part, BatchNorm):  # its statistics are not read in training
            tensors = [*part.named_buffers(recurse=False), *part.named_parameters(recurse=False)]
            for name, value in [*plain_attributes(part), *tensors]:
                state[f"{path or type(model).__name__}.{name}"] = _print_of(value)
    return state


def _print_of(value: Any, depth: int = 3) -> Any:
    if isinstance(value, (torch.Tensor, np.ndarray)):
        tensor = torch.as_tensor(value).detach().to_dense()
        if tensor.numel() == 1:
            return tensor.item()
        return zlib.crc32(tensor.cpu().contiguous().view(torch.uint8).numpy().tobytes())
    value = list(value.items()) if isinstance(value, Mapping) else value
    if depth and isinstance(value, (list, tuple, deque)):
        return [_print_of(v, depth - 1) for v in value]
    is_plain = isinstance(value, (bool, int, float, str, type(None)))
    return value if is_plain else re.sub(r" at 0x[0-9a-f]+", "", repr(value)[:_MOST_TEXT])


def changed_by_forward(
    before: Mapping[str, Any], after: Mapping[str, Any]
) -> tuple[list[str], list[str]]:
    """Names of what has changed, and of the numbers that have grown by one."""
    changed = [name for name, value in after.items() if before.get(name, value) != value]
    pairs = [(name, before[name], after[name]) for name in changed]
    return changed, [k for k, old, new in pairs if type(old) in (int, float) and new == old + 1]


def _chosen(images: Sequence[Any], with_empty: bool, pixels: float) -> list[Any]:
    """Three images of one size: the most crowded one, one with a third of its objects, one without.

    Args:
        with_empty: whether the third one has no objects.
        pixels: of an image, at most.
    """
    crowded, *others = sorted(images, key=count_objects, reverse=True)
    chosen = [crowded, *(others or [crowded])[:1], *(others or [crowded])[-1:]]
    height, width = size_of(crowded)
    factor = min(math.sqrt(pixels / max(height * width, 1)), 1.0)
    size = max(round(height * factor), 1), max(round(width * factor), 1)
    most = count_objects(crowded)
    for i, objects in enumerate((most, max(most // 3, 1), 0 if with_empty else max(most // 2, 1))):
        if isinstance(chosen[i], dict) and "image" in chosen[i]:
            chosen[i] = resize_to(chosen[i], size)
            if "instances" in chosen[i]:
                chosen[i]["instances"] = chosen[i]["instances"][:objects]
    return chosen


class _SameDraws(TorchFunctionMode):
    """Random numbers that do not depend on earlier ones or on the batch, and no dropout.

    All rows of a random tensor have the same numbers: those of an object are the same in every
    batch.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.has_drawn = False
        self._seed = seed

    def __enter__(self) -> Any:
        self._draw_again()
        return super().__enter__()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _DROPOUT:
            return args[0] if args else kwargs["input"]
        if func not in _DRAWS:
            return func(*args, **kwargs)
        self.has_drawn = True
        self._draw_again()
        drawn = func(*args, **kwargs)
        if func is _RANDPERM:  # of the anchors or proposals of an image
            return drawn.copy_(torch.arange(len(drawn)).roll(self._seed * len(drawn) // 3))
        if drawn.dim() > 0 and len(drawn) > 0:
            drawn.detach().copy_(drawn[:1].clone().expand_as(drawn))
        return drawn

    def _draw_again(self) -> None:
        random.seed(self._seed)
        np.random.seed(self._seed)
        torch.manual_seed(self._seed)
