# Copyright (c) the d2_memfit developers.
"""One check of losses: do images in parts have the gradient of one forward over all of them?

Three images of the job, resized to one size, run together and one by one. The third has no labels.
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
import traceback
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Optional

import numpy as np
import torch
import torch.nn.functional as F
from detectron2.structures import Instances
from detectron2.utils.events import EventStorage, get_event_storage
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.overrides import TorchFunctionMode
from tqdm import tqdm

from ..common.random_state import RandomState
from ..common.snapshot import Snapshot
from ..compat.pytorch import BatchNorm, buffers_by_name, compiled_frames
from ..errors import ConfigError, one_line
from ..job import resize_to, size_of
from ..memory import is_out_of_memory, release_memory
from ..techniques.support import plain_attributes
from .collectives import Place
from .window import MicroBatch, Row, count_objects

__all__ = ["LIMIT", "LossReport", "Numbers", "Site", "added", "check_losses", "log_report"]

logger = logging.getLogger(__name__)

# The kind of count ("sum" over ranks, "count" or "mean"), its place, and the number of the call
# there in one forward. Plain types, for checkpoints.
Site = tuple[str, Place, int]
Numbers = dict[Site, torch.Tensor]  # float64 on the host; a vector has a number for each class

HELP = "docs/ACCUMULATION.md#a-loss-that-is-off"
LIMIT = 1e-3  # relative distance of a gradient that is right
LIMIT_OF_16_BITS = 0.05  # the same under autocast to 16 bits
_ROUNDING = {torch.float64: 1e-9}  # of all losses together, for which each loss is right
_SMALL = 1e-5  # of the gradient of all losses; smaller gradients are compared with this
_DIVIDED = 0.75  # a loss that is divided by a count is about halved if the count is doubled
_MOST_FORWARDS = 24  # images through the model
_MOST_PIXELS = 2**17  # of the images together
_ESTIMATED = 0.2  # what a running mean that is estimated within a window may be off
_SKETCH = 4096
_FEW = 16  # numbers in a sum over ranks that are counts; more may be statistics
_KINDS = ("sum", "count", "mean")
_IGNORED = ("ignore_value", "ignore_index", "ignore_label")  # attributes of heads and criteria
_NOT_LABELS = ("image", "pixel_values", "pixel_mask", "proposals")  # fields of an image
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
        pretends: whether one rank is told of a second one, so that it adds up its counts.
        names: of the losses that the check has seen and that were not zero.
        off: the relative distance of the gradient of each loss that is off.
        unchecked: why a loss, or all ("losses"), could not be checked.
        changed: names of what a forward changes in the model.
        counters: those of numbers that grow by one with each forward.
        collective: a collective that is not a count, as text.
        forwards, seconds: cost of the check.
    """

    counts: list[Site] = field(default_factory=list)
    weights: dict[str, str] = field(default_factory=dict)
    pretends: bool = False
    names: list[str] = field(default_factory=list)
    off: dict[str, float] = field(default_factory=dict)
    unchecked: dict[str, str] = field(default_factory=dict)
    changed: list[str] = field(default_factory=list)
    counters: list[str] = field(default_factory=list)
    collective: str = ""
    forwards: int = 0
    seconds: float = 0.0

    @property
    def is_answered(self) -> bool:
        """Whether losses are weighted by more than images."""
        return bool(self.counts or self.weights)


