# Copyright (c) the d2_memfit developers.
"""Evaluation as a config says: its budget, its recovery, and where results are made."""

from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Optional
from unittest.mock import patch

from detectron2.config import CfgNode
from detectron2.utils import comm
from torch import nn

from ..common import compat
from ..common.side_work import unchanged_random_state
from ..common.snapshot import Snapshot
from ..config.settings import RecoveryOptions, checked_cfg
from ..data.registration import unique_annotation_ids
from ..job import checked_test_loaders
from ..memory import enforce_budget
from ..techniques.evaluation_on_host import can_have_results_on_host, results_on_host
from ..techniques.registry import ready_to_evaluate
from .oom_log import RAISE, OomEvent, OomLog
from .retry import free_and_restore, run_all

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
    cfg = checked_cfg(cfg, comm.get_world_size(), trains=False)
    if cfg.MEMFIT.BUDGET_GB is not None:
        enforce_budget(cfg.MEMFIT.BUDGET_GB, cfg.MODEL.DEVICE)
    with (
        ready_to_evaluate(compat.without_ddp(model), cfg),
        recovering_inference(model, RecoveryOptions.from_cfg(cfg)),
        checked_test_loaders(cfg),
        unique_annotation_ids(),
        unchanged_random_state(next(model.parameters()).device),  # training draws what it would
    ):
        _open.append(model)
        try:
            yield cfg
        finally:
            _open.remove(model)


@contextmanager
def recovering_inference(model: nn.Module, options: Optional[RecoveryOptions]) -> Iterator[None]:
    """While open, run a batch that does not fit again with less memory.

    The first retry post-processes results on the host, the next runs one image at a time. Later
    batches keep what worked. Meanwhile the model has another ``forward``, and the same class, so it
    can be pickled.

    Args:
        options: None changes nothing.

    Raises:
        OutOfMemoryError: one image alone does not fit. It also replaces the original error if
            memory runs out elsewhere, as in an evaluator.
    """
    if options is None:
        yield
        return
    # Detectron2's test-time augmentation has a __call__ of its own, for one image after another.
    name = "_inference_one_image" if hasattr(model, "_inference_one_image") else "forward"
    forward = _Recovering(getattr(model, name), compat.without_ddp(model), options)
    with patch.object(model, name, forward), forward.oom_log.explained("evaluation"):
        yield


class _Recovering:
    """In place of a model's forward, also in a copy of the model that is pickled: batches that do
    not fit come again. A piece of :func:`run_all` is a batch, in a tuple.
    """

    def __init__(self, original: Any, model: nn.Module, options: RecoveryOptions) -> None:
        self.oom_log = OomLog(options, model)
        self._original = original
        self._model = model
        self._is_on_host = False
        self._is_one_by_one = False
        self._waiting: deque[tuple[Any]] = deque()

    def __call__(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        def run(piece: tuple[Any]) -> None:
            results.append(self._original(*piece, *args, **kwargs))

        results: list[Any] = []
        is_cut = self._is_one_by_one and isinstance(batch, list) and len(batch) > 1
        self._waiting = deque(([image],) for image in batch) if is_cut else deque([(batch,)])
        run_all(lambda: self._waiting.popleft() if self._waiting else None, run, self)
        return results[0] if len(results) == 1 else [r for part in results for r in part]

    def snapshot(self) -> Snapshot:
        # Detectron2's test-time augmentation turns heads off, and an error leaves them so.
        return Snapshot(self._model)

    def around(self, piece: tuple[Any]) -> AbstractContextManager[Any]:
        return results_on_host(self._model) if self._is_on_host else nullcontext()

    def describe(self, error: Exception, piece: tuple[Any]) -> OomEvent:
        return self.oom_log.event(error, "evaluation", *piece)

    def react(self, failure: OomEvent, piece: tuple[Any], before: Optional[Snapshot]) -> str:
        (batch,) = piece
        free_and_restore(self._model, before)
        pieces, action = [piece], RAISE
        if not self._is_on_host and can_have_results_on_host(self._model):
            self._is_on_host = True
            action = "results are post-processed on the host"
        elif isinstance(batch, list) and len(batch) > 1:
            self._is_one_by_one = True
            pieces, action = [([image],) for image in batch], "the images are run one at a time"
        self.oom_log.log(failure, action)
        self._waiting.extendleft(reversed(pieces))
        return self.oom_log.final_message(failure) if action == RAISE else ""
