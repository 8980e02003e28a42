# Copyright (c) the d2_memfit developers.
"""Projects with a trainer class: ``class Trainer(MemfitMixin, TheirTrainer)``."""

import gc
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Optional

from detectron2.config import CfgNode
from detectron2.engine import HookBase
from detectron2.engine.hooks import PeriodicCheckpointer

from d2_memfit import Job, MemfitMixin
from d2_memfit.config import with_memfit_keys
from d2_memfit.measure.injection import seed_all

from .project import DATASET, load
from .subject import (
    FULL_SIZE,
    NUM_ITERATIONS,
    Outcome,
    Parts,
    Replay,
    Subject,
    recorded_losses,
    state_of,
)

__all__ = ["TrainerSubject"]


class TrainerSubject(Subject):
    """A project with a trainer class, see :class:`Subject`."""

    @property
    def plain_class(self) -> Any:
        return load(self.project.trainer)

    @property
    def memfit_class(self) -> Any:
        if self.project.memfit_trainer:
            return load(self.project.memfit_trainer)()
        return type("Trainer", (MemfitMixin, self.plain_class), {})

    def make_cfg(
        self, settings: Mapping[str, Any], name: str = "out", full_size: bool = False
    ) -> CfgNode:
        cfg = self.project.make_cfg(self.tree, self.scratch / name, full_size)
        if any(key.startswith("MEMFIT") or "ACCUMULATION" in key for key in settings):
            cfg = with_memfit_keys(cfg)
        for key, value in settings.items():
            cfg.merge_from_list([key, value])
        (self.scratch / name).mkdir(exist_ok=True)
        return cfg

    def settings(self, images: int) -> dict[str, Any]:
        return dict.fromkeys(self.project.image_keys, images)

    def run(
        self,
        settings: Mapping[str, Any] = {},
        batches: Optional[Sequence[Any]] = None,
        num_iterations: int = NUM_ITERATIONS,
        saves: bool = False,
        resumes: bool = False,
        plain: bool = False,
        name: str = "out",
    ) -> Outcome:
        gc.collect()  # trainers and their hooks know each other
        base = self.plain_class if plain else self.memfit_class
        body: dict[str, Any] = {"build_writers": lambda self: []}
        if batches is not None:
            start = 1 if resumes else 0
            body["build_train_loader"] = classmethod(lambda cls, cfg: Replay(batches, start))
        trainer_class = type("Trainer", (base,), body)
        seed_all(1)
        period = {"SOLVER.CHECKPOINT_PERIOD": 1} if saves else {}
        cfg = self.make_cfg({**settings, **period}, name)
        trainer = trainer_class(cfg)
        if resumes:
            trainer.resume_or_load(resume=True)
        if not saves:  # nor when it ends
            kept = [h for h in trainer._hooks if not isinstance(h, PeriodicCheckpointer)]
            trainer._hooks = kept
        trainer.register_hooks([_Stop(num_iterations, reseeds=batches is not None)])
        with recorded_losses() as losses, suppress(_Stopped):
            trainer.train()
        return Outcome(losses, state_of(trainer.model, trainer.optimizer))

    def parts(self, settings: Mapping[str, Any] = {}) -> Parts:
        cfg, trainer = self.make_cfg(settings), self.plain_class
        seed_all(1)
        model = trainer.build_model(cfg)
        optimizer = trainer.build_optimizer(cfg, model)
        return Parts(model.train(), optimizer, trainer.build_train_loader(cfg))

    def job(self, settings: Mapping[str, Any] = {}, full_size: bool = False) -> Job:
        cfg = self.make_cfg({"DATASETS.TEST": (DATASET,), **settings}, full_size=full_size)
        facts = FULL_SIZE if full_size else {}
        return Job.from_trainer(self.memfit_class, cfg, ranks=1, **facts)


class _Stopped(Exception):
    pass


class _Stop(HookBase):
    """A hook that ends training early, as if the process was killed after a checkpoint."""

    def __init__(self, num_iterations: int, reseeds: bool) -> None:
        self._num_iterations = num_iterations
        self._reseeds = reseeds

    def before_step(self) -> None:
        if self._reseeds:
            seed_all(100 + self.trainer.iter)

    def after_step(self) -> None:
        if self.trainer.iter + 1 == self._num_iterations < self.trainer.max_iter:
            raise _Stopped
