# Copyright (c) the d2_memfit developers.
"""Forwards and backwards for tests of a model, which is then as before."""

import copy
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Optional

import numpy as np
import torch
import torch.nn.functional as F
from detectron2.utils.events import EventStorage, get_event_storage
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.overrides import TorchFunctionMode

from ...common.random_state import RandomState
from ...compat.pytorch import BatchNorm
from ...counts import Handler, PretendedRanks
from ...errors import ConfigError
from ..state import StateCopy, watched
from ..window import MicroBatch, count_images
from .answers import Answers, Totals
from .changes import changed_names, counters_of, state_of
from .communication import Spared
from .sites import Counts, Site
from .sketch import sketch_of_gradients

__all__ = ["Forward", "Forwards", "SameDraws", "Subject", "without_traces"]

# The functions at import: other contexts may replace them later.
_RANDPERM = torch.randperm
_DRAWS = (
    _RANDPERM,
    torch.bernoulli,
    torch.rand,
    torch.rand_like,
    torch.randint,
    torch.randint_like,
    torch.randn,
    torch.randn_like,
    torch.Tensor.bernoulli_,
    torch.Tensor.normal_,
    torch.Tensor.uniform_,
)
_DROPOUT = (F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout)


@contextmanager
def without_traces(model: nn.Module) -> Iterator[None]:
    """Run forwards without gradients that leave the model, random states and log unchanged.

    Attributes of the model's modules, such as ``training``, are put back, too.
    """
    before = StateCopy(model)
    try:
        with torch.no_grad(), EventStorage(get_event_storage().iter):
            yield
    finally:
        before.restore()


@dataclass
class Forward:
    """One forward of a test.

    Attributes:
        images: number of images.
        losses: values of the losses, with weights by counts but not by images.
        gradients: a sketch of the gradient of each group of losses, with the same weights.
        counts: what the forward has counted.
    """

    images: int
    losses: dict[str, float]
    gradients: list[torch.Tensor]
    counts: Counts

    @property
    def is_finite(self) -> bool:
        return bool(torch.isfinite(torch.tensor([*self.losses.values(), 0.0])).all())


@dataclass
class Forwards:
    """Some forwards of a test, one after another.

    Attributes:
        is_asked: whether the model or an adapter has asked for anything of the window.
        has_drawn: whether random numbers were drawn.
        large: sums over ranks that may not be counts, by their sites.
        changed: names of what the forwards have changed in the model.
        counters: names of numbers that have grown by one with each forward.
    """

    each: list[Forward] = field(default_factory=list)
    is_asked: bool = False
    has_drawn: bool = False
    large: dict[Site, str] = field(default_factory=dict)
    changed: list[str] = field(default_factory=list)
    counters: list[str] = field(default_factory=list)

    @property
    def is_finite(self) -> bool:
        return all(part.is_finite for part in self.each)

    @property
    def gradient(self) -> torch.Tensor:
        """The gradient of all images: each forward is weighted by its images."""
        images = sum(part.images for part in self.each)
        shares = [part.images / images for part in self.each]
        return sum((s * g for s, g in zip(shares, self.gradients)), torch.zeros(()))

    @property
    def gradients(self) -> list[torch.Tensor]:
        """The gradient of each forward, as if it were the only one."""
        return [sum(part.gradients, torch.zeros(())) for part in self.each]

    def of_group(self, i: int) -> "Forwards":
        """The same forwards with the gradient of one group of losses."""
        return replace(self, each=[replace(p, gradients=[p.gradients[i]]) for p in self.each])

    def loss(self, name: str) -> float:
        images = sum(part.images for part in self.each)
        return sum(part.images / images * part.losses.get(name, 0.0) for part in self.each)


