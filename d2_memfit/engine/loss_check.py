# Copyright (c) the d2_memfit developers.
"""One check of losses: do images in parts have the gradient of one forward over all of them?

Three images of the job, resized to one size, run together and one by one. The third has no objects.
Values and gradients of each loss are compared. Random numbers do not depend on the batch, and there
is no dropout (:class:`SameDraws`). What a forward changes in the model stays for the next part, as
in training. The weights are moved a little, because heads that start at zero, or teachers that
start as their student, hide what later differs. Afterwards the model is as before.
"""

import copy
import fnmatch
import logging
import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from detectron2.utils import comm
from detectron2.utils.events import EventStorage, get_event_storage
from torch import nn
from tqdm import tqdm

from ..common.compat import compiled_frames
from ..common.errors import ConfigError, one_line
from ..common.side_work import SameDraws
from ..common.snapshot import Snapshot, changed_by_forward, state_of, weights_that_may_change
from ..config.settings import NormalizerOptions
from ..job import resize_to, size_of
from ..memory import is_out_of_memory, release_memory
from .collectives import IMAGES, OBJECTS, Answers, Collective, Numbers, added, is_same
from .loss_report import LossReport, gradient_of
from .window import MicroBatch, count_objects

logger = logging.getLogger(__name__)

LIMIT = 1e-3  # relative distance of a gradient that is right
LIMIT_OF_16_BITS = 0.05  # the same under autocast
_SMALL = 1e-5  # of the gradient of all losses; smaller gradients are compared with this
_ROUNDING = 1e-6  # of weights: some models make a thousand times as much of it
_ESTIMATED = 0.2  # what a running mean that is estimated within a window may be off
_MOST_FORWARDS = 27  # images through the model
_MOST_PIXELS = 2**17  # of the images together

Losses = Callable[[nn.Module, Any], Mapping[str, torch.Tensor]]


def check_losses(
    model: nn.Module,
    losses: Losses,
    images: Sequence[Any],
    options: NormalizerOptions,
    limit: float = LIMIT,
) -> LossReport:
    """Check the losses of a job with three of its images. The model is then as before.

    Args:
        losses: called as ``losses(model, batch)``.
        images: the images of a window.
        options: which counts are answered.
        limit: relative distance of a gradient that is right.

    Raises:
        ConfigError: the losses cannot be trained on, or a pattern of the options matches none.
    """
    found = LossReport(unchecked={"losses": "batches cannot be cut into images"})
    for with_empty, pixels in ((True, _MOST_PIXELS), (False, _MOST_PIXELS / 4)) if images else ():
        release_memory(next(model.parameters()).device)
        found, start = LossReport(), None
        try:
            start, chosen = Snapshot(model, model.parameters()), _chosen(images, with_empty, pixels)
            with tqdm(total=_MOST_FORWARDS, disable=None, leave=False) as progress:
                _Check(model, losses, options, limit, chosen, found).run(progress)
            return found
        except ConfigError:
            raise
        except Exception as e:  # of the model's code. Its traceback would keep its tensors
            why = "memory ran out" if is_out_of_memory(e) else f"{type(e).__name__}: {one_line(e)}"
        finally:
            if start is not None:
                start.restore()
            model.zero_grad(set_to_none=True)
        found.unchecked["losses"] = why
    return found


class _Run(Answers):
    """What forwards left, weighted by their images: values of losses, gradients of groups."""

    values: dict[str, float]
    gradients: list[Any]

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


