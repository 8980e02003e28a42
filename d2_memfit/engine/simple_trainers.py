# Copyright (c) the d2_memfit developers.
"""Accumulation for project trainers that are ``SimpleTrainer`` objects and build everything."""

from collections.abc import Mapping
from functools import partialmethod
from typing import Any

from detectron2.engine import SimpleTrainer

from .train_loop import AccumulatingTrainer

__all__ = ["accumulate_in"]


def accumulate_in(trainer: SimpleTrainer, options: Mapping[str, Any]) -> None:
    """Make a trainer of such a class an :class:`AccumulatingTrainer`, before its ``__init__``.

    The ``DefaultTrainer`` of few-shot-object-detection is of this kind, like that of Detectron2's
    first releases. In the trainer's new class, an ``AccumulatingTrainer`` comes before
    ``SimpleTrainer``. The project's ``super().__init__(model, data_loader, optimizer)`` and
    ``super().run_step()`` thus call the ``AccumulatingTrainer``.

    Args:
        trainer: an instance whose ``__init__`` has not begun to build.
        options: keyword arguments of :class:`AccumulatingTrainer`.
    """
    original = type(trainer)
    init = partialmethod(AccumulatingTrainer.__init__, **options)
    steps = type("Steps", (AccumulatingTrainer,), {"__init__": init})
    names = {k: getattr(original, k) for k in ("__module__", "__qualname__", "__doc__")}
    trainer.__class__ = type(original.__name__, (original, steps), names)