@dataclass
class Subject:
    """A model with its losses, for tests that do not change it.

    Args:
        model: without DDP around it, and without gradients.
        losses: called as ``losses(model, batch)``.
        communicate: handles the model's collectives that are not counts.
        pretended: tells the model that there are two ranks, so that it adds up its counts; None on
            several ranks.

    Attributes:
        forwards: images that went through the model so far.
        has_gradients: False where there is no memory for them. The values of the losses then stand
            for their gradient.
    """

    model: nn.Module
    losses: Callable[[nn.Module, Any], Mapping[str, torch.Tensor]]
    communicate: Handler
    pretended: Optional[PretendedRanks] = None
    forwards: int = 0
    has_gradients: bool = True

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    def run(
        self,
        groups: Sequence[Any],
        totals: Optional[Totals] = None,
        pretends: bool = False,
        weights: Optional[Mapping[str, Site]] = None,
        seed: int = 0,
        losses: Optional[Sequence[Sequence[str]]] = None,
        carries: bool = True,
        freezes: bool = False,
        with_gradient: bool = True,
        looks: bool = False,
    ) -> Forwards:
        """Run groups of images, one forward and backward each.

        Args:
            totals, weights: as for :class:`Answers`.
            pretends: whether the model is told of a second rank, if there is none.
            losses: groups of names of losses. The gradient of each group is computed, with one
                forward for all groups. None is one group with all losses.
            carries: whether changes of a forward in the model stay for the next one, as in
                training. Otherwise each forward starts from the same state.
            freezes: whether batch normalisation uses its running statistics.
            looks: whether to look for changes in the model.
        """
        pretended = self.pretended if pretends else None
        while True:
            answers = Answers(self.communicate, totals, weights, pretended, is_alone=True)
            result = Forwards()
            start = StateCopy(self.model)
            no_step = register_optimizer_step_pre_hook(_refuse_step)
            try:
                has_gradient = with_gradient and self.has_gradients
                with (
                    EventStorage(get_event_storage().iter),
                    torch.set_grad_enabled(has_gradient),
                    # On the CPU, oneDNN would keep 30 MB of code for each new size of images.
                    torch.backends.mkldnn.flags(enabled=False, allow_tf32=None),
                ):
                    self._fix(freezes)
                    before = state_of(self.model) if looks else {}
                    images = sum(map(count_images, groups))
                    for group in groups:
                        share = count_images(group) / images
                        part = self._part(group, share, answers, seed, losses, result)
                        result.each.append(part)
                        if not carries:
                            start.restore()
                            self._fix(freezes)
                result.is_asked = answers.is_asked
                result.large = answers.large
                if looks:
                    after = state_of(self.model)
                    result.changed = changed_names(before, after)
                    result.counters = counters_of(before, after, len(groups))
                return result
            except Spared:
                continue
            finally:
                no_step.remove()
                start.restore()
                self.model.zero_grad(set_to_none=True)

    def _part(
        self,
        images: Any,
        share: float,
        answers: Answers,
        seed: int,
        groups: Optional[Sequence[Sequence[str]]],
        result: Forwards,
    ) -> Forward:
        micro_batch = MicroBatch(copy.deepcopy(images))  # models may change images
        self.forwards += micro_batch.num_images
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        gradients = []
        with SameDraws(seed) as draws:
            before = RandomState(self.device)
            with answers.answering(micro_batch), watched(self.model, may_run_again=True):
                losses = self.losses(self.model, micro_batch.batch)
                _check(losses, parameters)
                weighted = answers.weighted(losses)
            has_drawn = draws.has_drawn or not before.draws_the_same(RandomState(self.device))
        result.has_drawn |= has_drawn
        values = {name: float(loss.detach()) for name, loss in weighted.items()}
        names = [[*losses]] if groups is None else groups
        for i, group in enumerate(names):
            total: Any = sum(weighted[name] for name in group if name in weighted)
            if isinstance(total, torch.Tensor) and total.requires_grad:
                with SameDraws(seed), answers.answering(micro_batch, replays=True):
                    # Hooks may look at the size of the gradient.
                    (total * share).backward(retain_graph=i + 1 < len(names))
            gradients.append(sketch_of_gradients(parameters) / share)
            self.model.zero_grad(set_to_none=True)
        if not self.has_gradients:
            gradients = [
                torch.tensor([values[k] for k in group if k in values], dtype=torch.float64)
                for group in names
            ]
        return Forward(micro_batch.num_images, values, gradients, answers.counts[-1])

    def _fix(self, freezes: bool) -> None:
        for module in self.model.modules():
            if isinstance(module, BatchNorm) and freezes:
                module.training = False
            if isinstance(module, nn.MultiheadAttention):
                module.dropout = 0.0


def _refuse_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    raise ConfigError(
        f"the model's forward or loss_fn steps by itself ({type(optimizer).__name__}.step). Return "
        "the losses, and leave backward and step to the trainer"
    )


def _check(losses: Any, parameters: Sequence[nn.Parameter]) -> None:
    """Raise :class:`ConfigError` if a forward does not give losses that can be trained on."""
    if not isinstance(losses, Mapping):
        raise ConfigError(
            f"the model or loss_fn must return a loss or a dict of losses, got a "
            f"{type(losses).__name__}"
        )
    for name, loss in losses.items():
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            got = list(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__
            raise ConfigError(f"{name} must be a tensor with one number, got {got}")
    if any(p.grad is not None for p in parameters):
        raise ConfigError(
            "the model's forward or loss_fn calls backward() by itself. Return the losses, and "
            "leave backward and step to the trainer"
        )


class SameDraws(TorchFunctionMode):
    """A mode for tests of a model: random numbers do not depend on earlier ones, without dropout.

    Args:
        seed: each seed gives other random numbers.
        same_rows: whether all rows of a random tensor have the same numbers. The numbers of an
            object are then the same in every batch.

    Attributes:
        has_drawn: whether PyTorch has drawn random numbers.
    """

    def __init__(self, seed: int = 0, same_rows: bool = True) -> None:
        super().__init__()
        self.has_drawn = False
        self._seed = seed
        self._same_rows = same_rows

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
        if self._same_rows and drawn.dim() > 0 and len(drawn) > 0:
            drawn.detach().copy_(drawn[:1].clone().expand_as(drawn))
        return drawn

    def _seed_all(self) -> None:
        random.seed(self._seed)
        np.random.seed(self._seed)
        torch.default_generator.manual_seed(self._seed)
        if torch.cuda.is_initialized():
            torch.cuda.manual_seed_all(self._seed)
