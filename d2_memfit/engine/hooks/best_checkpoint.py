# Copyright (c) the d2_memfit developers.
"""The best checkpoint by a result of the evaluations, and early stopping."""

import logging
import math
import operator
from typing import Any, Optional

from detectron2.engine import HookBase
from detectron2.engine.hooks import EvalHook, PeriodicCheckpointer
from detectron2.utils import comm

from ... import compat
from ...job import Job
from ..resuming import TrainingEnded, checkpointers_of

__all__ = ["BestCheckpoint"]

logger = logging.getLogger(__name__)


class BestCheckpoint(HookBase):
    """Saves ``model_best.pth`` after the best evaluation, and ends a run that gets no better.

    It looks at results when Detectron2's ``BestCheckpointer`` does, and has a state, so that a
    resumed run knows its best. An evaluation comes after the checkpoint of its iteration: a run
    resumed there starts with it. It must be on all ranks, after the hook that evaluates. The keys
    are those of MEMFIT.BEST.

    Attributes:
        best_metric, best_iter: the best result, and the iteration after which it was found; None if
            there is none.
    """

    def __init__(self, job: Job) -> None:
        best = job.cfg.MEMFIT.BEST
        self.best_metric: Optional[float] = None
        self.best_iter: Optional[int] = None
        self._metric = best.METRIC
        self._is_better = operator.gt if best.MODE == "max" else operator.lt
        self._period = job.cfg.TEST.EVAL_PERIOD
        self._checkpointer: Any = None  # of rank 0, once training has begun
        self._patience = best.PATIENCE
        self._evaluations_since = 0
        self._evaluated = -1  # the last iteration with an evaluation
        self._has_ended = False

    def before_train(self) -> None:
        self._checkpointer = next(iter(checkpointers_of(self.trainer)), None)

    def _look_at_results(self) -> None:
        self._evaluated = iteration = min(self.trainer.iter, self.trainer.max_iter - 1)
        result = self.trainer.storage.latest().get(self._metric)
        result = comm.all_gather(result)[0]  # evaluators give it to rank 0 alone
        if result is None:
            known = [name for name in self.trainer.storage.latest() if "/AP" in name]
            logger.warning(
                "MEMFIT.BEST.METRIC %s is not among the results of the evaluation. The results of "
                "AP are: %s",
                self._metric,
                ", ".join(known) or "none",
            )
            return
        value, _ = result
        is_better = self.best_metric is None or self._is_better(value, self.best_metric)
        if is_better and math.isfinite(value):
            self.best_metric, self.best_iter = value, iteration
            self._evaluations_since = 0
            with compat.at_iteration(self.trainer, iteration):
                self.trainer.gather_states()
            self._save("model_best")
            logger.info("%s %.4f is the best so far: model_best.pth", self._metric, value)
            return
        # Counted by iterations: a checkpoint of the same one is saved before the evaluation.
        best_iter = -1 if self.best_iter is None else self.best_iter
        self._evaluations_since = (iteration - best_iter) // self._period
        logger.info("%s %.4f. %s", self._metric, value, self._best_so_far())

    def _best_so_far(self) -> str:
        if self.best_metric is None:
            return "There is no best result yet"
        return f"The best is {self.best_metric:.4f}, after iteration {self.best_iter}"

    def _save(self, name: str) -> None:
        """Save the state after the last iteration. After training, ``iter`` is one more."""
        last = min(self.trainer.iter, self.trainer.max_iter - 1)
        if comm.is_main_process():
            with compat.at_iteration(self.trainer, last):
                self._checkpointer.save(name, iteration=last)

    def before_step(self) -> None:
        if self._is_too_long():  # the run that is resumed has ended so
            self._end(self.trainer.iter)
        now = self.trainer.iter
        is_first = now == self.trainer.start_iter
        if is_first and now % self._period == 0 and now != self._evaluated + 1:
            self._evaluate_as_after(now - 1)
            self.trainer.iter = self.trainer.storage.iter = now

    def _evaluate_as_after(self, iteration: int) -> None:
        self.trainer.iter = self.trainer.storage.iter = iteration
        for hook in compat.hooks_of(self.trainer):
            if isinstance(hook, EvalHook):
                hook.after_step()
        self.after_step()

    def after_step(self) -> None:
        done = self.trainer.iter + 1
        if self._period > 0 and done % self._period == 0 and done != self.trainer.max_iter:
            self._look_at_results()
        if self._is_too_long() and done < self.trainer.max_iter:
            # The evaluations of this period have just been done.
            compat.replace_evaluations(self.trainer, lambda run: lambda: None, self._period)
            self._end(done)

    def _is_too_long(self) -> bool:
        return self._patience is not None and self._evaluations_since >= self._patience

    def _end(self, iteration: int) -> None:
        """End as if ``iteration`` were MAX_ITER."""
        logger.warning(
            "MEMFIT.BEST.PATIENCE: the run ends after iteration %d, because %s was not better in "
            "%d evaluations. %s",
            iteration - 1,
            self._metric,
            self._evaluations_since,
            self._best_so_far(),
        )
        self._has_ended = True
        self.trainer.max_iter = iteration
        self.trainer.gather_states()
        if any(isinstance(h, PeriodicCheckpointer) for h in compat.hooks_of(self.trainer)):
            self._save("model_final")  # as after the last iteration
        self.trainer.iter = iteration
        raise TrainingEnded

    def after_train(self) -> None:
        if not self._has_ended and self.trainer.iter + 1 >= self.trainer.max_iter:
            self._look_at_results()

    def state_dict(self) -> dict[str, Any]:
        return {
            "best_metric": self.best_metric,
            "best_iter": self.best_iter,
            "evaluations_since": self._evaluations_since,
            "evaluated": self._evaluated,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.best_metric = state_dict["best_metric"]
        self.best_iter = state_dict["best_iter"]
        self._evaluations_since = state_dict["evaluations_since"]
        self._evaluated = state_dict.get("evaluated", -1)
