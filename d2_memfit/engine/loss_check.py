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
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Optional

import numpy as np
import torch
from detectron2.utils import comm
from detectron2.utils.events import EventStorage, get_event_storage
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.overrides import TorchFunctionMode
from tqdm import tqdm

from ..common.random_state import RandomState
from ..common.snapshot import Snapshot, plain_attributes, weights_that_may_change
from ..compat.pytorch import BatchNorm, compiled_frames, forget_compiled
from ..errors import ConfigError, one_line
from ..job import resize_to, size_of
from ..memory import is_out_of_memory, release_memory
from .collectives import FEW, IMAGES, OBJECTS, Collective, Numbers, Site, added, is_same
from .window import MicroBatch, count_objects

__all__ = ["LIMIT", "LossReport", "check_losses", "log"]

logger = logging.getLogger(__name__)

HELP = "docs/ACCUMULATION.md#a-loss-that-is-off"
LIMIT = 1e-3  # relative distance of a gradient that is right
LIMIT_OF_16_BITS = 0.05  # the same under autocast
_SMALL = 1e-5  # of the gradient of all losses; smaller gradients are compared with this
_ESTIMATED = 0.2  # what a running mean that is estimated within a window may be off
_MOST_FORWARDS = 24  # images through the model
_MOST_PIXELS = 2**17  # of the images together
_MOST_ALONE = 8  # losses whose gradients are compared one by one
_ELEMENTS = 2**20
_SCALE = 1024.0  # of losses: their gradients in 16 bits may be too small
_LEAVE = "Return the losses, and leave backward and step to the trainer"
_DRAWS = re.compile(r"rand|bernoulli|(normal|uniform|exponential)_$")