@dataclass
class _Check:
    """The check of some images; :meth:`run` fills ``found``."""

    model: nn.Module
    losses: Losses
    options: NormalizerOptions
    limit: float
    images: Sequence[Any]
    found: LossReport
    totals: Numbers = field(default_factory=dict)  # the counts of the images together
    groups: list[list[str]] = field(default_factory=list)  # of losses whose gradients are summed

    def run(self, progress: Any) -> None:
        self.progress, found, is_answered = progress, self.found, self.options.policy != "off"
        self.trained = [p for p in self.model.parameters() if p.requires_grad]
        self._move_weights(0.1, 1e-4)
        for module in self.model.modules():  # its dropout is no function that SameDraws sees
            if isinstance(module, nn.MultiheadAttention):
                module.dropout = 0.0
        self.state = Snapshot(self.model, weights_that_may_change(self.model))
        together, apart = [self.images], [[image] for image in self.images]
        torch.compiler.reset()  # what was compiled is compiled again, and counted
        began, compiled, before = time.perf_counter(), compiled_frames(), state_of(self.model)
        first = counted = self._run(together)
        found.changed, found.counters = changed_by_forward(before, state_of(self.model))
        found.estimates = first.estimates
        kinds = {k: re.sub(r"\d+", "", k) for k in first.values}  # layers of a criterion
        self.groups = [[k for k in kinds if kinds[k] == g] for g in dict.fromkeys(kinds.values())]
        seconds = (5 + 4 * len(self.groups)) * (time.perf_counter() - began)
        logger.info("Checking how the losses add up: about %.2g s, once", seconds)
        if is_answered and comm.get_world_size() == 1:
            found.simulates_ranks = True
            with suppress(Exception):  # code without a second rank may raise anything
                counted = self._run(together, found)
            found.simulates_ranks = counted is not first and not counted.off(first)
            counted = counted if found.simulates_ranks else first
        alone = self._run([*apart, *apart[:1]], found)  # a queue fills
        self.state = Snapshot(self.model, weights_that_may_change(self.model))
        whole = self._run(together, backward=True)
        own, totals = added(alone.noted[: len(self.images)]), added(counted.noted)
        for site in totals.keys() & own.keys() - {OBJECTS, IMAGES} if is_answered else ():
            if is_same(totals[site], own[site]):
                found.counts.append(site)
        self.totals = {site: totals[site] for site in (*found.counts, OBJECTS)}
        is_summed = any(site[0] == "sum" for site in found.counts)
        found.simulates_ranks &= is_summed
        for name, mean in self._run(apart, found).values.items() if is_summed else ():
            of_all = whole.values.get(name, mean)
            if abs(len(apart) * mean - of_all) < abs(mean - of_all):
                found.weights[name] = "sum"
        for pattern, kind in self.options.losses if is_answered else ():
            names = fnmatch.filter(whole.values, pattern)
            found.weights.update(dict.fromkeys(names, kind))
            if not names:
                text = f"no loss matches {pattern!r}. The model's losses are"
                raise ConfigError(f"NORMALIZERS.LOSSES: {text} {', '.join(whole.values)}")
        self._judge(whole, apart)
        if compiled_frames() != compiled:
            why = "compiled code ran, whose counts are not seen"
            found.unchecked.update({k: why for k in found.names if k not in found.off})

    def _move_weights(self, share: float, least: float = 0.0) -> None:
        generator = torch.Generator().manual_seed(0)
        for p in self.trained:
            noise = torch.randn(p.shape, generator=generator).to(p)
            p.data.add_(noise * (share * p.data.square().mean().sqrt() + least))

    def _judge(self, whole: _Run, apart: Any) -> None:
        """Find the losses that are off, by more than two samples of the images together differ."""
        found, parts = self.found, self._run(apart, self.found, backward=True)
        off = parts.off(whole)
        found.names = [k for k, v in whole.values.items() if v != 0 or k in off]
        zero = [k for k in whole.values if k not in found.names]
        found.unchecked = dict.fromkeys(zero, "it is zero for these images")
        distances = [parts.distance(whole, i) for i in range(len(self.groups))]
        other = whole
        if max(distances, default=0.0) > self.limit:  # what rounding does, it does not do twice
            self._move_weights(_ROUNDING)
            other = self._run([self.images], backward=True, seed=1)
            again = self._run(apart, found, backward=True, seed=1)
            distances = [min(d, again.distance(other, i)) for i, d in enumerate(distances)]
        for i, (group, distance) in enumerate(zip(self.groups, distances)):
            names = [k for k in group if k in off] or [k for k in group if k in found.names]
            samples = max(other.distance(whole, i), _ESTIMATED if found.estimates else 0.0)
            is_expected = distance <= samples or parts.nearly.issuperset(names)
            if distance > self.limit and is_expected:
                why = f"{distance:.1g} off, as its sampling, rounding or running mean may make it"
                found.unchecked.update(dict.fromkeys(names, why))
            elif distance > self.limit:
                found.off.update(dict.fromkeys(names, distance))

    def _run(self, groups: Any, report: Any = None, backward: bool = False, seed: int = 0) -> _Run:
        """Run groups of images, one forward each.

        Args:
            groups: a list of images for each forward.
            report: how the losses are weighted; None: by images, and nothing is answered.
            backward: whether to compute the gradients of the losses.
        """
        self.state.restore()
        number, totals = len(self.images), self.totals if report else {}
        behind = (number, number) if totals else (0, 0)
        is_exact, scale = self.options.policy == "exact", 1 if self.limit == LIMIT else 1024
        run = _Run(self.model, is_exact, self._answer, report or LossReport(), totals, behind)
        run.values, run.gradients = {}, [0.0] * len(self.groups)
        # On the CPU, oneDNN would keep 30 MB of code for each new size of images.
        flags = torch.backends.mkldnn.flags(enabled=False, allow_tf32=None)
        with EventStorage(get_event_storage().iter), flags, torch.enable_grad():
            for images in groups:
                micro_batch = MicroBatch(copy.deepcopy(images))  # models may change images
                share = len(images) / number
                torch.manual_seed(seed)
                with SameDraws(), run.around(micro_batch):
                    losses = run.weighted(self._checked(micro_batch.batch))
                    for name, loss in losses.items():
                        run.values[name] = run.values.get(name, 0.0) + share * float(loss.detach())
                    for i, names in enumerate(self.groups if backward else ()):
                        total: Any = sum(losses[k] for k in names if k in losses) * share * scale
                        if isinstance(total, torch.Tensor) and total.requires_grad:
                            total.backward(retain_graph=i + 1 < len(self.groups))
                        run.gradients[i] += gradient_of(self.trained)
                        self.model.zero_grad(set_to_none=True)
                self.progress.update(len(images))
                self.found.forwards += len(images)
        return run

    def _answer(self, call: Collective) -> bool:
        if not call.run_alone():
            raise NotImplementedError(f"it communicates, {call}")
        return True

    def _checked(self, batch: Any) -> Mapping[str, torch.Tensor]:
        losses = self.losses(self.model, batch)
        if not isinstance(losses, Mapping) or any(v.numel() != 1 for v in losses.values()):
            raise ConfigError("the model must return a loss or a dict of losses of one number")
        if any(p.grad is not None for p in self.trained):
            raise ConfigError("the forward calls backward() by itself: leave it to the trainer")
        return losses


def _chosen(images: Sequence[Any], with_empty: bool, pixels: float) -> list[Any]:
    """Three images of one size: the most crowded one, one in the middle, one without objects.

    Args:
        with_empty: whether the third one has no objects.
        pixels: of the images together, at most.
    """
    ordered = sorted(images, key=count_objects, reverse=True)
    height, width = size_of(ordered[0])
    factor = min(math.sqrt(pixels / 3 / max(height * width, 1)), 1.0)
    size = max(round(height * factor), 1), max(round(width * factor), 1)
    chosen = [ordered[0], ordered[len(ordered) // 2], ordered[-1]]
    for i, image in enumerate(chosen):
        if isinstance(image, dict) and "image" in image:
            chosen[i] = resize_to(image, size)
            if i == 2 and with_empty and "instances" in image:
                chosen[i]["instances"] = chosen[i]["instances"][:0]
    return chosen
