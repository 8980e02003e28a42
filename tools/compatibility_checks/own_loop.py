# Copyright (c) the d2_memfit developers.
"""Projects with their own loop, and LazyConfigs: ``build_trainer`` makes the trainer."""

import gc
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Optional

import torch
from detectron2.checkpoint import PeriodicCheckpointer
from detectron2.config import LazyConfig, instantiate
from detectron2.utils.events import EventStorage

from d2_memfit import Job
from d2_memfit.config import with_memfit_keys
from d2_memfit.engine import MemfitCheckpointer, build_trainer
from d2_memfit.measure.injection import seed_all

from . import loops
from .project import DATASET
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

__all__ = ["LazySubject", "LoopSubject"]


class LoopSubject(Subject):
    """A project whose script has a loop. A class in ``loops`` has the code before the loop."""

    @property
    def loop(self) -> Any:
        return getattr(loops, self.project.trainer)

    def make_cfg(self, settings: Mapping[str, Any], name: str, full_size: bool = False) -> Any:
        cfg = self.project.make_cfg(self.tree, self.scratch / name, full_size)
        cfg = with_memfit_keys(cfg)
        for key, value in settings.items():
            cfg.merge_from_list([key, value])
        return cfg

    def job(self, settings: Mapping[str, Any] = {}, full_size: bool = False) -> Job:
        cfg = self.make_cfg({"DATASETS.TEST": (DATASET,), **settings}, "job", full_size)
        return Job.from_trainer(self.loop, cfg, ranks=1, **(FULL_SIZE if full_size else {}))

    def parts(self, settings: Mapping[str, Any] = {}) -> Parts:
        cfg = self.make_cfg(settings, "parts")
        seed_all(1)
        model = self.loop.build_model(cfg)
        optimizer = self.loop.build_optimizer(cfg, model)
        return Parts(model.train(), optimizer, self.loop.build_train_loader(cfg))

    def make_scheduler(self, job: Job, optimizer: torch.optim.Optimizer) -> Any:
        return self.loop.build_lr_scheduler(job.cfg, optimizer)

    def trainer_options(self) -> dict[str, Any]:
        """Keyword arguments of ``AccumulatingTrainer``."""
        return {}

    def run_plain(self, cfg: Any) -> Any:
        """Run two iterations of the project's own loop; return the model."""
        model = self.loop.build_model(cfg)
        self.loop.train(cfg, model)
        return model

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
        gc.collect()
        (self.scratch / name).mkdir(exist_ok=True)
        with recorded_losses() as losses:
            if plain:
                cfg = self.make_cfg(settings, name)
                seed_all(1)
                return Outcome(losses, state_of(self.run_plain(cfg), None))
            job = self.job({**self.no_evaluation, **settings})
            seed_all(1)
            loader = None if batches is None else Replay(batches, start=int(resumes))
            trainer = build_trainer(job, data_loader=loader, **self.trainer_options())
            trainer.model.train()
            scheduler = self.make_scheduler(job, trainer.optimizer)
            checkpointer = MemfitCheckpointer(
                trainer.model, str(self.scratch / name), trainer=trainer, scheduler=scheduler
            )
            start = checkpointer.resume_or_load("", resume=resumes).get("iteration", -1) + 1
            saver = PeriodicCheckpointer(checkpointer, 1, NUM_ITERATIONS)
            with EventStorage(start) as storage:
                for iteration in range(start, num_iterations):
                    if batches is not None:
                        seed_all(100 + iteration)
                    trainer.iter = iteration
                    trainer.run_step()
                    scheduler.step()
                    if saves:
                        saver.step(iteration)
                    storage.step()
        return Outcome(losses, state_of(trainer.model, trainer.optimizer))


class LazySubject(LoopSubject):
    """A project with LazyConfigs."""

    no_evaluation: Mapping[str, Any] = {"compatibility.evaluates": False}

    def settings(self, images: int) -> dict[str, Any]:
        return {"dataloader.train.total_batch_size": images}

    def make_cfg(self, settings: Mapping[str, Any], name: str, full_size: bool = False) -> Any:
        cfg = LazyConfig.load(str(self.tree / self.project.config_file))
        always = [
            *("train.device=cpu", f"train.max_iter={NUM_ITERATIONS}", "train.init_checkpoint=''"),
            *("dataloader.train.num_workers=0", "dataloader.test.num_workers=0"),
            *(f"dataloader.{split}.dataset.names={DATASET}" for split in ("train", "test")),
            f"train.output_dir={self.scratch / name}",
        ]
        LazyConfig.apply_overrides(cfg, [*always, *self.project.opts])
        if not full_size:
            LazyConfig.apply_overrides(cfg, [*self.project.small])
        if not settings.get("compatibility.evaluates", True):
            del cfg.dataloader.evaluator
        for key, value in settings.items():
            if key.isupper() or key.startswith("compatibility."):  # keys of yacs are the job's
                continue
            LazyConfig.apply_overrides(cfg, [f"{key}={value}"])
        return cfg

    def job(self, settings: Mapping[str, Any] = {}, full_size: bool = False) -> Job:
        facts = FULL_SIZE if full_size else {}
        job = Job.from_lazy(self.make_cfg(settings, "job", full_size), ranks=1, **facts)
        return job.with_settings({k: v for k, v in settings.items() if k.isupper()})

    def parts(self, settings: Mapping[str, Any] = {}) -> Parts:
        cfg = self.make_cfg(settings, "parts")
        seed_all(1)
        model = instantiate(cfg.model)
        cfg.optimizer.params.model = model
        return Parts(model.train(), instantiate(cfg.optimizer), instantiate(cfg.dataloader.train))

    def make_scheduler(self, job: Job, optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)

    def _clip(self) -> Callable[..., Any]:
        options = self.make_cfg({}, "job").train.clip_grad.params
        return partial(torch.nn.utils.clip_grad_norm_, **options)

    def trainer_options(self) -> dict[str, Any]:
        return {"clip_gradients": self._clip()}

    def step(self, parts: Parts) -> None:
        self._clip()([p for p in parts.model.parameters() if p.grad is not None])
        parts.optimizer.step()

    def run_plain(self, cfg: Any) -> Any:
        """Train like the project's trainer, which asserts that there is a GPU."""
        model = instantiate(cfg.model).train()
        cfg.optimizer.params.model = model
        optimizer = instantiate(cfg.optimizer)
        loader = iter(instantiate(cfg.dataloader.train))
        with EventStorage() as storage:
            for _ in range(NUM_ITERATIONS):
                losses = model(next(loader))
                loss = sum(losses.values())
                storage.put_scalar("total_loss", sum(v.item() for v in losses.values()))
                optimizer.zero_grad()
                loss.backward()
                self.step(Parts(model, optimizer, loader))
                storage.step()
        return model