@dataclass
class LossReport:
    """Result of the check. Plain data: all ranks and checkpoints get it.

    Attributes:
        counts: sites that are answered with the window's counts.
        weights: "sum" or "objects" for losses that are not weighted by images.
        estimates: whether a loss is divided by a running mean, estimated within a window.
        pretends: whether one rank is told of a second one, so that it adds up its counts.
        names: of the losses that were not zero.
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
        lines += [f"not checked: {name} ({why})" for name, why in self.unchecked.items()]
        if self.changed:
            lines.append(f"each forward changes {', '.join(self.changed)}")
        return f"in {self.forwards} forwards, {self.seconds:.2g} s: {'; '.join(lines)}"

    def complaints(self) -> list[str]:
        """A line for each loss that is off, or for a check that failed."""
        why = self.unchecked.get("losses")
        lines = [f"the losses of micro-batches are not checked: {why}. See {HELP}"] if why else []
        off = "{}: {:.2g} of the gradient off in micro-batches. See {}"
        return lines + [off.format(name, d, HELP) for name, d in self.off.items()]


def log(report: LossReport, forwards: int) -> None:
    """Log the result.

    Args:
        forwards: micro-batches of an iteration.
    """
    logger.info("Losses of micro-batches, checked %s", report)
    for line in report.complaints():
        logger.warning("%s", line)
    for name in report.counters:
        logger.warning(
            "%s counts forwards, %d times per iteration with accumulation. What depends on it, "
            "such as a warm-up, comes earlier by that factor: lengthen it",
            *(name, forwards),
        )


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
    for with_empty, share in ((True, 1), (False, 4)) if images else ():
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
        found = check.found
        found.unchecked["losses"] = why
    return found


@dataclass
class _Run:
    """What forwards left, weighted by their images.

    Attributes:
        values: of the losses.
        gradients: of each group of losses.
        has_drawn: whether random numbers were drawn.
        counts: of each forward.
        estimates: whether a running mean of windows was asked for.
        nearly: losses of Detectron2's heads, for which images are nearly the right weights.
    """

    values: dict[str, float] = field(default_factory=dict)
    gradients: list[Any] = field(default_factory=list)
    has_drawn: bool = False
    counts: list[Numbers] = field(default_factory=list)
    estimates: bool = False
    nearly: set[str] = field(default_factory=set)

    def off(self, whole: "_Run") -> list[str]:
        """Losses whose value differs from that of the images together."""
        pairs = [(k, v, self.values.get(k, 0.0)) for k, v in whole.values.items()]
        return [k for k, v, own in pairs if not abs(own - v) <= LIMIT * abs(v)]

    def distance(self, whole: "_Run", i: int) -> float:
        """Relative distance of the gradient of a group from that of the images together."""
        off = float((self.gradients[i] - whole.gradients[i]).norm())
        least = _SMALL * float(sum(whole.gradients).norm())
        scale = max(float(whole.gradients[i].norm()), least, 1e-30)
        return off / scale if math.isfinite(off + scale) else math.inf


class _Check:
    def __init__(self, model: nn.Module, *settings: Any) -> None:
        self.found = LossReport()
        self._model = model
        self._losses, self._answers, self._patterns, self._limit = settings
        self._trained = [p for p in model.parameters() if p.requires_grad]
        self._state = Snapshot(model, weights_that_may_change(model))
        self._totals: Numbers = {}  # the counts of the images together
        self._groups: list[list[str]] = []  # of losses
        self._progress = tqdm(total=_MOST_FORWARDS, disable=None, leave=False)

    def report(self, images: Sequence[Any]) -> LossReport:
        """Run the check."""
        found, self._together, self._apart = self.found, [images], [[image] for image in images]
        forget_compiled()
        began, compiled = time.perf_counter(), compiled_frames()
        self._prepare()
        before = state_of(self._model)
        first = self._run(self._together)
        found.changed, found.counters = changed_by_forward(before, state_of(self._model))
        found.estimates = first.estimates
        self._groups = _groups_of(list(first.values))
        seconds = (5 + 4 * len(self._groups)) * (time.perf_counter() - began)
        logger.info("Checking how the losses add up: about %.2g s, once", seconds)
        told = first if self._patterns is None else self._with_second_rank(first)
        alone = self._run(self._apart, found)  # a queue fills
        self._state = Snapshot(self._model, found.changed_weights(self._model))
        whole = self._run(self._together, backward=True)
        if self._patterns is not None:
            self._find_counts(told.counts[0], alone.counts)
            self._find_weights(whole)
        self._judge(whole, self._run(self._apart, found, backward=True))
        if compiled_frames() != compiled:
            why = "compiled code ran, whose counts are not seen"
            found.unchecked.update({k: why for k in found.names if k not in found.off})
        self._progress.close()
        found.seconds = time.perf_counter() - began
        return found

    def _prepare(self) -> None:
        """Move the weights a little, and leave out dropout that :class:`_SameDraws` cannot see."""
        generator = torch.Generator().manual_seed(0)
        for p in self._trained:
            noise = torch.randn(p.shape, generator=generator).to(p)
            p.data.add_(noise * (0.01 * p.data.square().mean().sqrt() + 1e-4))
        for module in self._model.modules():
            if isinstance(module, nn.MultiheadAttention):
                module.dropout = 0.0

    def _with_second_rank(self, first: _Run) -> _Run:
        """The images together as if there was a second rank, if that changes no loss."""
        self.found.pretends = comm.get_world_size() == 1
        try:
            told = self._run(self._together, self.found)
        except Exception:  # code without a second rank may raise anything
            self.found.pretends = False
            return first
        self.found.pretends &= not told.off(first)
        return told if self.found.pretends else first

    def _find_counts(self, totals: Numbers, alone: list[Numbers]) -> None:
        """Find the counts that add up."""
        found, sums = self.found, added(alone)
        self._totals, found.seen = totals, alone
        for site in [s for s in totals if s not in (OBJECTS, IMAGES)]:
            if site in sums and is_same(totals[site], sums[site]):
                found.counts.append(site)
            elif site[0] == "sum" and len(totals[site]) > FEW:
                found.collective = found.collective or "all_reduce in {}:{}".format(*site[1][0])

    def _find_weights(self, whole: _Run) -> None:
        """Find the losses that are sums over objects, once their divisor is the window's."""
        found, number = self.found, len(self._apart)
        found.pretends &= any(site[0] == "sum" for site in found.counts)
        if any(site[0] == "sum" for site in found.counts):
            for name, mean in self._run(self._apart, found).values.items():
                of_all = whole.values.get(name, mean)
                if abs(number * mean - of_all) < abs(mean - of_all):
                    found.weights[name] = "sum"
        for pattern, kind in self._patterns:
            names = [name for name in whole.values if fnmatchcase(name, pattern)]
            found.weights.update(dict.fromkeys(names, kind))
            if not names:
                raise ConfigError(
                    f"MEMFIT.NORMALIZERS.LOSSES: no loss matches {pattern!r}. The model's losses "
                    f"are {', '.join(whole.values)}"
                )

    def _judge(self, whole: _Run, parts: _Run) -> None:
        """Find the losses that are off."""
        found, off, other = self.found, parts.off(whole), whole
        found.names = [k for k, v in whole.values.items() if v != 0 or k in off]
        zero = [k for k in whole.values if k not in found.names]
        found.unchecked = dict.fromkeys(zero, "it is zero for these images")
        for i, group in enumerate(self._groups):
            distance = parts.distance(whole, i)
            if distance <= self._limit:
                continue
            if other is whole and (whole.has_drawn or parts.has_drawn):
                other = self._run(self._together, backward=True, seed=1)
            names = [k for k in group if k in off] or [k for k in group if k in found.names]
            if parts.nearly.issuperset(names):
                why = "the number of proposals or pixels"
            elif found.estimates and distance <= _ESTIMATED:
                why = "the running mean of windows"
            elif distance <= other.distance(whole, i):
                why = "random numbers"
            else:
                found.off.update(dict.fromkeys(names, distance))
                continue
            why = f"{distance:.1g} off, as {why} may make it"
            found.unchecked.update(dict.fromkeys(names, why))

    def _run(
        self,
        groups: Sequence[Sequence[Any]],
        report: Optional[LossReport] = None,
        backward: bool = False,
        seed: int = 0,
    ) -> _Run:
        """Run groups of images, one forward each.

        Args:
            report: how the losses are weighted; None: by images, and nothing is answered.
            backward: whether to compute the gradients of the losses.
        """
        self._state.restore()
        number, device = len(self._apart), self._trained[0].device
        known = {*report.counts, OBJECTS} if report else ()
        totals = {s: n for s, n in self._totals.items() if s in known}
        behind = (number, number) if totals else (0, 0)
        answers = self._answers(self._answer, report or LossReport(), totals, behind)
        run = _Run(gradients=[0.0] * len(self._groups))
        # On the CPU, oneDNN would keep 30 MB of code for each new size of images.
        flags = torch.backends.mkldnn.flags(enabled=False, allow_tf32=None)
        with EventStorage(get_event_storage().iter), flags, torch.enable_grad():
            for images in groups:
                micro_batch = MicroBatch(copy.deepcopy(images))  # models may change images
                with _SameDraws(seed), answers.around(micro_batch):
                    before = RandomState(device)
                    losses = answers.weighted(self._checked(micro_batch.batch))
                    run.has_drawn |= not before.draws_the_same(RandomState(device))
                share = len(images) / number
                for name, loss in losses.items():
                    run.values[name] = run.values.get(name, 0.0) + share * float(loss.detach())
                for i, names in enumerate(self._groups if backward else ()):
                    total: Any = sum(losses[k] for k in names if k in losses) * share * _SCALE
                    if isinstance(total, torch.Tensor) and total.requires_grad:
                        with _SameDraws(seed), answers.around(micro_batch, replays=True):
                            total.backward(retain_graph=i + 1 < len(self._groups))
                    run.gradients[i] += gradient_of(self._trained)
                    self._model.zero_grad(set_to_none=True)
                self._progress.update(len(images))
                self.found.forwards += len(images)
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