def check_losses(
    model: nn.Module,
    losses: Callable[[nn.Module, Any], Mapping[str, torch.Tensor]],
    images: Sequence[Any],
    answers: Callable[..., Any],
    patterns: Sequence[Sequence[str]] = (),
    most_images: Optional[int] = None,
    is_alone: bool = True,
    limit: float = LIMIT,
) -> LossReport:
    """Check the losses of a job with three of its images. The model is then as before.

    Args:
        losses: called as ``losses(model, batch)``.
        images: the images of a window.
        answers: makes the ``Answers`` that stand around a forward, from a handler of collectives.
        patterns: of MEMFIT.NORMALIZERS.LOSSES.
        most_images: images of a micro-batch. Those of the check have at most as many pixels.
        is_alone: whether there is one rank, which may be told of a second one.
        limit: relative distance of a gradient that is right.

    Raises:
        ConfigError: the losses cannot be trained on, or are declared wrongly.
    """
    why = "" if images else "batches cannot be cut into images"
    for with_empty, share in ((True, 1), (False, 1), (True, 4), (False, 4)):
        if why == "memory ran out" and share == 1 or not images:
            continue
        height, width = size_of(list(images))
        most = min(height * width * (most_images or math.inf), _MOST_PIXELS) / 3 / share
        release_memory(next(model.parameters()).device)
        start = Snapshot(model, model.parameters())
        no_step = register_optimizer_step_pre_hook(_refuse_step)
        try:
            chosen = _chosen(images, model, with_empty, most)
            return _Check(model, losses, chosen, answers, patterns, limit).report(is_alone)
        except ConfigError:
            raise
        except Exception as e:  # of the model's code. Its traceback would keep its tensors
            why = "memory ran out" if is_out_of_memory(e) else _text_of(e)
        finally:
            no_step.remove()
            start.restore()
            model.zero_grad(set_to_none=True)
    return LossReport(unchecked={"losses": why})


@dataclass
class _Run:
    """Forwards of one run, weighted by their images.

    Attributes:
        values: of the losses.
        gradients: a sketch of the gradient of each group of losses.
        counts: of each forward.
        has_drawn: whether random numbers were drawn.
        estimates: whether a loss is divided by a running mean that is estimated within a window.
    """

    values: dict[str, float] = field(default_factory=dict)
    gradients: list[Any] = field(default_factory=list)
    counts: list[Numbers] = field(default_factory=list)
    has_drawn: bool = False
    estimates: bool = False

    def is_off(self, name: str, whole: "_Run") -> bool:
        """Whether the value of a loss differs from that of the images together."""
        value = whole.values.get(name, 0.0)
        return not abs(self.values.get(name, 0.0) - value) <= LIMIT * abs(value)

    def distance(self, whole: "_Run", i: int = 0, least: float = 0.0) -> float:
        """Relative distance of the gradient of a group from that of the images together."""
        off = float((self.gradients[i] - whole.gradients[i]).norm())
        scale = max(float(whole.gradients[i].norm()), least)
        if not math.isfinite(off + scale):
            return math.inf
        return off / scale if scale else (math.inf if off else 0.0)


