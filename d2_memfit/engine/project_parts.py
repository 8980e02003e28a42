# Copyright (c) the d2_memfit developers.
"""The parts that a project's trainer makes itself, of Detectron2's classes."""

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from inspect import signature
from typing import Any

import torch
from detectron2.engine import AMPTrainer, SimpleTrainer
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ..common.patching import change_class, replaced_together
from ..errors import ConfigError
from ..settings import Precision
from .train_loop import AccumulatingTrainer

__all__ = ["project_parts"]

logger = logging.getLogger(__name__)

_Init = Callable[..., None]

# Arguments of Detectron2's trainers that are passed on. Only main has the last one.
_KEPT = {"model", "data_loader", "optimizer", "gather_metric_period"}


@contextmanager
def project_parts(options: Mapping[str, Any]) -> Iterator[list[AccumulatingTrainer]]:
    """While open, adapt new objects of Detectron2's classes to d2_memfit, whoever makes them.

    - A ``SimpleTrainer`` or ``AMPTrainer`` becomes an :class:`AccumulatingTrainer`. A class derived
      from ``SimpleTrainer`` gets it as a base before ``SimpleTrainer``, so that its
      ``super().run_step()`` accumulates. The ``DefaultTrainer`` of few-shot-object-detection, and
      of Detectron2's first releases, is such a class.
    - ``DistributedDataParallel`` works on a CPU, too.

    Args:
        options: keyword arguments of every :class:`AccumulatingTrainer`.

    Yields:
        The trainers that are made.

    Raises:
        ConfigError: when an :class:`AccumulatingTrainer` is made with other options, or a trainer
            is to write its metrics after the step.
        TypeError: when a trainer is made of a class that is derived from ``AMPTrainer``.
    """
    trainers: list[AccumulatingTrainer] = []

    def simple(original: _Init) -> _Init:
        def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
            if isinstance(self, AccumulatingTrainer):
                original(self, *args, **kwargs)
                return
            given = signature(original).bind(self, *args, **kwargs).arguments
            if given.get("async_write_metrics"):
                raise ConfigError(
                    "async_write_metrics=True cannot be used: all ranks look at the losses before "
                    "the step, so that one that is not finite changes nothing. Leave it False"
                )
            if type(self) is AMPTrainer and options["precision"].dtype == torch.float32:
                logger.warning(
                    "AMPTrainer is made, and SOLVER.AMP.ENABLED is False: this run trains in "
                    "float32. Set it True for mixed precision, or make a SimpleTrainer"
                )
            # A class of the project's own, such as one with its own run_step, has SimpleTrainer as
            # its base since before d2_memfit was imported.
            change_class(self, _accumulating(type(self)))
            AccumulatingTrainer.__init__(self, **{k: v for k, v in given.items() if k in _KEPT})
            if given.get("grad_scaler") and self.precision.scaler:
                self.precision.scaler = given["grad_scaler"]

        return __init__

    def accumulating(original: _Init) -> _Init:
        def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
            given = signature(original).bind(self, *args, **kwargs).arguments
            for name in given.keys() & options.keys():
                _check_same(name, given[name], options[name])
            original(**{**options, **given})
            trainers.append(self)

        return __init__

    def ddp(original: _Init) -> _Init:
        def __init__(self: Any, module: nn.Module, *args: Any, **kwargs: Any) -> None:
            if next(module.parameters()).device.type == "cpu":
                kwargs["device_ids"] = None
            original(self, module, *args, **kwargs)

        return __init__

    # DefaultTrainer.__init__ makes its trainer and DDP by name, and so do projects: there is no
    # method to override. A trainer that is replaced later would have two iterators of its loader.
    makers = {SimpleTrainer: simple, AMPTrainer: simple, AccumulatingTrainer: accumulating}
    makers[DistributedDataParallel] = ddp
    with replaced_together([([cls], {"__init__": maker}) for cls, maker in makers.items()]):
        yield trainers


def _accumulating(cls: type) -> type:
    """The class with :class:`AccumulatingTrainer` in place of ``SimpleTrainer``."""
    if cls in (SimpleTrainer, AMPTrainer):
        return AccumulatingTrainer
    if issubclass(cls, AMPTrainer):
        raise TypeError(
            f"{cls.__name__} is derived from AMPTrainer: derive it from SimpleTrainer. With "
            "SOLVER.AMP.ENABLED True it computes in mixed precision"
        )
    names = {k: getattr(cls, k) for k in ("__module__", "__qualname__", "__doc__")}
    return type(cls.__name__, (cls, AccumulatingTrainer), names)


def _check_same(name: str, given: Any, asked: Any) -> None:
    if isinstance(asked, Precision):
        asked = asked.dtype
        given = Precision(given, "cpu").dtype if isinstance(given, str) else given.dtype
    if given != asked:
        raise ConfigError(
            f"AccumulatingTrainer is made with {name} {given}, and the config asks for {asked}: "
            f"leave {name} out there, and set it in the config"
        )