def _groups_of(names: Sequence[str]) -> list[list[str]]:
    """Losses whose gradients are compared together: if there are many, layers of one criterion."""
    groups: dict[str, list[str]] = {}
    for name in names:
        kind = name if len(names) <= _MOST_ALONE else re.sub(r"\d+", "", name)
        groups.setdefault(kind, []).append(name)
    return [*groups.values()]


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
        tensor = torch.as_tensor(value).detach().to_dense().cpu()
        if tensor.numel() == 1:
            return tensor.item()
        return zlib.crc32(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    value = list(value.items()) if isinstance(value, Mapping) else value
    if depth and isinstance(value, (list, tuple, deque)):
        return [_print_of(v, depth - 1) for v in value]
    return (
        value if isinstance(value, (int, float)) else re.sub(r" at 0x\w+", "", repr(value)[:1000])
    )


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
    batch. The anchors or proposals of an image are taken in their order.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._seed = seed

    def __enter__(self) -> Any:
        random.seed(self._seed)
        np.random.seed(self._seed)
        torch.manual_seed(self._seed)
        return super().__enter__()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        if "dropout" in name:
            return args[0] if args else kwargs["input"]
        if not _DRAWS.match(name):
            return func(*args, **kwargs)
        torch.manual_seed(self._seed)
        drawn = func(*args, **kwargs)
        if name == "randperm":
            return drawn.copy_(torch.arange(len(drawn)).roll(self._seed * len(drawn) // 3))
        if drawn.dim() > 0 and len(drawn) > 0:
            drawn.detach().copy_(drawn[:1].clone().expand_as(drawn))
        return drawn
