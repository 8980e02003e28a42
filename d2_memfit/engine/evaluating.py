# Copyright (c) the d2_memfit developers.
"""Evaluation as a config says: its budget, its recovery, and where results are made."""

from collections.abc import Iterator
from contextlib import contextmanager

from detectron2.config import CfgNode
from torch import nn

from .. import compat
from ..common.side_work import unchanged_random_state
from ..evaluation import unique_annotation_ids
from ..job import checked_test_loaders
from ..memory import enforce_budget
from ..settings import Settings
from ..techniques import ready_to_evaluate
from .attempts import recovering_inference

__all__ = ["evaluating"]

_open: list[nn.Module] = []  # models that are evaluated


@contextmanager
def evaluating(cfg: CfgNode, model: nn.Module) -> Iterator[CfgNode]:
    """While open, build test loaders and evaluate under MEMFIT.BUDGET_GB, OOM and EVALUATION.

    ``MemfitTrainer.test`` does this. In your own loop, evaluate within it::

        with evaluating(job.cfg, model):
            inference_on_dataset(model, test_loader, evaluator)

    Within itself, for the same model, it does nothing.

    Yields:
        CfgNode: the config, with its budget as a number.
    """
    if any(model is other for other in _open):
        yield cfg
        return
    settings = Settings.from_cfg(cfg, trains=False)
    cfg = settings.cfg
    if cfg.MEMFIT.BUDGET_GB is not None:
        enforce_budget(cfg.MEMFIT.BUDGET_GB, cfg.MODEL.DEVICE)
    with (
        ready_to_evaluate(compat.without_ddp(model), cfg),
        recovering_inference(model, settings.recovery),
        checked_test_loaders(cfg),
        unique_annotation_ids(),
        unchanged_random_state(next(model.parameters()).device),  # training draws what it would
    ):
        _open.append(model)
        try:
            yield cfg
        finally:
            _open.remove(model)