class _Check:
    def __init__(
        self,
        model: nn.Module,
        losses: Callable[..., Any],
        images: Sequence[Any],
        answers: Callable[..., Any],
        patterns: Sequence[Sequence[str]],
        limit: float,
    ) -> None:
        self._model, self._losses, self._images = model, losses, images
        self._answers, self._patterns, self._limit = answers, patterns, limit
        self._together, self._apart = [list(images)], [[image] for image in images]
        self._trained = [p for p in model.parameters() if p.requires_grad]
        self._state: Optional[Snapshot] = None
        self._found = LossReport()
        self._progress: Any = None

    def report(self, is_alone: bool) -> LossReport:
        """Run the check."""
        began, compiled = time.perf_counter(), compiled_frames()
        generator = torch.Generator().manual_seed(0)
        for p in self._trained:
            noise = torch.randn(p.shape, generator=generator).to(p)
            p.data.add_(noise * (0.01 * p.data.square().mean().sqrt() + 1e-4))
        found, before = self._found, _state_of(self._model)
        told = self._told(is_alone)
        after = _state_of(self._model)
        found.changed = [k for k, v in after.items() if k in before and v != before[k]]
        found.counters = [k for k in found.changed if _number(after[k]) == _number(before[k]) + 1]
        seconds = 25 * (time.perf_counter() - began)
        logger.info("Checking how the losses add up: about %.2g s, once", seconds)
        self._progress = tqdm(total=_MOST_FORWARDS, disable=None, leave=False)
        named = self._model.named_parameters()
        self._state = Snapshot(self._model, [p for n, p in named if n in found.changed])
        whole = self._run(self._together)
        self._declared(told)
        found.pretends = any(site[0] == "sum" for site in found.counts)
        parts = self._parts(told)
        drops = replace(found, counts=[s for s in found.counts if s[0] != "sum"], pretends=False)
        drops.weights = {k: w for k, w in found.weights.items() if self._told_by_key(k)}
        if self._is_wrong(parts, whole) and drops.counts != found.counts:
            others = self._parts(told, drops)
            if self._badness(others, whole) < self._badness(parts, whole):
                self._found, parts = drops, others
        self._judge(whole, parts, told)
        found = self._found
        if compiled_frames() != compiled:
            why = "it was compiled, and its counts are not seen"
            found.unchecked.update({k: why for k in found.names if k not in found.off})
        self._progress.close()
        found.seconds = time.perf_counter() - began
        return found

    def _told(self, is_alone: bool) -> _Run:
        """A first forward, which notes the counts."""
        self._found.pretends = is_alone
        if is_alone:
            start = Snapshot(self._model, self._model.parameters())
            try:
                return self._run(self._together, self._found, has_gradient=False)
            except ConfigError:
                raise
            except Exception:  # code that needs another rank may raise anything
                start.restore()
        self._found.pretends = False
        return self._run(self._together, self._found, has_gradient=False)

    def _declared(self, told: _Run) -> None:
        """Find the counts that add up and change a loss, and the weights of losses."""
        found, names = self._found, list(told.values)
        sites = [s for s in told.counts[0] if s[0] in _KINDS]
        depends: dict[Site, set[str]] = {}
        if sites:
            apart = self._run(self._apart, found, has_gradient=False)
            sums = added(apart.counts)
            # If images together have more counts than a single one, the model counts each image.
            for_itself = {site[:2] for site in sites if site not in sums}
            for site in sites:
                total = told.counts[0][site]
                if site[:2] not in for_itself and _is_same(total, sums[site]):
                    found.counts.append(site)
                elif site[0] == "sum" and len(total) > _FEW:
                    found.collective = found.collective or "all_reduce in {}:{}".format(*site[1][0])
            asked = [s for s in found.counts if s[0] != "mean"]
            totals = {s: told.counts[0][s] for s in found.counts}

            def losses_with(changed: Numbers) -> dict[str, float]:
                return self._run(self._apart[:1], found, {**totals, **changed}, False).values

            given = losses_with({}) if asked else {}
            for site in asked:  # another value, in another ratio
                more = totals[site] * torch.linspace(2, 3, len(totals[site])) + 2
                changed = losses_with({site: more})
                depends[site] = {k for k in names if given.get(k) != changed.get(k)}
                if not depends[site] and apart.counts[0].get(site, totals[site]).any():
                    found.counts.remove(site)
                    if site[0] == "count":
                        raise ConfigError(
                            "window_count in {}:{}: no loss depends on what it returns. Divide the "
                            "loss by it, in the same forward".format(*site[1][0])
                        )
            doubled = {s: 2 * totals[s] for s in asked if s[0] == "sum" and s in found.counts}
            halved = losses_with(doubled) if doubled else given
            of_sums = set().union(*(depends[s] for s in doubled))
            found.weights = {
                k: "sum" for k in of_sums if given.get(k) and halved[k] / given[k] < _DIVIDED
            }
        for pattern, kind in self._patterns:
            matched = [name for name in names if fnmatchcase(name, pattern)]
            if not matched:
                raise ConfigError(
                    f"MEMFIT.NORMALIZERS.LOSSES: no loss matches {pattern!r}. The model's losses "
                    f"are {', '.join(names)}"
                )
            for name in matched:
                if name in found.weights or any(name in losses for losses in depends.values()):
                    raise ConfigError(
                        f"MEMFIT.NORMALIZERS.LOSSES: what {name} is divided by is declared twice, "
                        f"by {kind} and by another pattern or by a count of the model. Leave one"
                    )
                found.weights[name] = kind

    def _told_by_key(self, name: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern, _ in self._patterns)

    def _parts(self, told: _Run, found: Optional[LossReport] = None, **options: Any) -> _Run:
        found = found or self._found
        sites = {
            *found.counts,
            *told.counts[0].keys() - {s for s in told.counts[0] if s[0] in _KINDS},
        }
        totals = {s: told.counts[0][s] for s in sites}
        return self._run(self._apart, found, totals, **options)

    def _is_wrong(self, parts: _Run, whole: _Run) -> bool:
        rounding = _ROUNDING.get(self._trained[0].dtype, 2e-5)
        return parts.distance(whole) > rounding or self._badness(parts, whole)[0] > 0

    def _badness(self, parts: _Run, whole: _Run) -> tuple[int, float]:
        # In the gradient of all losses, one loss may hide others. So losses are counted first.
        return sum(parts.is_off(k, whole) for k in whole.values), parts.distance(whole)

    def _judge(self, whole: _Run, parts: _Run, told: _Run) -> None:
        """Find the losses that are off."""
        found = self._found
        found.names = [k for k, v in whole.values.items() if v != 0 or parts.values.get(k)]
        zero = "it is zero for these images"
        found.unchecked = {k: zero for k in whole.values if k not in found.names}
        if not self._is_wrong(parts, whole):
            return
        groups: dict[Any, list[str]] = {}  # layers of one criterion together
        for name in found.names:
            key = re.sub(r"\d+", "", name), parts.is_off(name, whole)
            groups.setdefault(key, []).append(name)
        least = _SMALL * float(whole.gradients[0].norm())
        names = list(groups.values())
        whole, parts = self._run(self._together, names=names), self._parts(told, names=names)
        other = None
        for i, ((_, is_off), of_group) in enumerate(groups.items()):
            distance = parts.distance(whole, i, 0.0 if is_off else least)
            if distance <= self._limit:
                continue
            noise = _ESTIMATED if parts.estimates else 0.0
            why = "a running mean is estimated within a window"
            if (whole.has_drawn or parts.has_drawn) and math.isfinite(distance):
                other = other or self._run(self._together, names=names, seed=1)
                noise, why = other.distance(whole, i, least), "random numbers"
            if distance <= noise:
                why = f"{why} change it by {noise:.1g}, micro-batches by {distance:.1g}"
                found.unchecked.update(dict.fromkeys(of_group, why))
            else:
                found.off.update(dict.fromkeys(of_group, distance))

    def _run(
        self,
        groups: Sequence[Sequence[Any]],
        report: Optional[LossReport] = None,
        totals: Optional[Numbers] = None,
        has_gradient: bool = True,
        names: Sequence[Sequence[str]] = (),
        seed: int = 0,
    ) -> _Run:
        """Run groups of images, one forward and backward each.

        Args:
            report: how the losses are weighted.
            totals: the counts of the window.
            names: groups of losses, whose gradients are computed one by one.
        """
        if self._state is not None:
            self._state.restore()
        number = len(self._images)
        images = (number, number) if totals is not None else (0, 0)
        answers = self._answers(self._handle, report or LossReport(), totals, images)
        run = _Run()
        device = self._trained[0].device
        for module in self._model.modules():
            if isinstance(module, nn.MultiheadAttention):
                module.dropout = 0.0
        # On the CPU, oneDNN would keep 30 MB of code for each new size of images.
        flags = torch.backends.mkldnn.flags(enabled=False, allow_tf32=None)
        with EventStorage(get_event_storage().iter), flags, torch.set_grad_enabled(has_gradient):
            for group in groups:
                micro_batch = MicroBatch(copy.deepcopy(group))  # models may change images
                share = len(group) / number
                with _SameDraws(seed) as draws, answers.around(micro_batch):
                    before = RandomState(device)
                    losses = answers.weighted(self._checked(micro_batch.batch))
                    is_same = before.draws_the_same(RandomState(device))
                run.has_drawn |= draws.has_drawn or not is_same
                for name, loss in losses.items():
                    run.values[name] = run.values.get(name, 0.0) + share * float(loss.detach())
                for i, of_group in enumerate(names or [list(losses)] if has_gradient else ()):
                    total: Any = sum(losses[k] for k in of_group if k in losses)
                    if isinstance(total, torch.Tensor) and total.requires_grad:
                        with _SameDraws(seed), answers.around(micro_batch, replays=True):
                            (total * share).backward(retain_graph=i + 1 < len(names))
                    run.gradients += [0.0] * (i + 1 - len(run.gradients))
                    run.gradients[i] += _sketch(self._trained)
                    self._model.zero_grad(set_to_none=True)
                self._found.forwards += len(group)
                if self._progress is not None:
                    self._progress.update(len(group))
        run.counts = [added([noted]) for noted in answers.noted]
        run.estimates = answers.estimates
        return run

    def _handle(self, call: Any) -> bool:
        if call.num_ranks == 1:  # a group of this process alone
            return False
        self._found.collective = self._found.collective or str(call)
        if not call.run_alone():
            raise NotImplementedError(str(call))
        return True

    def _checked(self, batch: Any) -> Mapping[str, torch.Tensor]:
        losses = self._losses(self._model, batch)
        if not isinstance(losses, Mapping):
            raise ConfigError(
                f"the model or loss_fn must return a loss or a dict of losses, got a "
                f"{type(losses).__name__}"
            )
        for name, loss in losses.items():
            if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
                got = list(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__
                raise ConfigError(f"{name} must be a tensor with one number, got {got}")
        if any(p.grad is not None for p in self._trained):
            raise ConfigError(
                "the model's forward or loss_fn calls backward() by itself. Return the losses, and "
                "leave backward and step to the trainer"
            )
        return losses


def log_report(report: LossReport, known: Mapping[str, float] = {}) -> None:
    """Log the result: a line, and a warning for each criterion that is off.

    Args:
        known: losses that were warned about before.
    """
    lines = [f"in {report.forwards} forwards of an image, {report.seconds:.2g} s"]
    exact = [k for k in report.names if k not in report.off and k not in report.unchecked]
    if exact:
        lines.append(f"like one forward over all images: {', '.join(exact)}")
    for why in dict.fromkeys(report.unchecked.values()):
        names = [k for k, w in report.unchecked.items() if w == why]
        lines.append(f"not checked: {', '.join(names)} ({why})")
    if report.changed:
        lines.append(f"each forward changes {', '.join(report.changed)}")
    logger.info("Losses of micro-batches, checked %s", "; ".join(lines))
    new = {k: d for k, d in report.off.items() if k not in known}
    for distance in dict.fromkeys(new.values()):
        names = [k for k, d in new.items() if d == distance]
        by = f"{distance:.2g} of the gradient" if math.isfinite(distance) else "not finite"
        logger.warning("%s: %s off in micro-batches. See %s", ", ".join(names), by, HELP)


def added(counts: Iterable[Mapping[Site, Any]]) -> Numbers:
    """Sums of counts, site by site. This waits for counts on a device."""
    sums: Numbers = {}
    for of_forward in counts:
        for site, count in of_forward.items():
            own = torch.as_tensor(count).detach().to("cpu", torch.float64).reshape(-1)
            if site in sums and sums[site].shape != own.shape:  # not a count of anything
                own = torch.full_like(sums[site], torch.nan)
            sums[site] = sums[site] + own if site in sums else own
    return sums


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and torch.allclose(one, other, rtol=1e-5, atol=1e-5)


def _sketch(parameters: Iterable[nn.Parameter]) -> torch.Tensor:
    """The gradient, added up with random signs to few numbers. It is linear and keeps norms."""
    generator = torch.Generator().manual_seed(0)
    sketch, position = 0.0, 0
    for p in parameters:
        if p.grad is not None:
            gradient = p.grad.to_dense().flatten()
            left = position % _SKETCH
            gradient = F.pad(gradient, (left, -(left + len(gradient)) % _SKETCH)).view(-1, _SKETCH)
            signs = torch.randint(2, (len(gradient),), generator=generator) * 2 - 1
            sketch = sketch + signs.to(gradient) @ gradient
        position += p.numel()
    return sketch + torch.zeros(_SKETCH)


def _state_of(model: nn.Module) -> dict[str, Any]:
    """Everything in the model that may change, by name: a number, or one that differs after a
    change.
    """
    state: dict[str, Any] = {}
    for path, part in model.named_modules():
        if isinstance(part, BatchNorm):  # its statistics are not read in training
            continue
        values = [*plain_attributes(part), *buffers_by_name(part).items()]
        for name, value in [*values, *part.named_parameters(recurse=False)]:
            state[f"{path or type(model).__name__}.{name}"] = _print_of(value)
    return state


def _print_of(value: Any, depth: int = 3) -> Any:
    if isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_meta:
        return value.item()
    if isinstance(value, torch.Tensor) and value.layout == torch.strided and not value.is_meta:
        return zlib.crc32(value.detach().cpu().contiguous().view(torch.uint8).numpy())
    if depth and isinstance(value, Mapping):
        return [(str(k), _print_of(v, depth - 1)) for k, v in list(value.items())[:1000]]
    if depth and isinstance(value, (list, tuple, deque)):
        return [_print_of(v, depth - 1) for v in list(value)[:1000]]
    is_plain = isinstance(value, (bool, int, float, str, type(None)))
    return value if is_plain else type(value).__name__  # an object of the project's own


def _number(value: Any) -> float:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return value if is_number else math.nan


def _chosen(images: Sequence[Any], model: nn.Module, with_empty: bool, most: float) -> list[Any]:
    """Three images of one size: the most crowded one, one with a third of its labels, one without.

    Args:
        with_empty: whether the third one has no labels.
        most: pixels of an image.
    """
    crowded = max(images, key=count_objects)
    others = sorted((i for i in images if i is not crowded), key=count_objects, reverse=True)
    chosen = [crowded, *(others or [crowded])[:1], *(others or [crowded])[-1:]]
    height, width = size_of(crowded)
    factor = min(math.sqrt(most / max(height * width, 1)), 1.0)
    size = max(round(height * factor), 1), max(round(width * factor), 1)
    if all(isinstance(i, dict) and "image" in i for i in chosen) and min(size) > 1:
        chosen = [i if size_of(i) == size else resize_to(i, size) for i in chosen]
    ignored = [getattr(m, k, None) for m in model.modules() for k in _IGNORED]
    void = next((v for v in ignored if type(v) is int), 255)
    most_objects = count_objects(crowded)
    for i, share in ((1, 0.3), (2, 0.0 if with_empty else 0.6)):
        old = count_objects(chosen[i])
        new = min(old, max(round(most_objects * share), 1 if share else 0))
        chosen[i] = _cut(chosen[i], old, new, share, size, void)
    return chosen


def _cut(value: Any, old: int, new: int, share: float, size: tuple[int, int], void: int) -> Any:
    """The labels of an image, with fewer objects, and with labels on a share of its pixels."""

    def cut(part: Any) -> Any:
        return _cut(part, old, new, share, size, void)

    if isinstance(value, Row):  # its tensors are images, and not one entry for each object
        parts = (p if isinstance(p, torch.Tensor) else cut(p) for p in value.parts)
        return replace(value, parts=tuple(parts))
    if isinstance(value, dict):
        return {k: v if k in _NOT_LABELS else cut(v) for k, v in value.items()}
    if isinstance(value, Instances):
        return value[:new] if value.get_fields() else value
    if isinstance(value, torch.Tensor) and value.dtype == torch.int64 and value.shape[-2:] == size:
        labels = value.clone()
        labels[..., round(size[0] * share) :, :] = void
        return labels
    is_list = isinstance(value, list) or (isinstance(value, torch.Tensor) and value.dim() > 0)
    return value[:new] if is_list and old and len(value) == old else value


def _refuse_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    raise ConfigError(
        f"the model's forward or loss_fn steps by itself ({type(optimizer).__name__}.step). Return "
        "the losses, and leave backward and step to the trainer"
    )


def _text_of(error: Exception) -> str:
    place = traceback.extract_tb(error.__traceback__)[-1]
    file = "/".join(Path(place.filename).parts[-2:])
    return f"{type(error).__name__}: {one_line(error)[:200]} in {file}:{place.lineno}"


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
        self._seed_all()
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
        self._seed_all()
        drawn = func(*args, **kwargs)
        if func is _RANDPERM:  # of the anchors or proposals of an image
            return drawn.copy_(torch.arange(len(drawn)).roll(self._seed * len(drawn) // 3))
        if drawn.dim() > 0 and len(drawn) > 0:
            drawn.detach().copy_(drawn[:1].clone().expand_as(drawn))
        return drawn

    def _seed_all(self) -> None:
        random.seed(self._seed)
        np.random.seed(self._seed)
        torch.manual_seed(self._seed)
