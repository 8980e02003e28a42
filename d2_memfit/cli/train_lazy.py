# Copyright (c) the d2_memfit developers.
"""Train or evaluate a LazyConfig: Detectron2's tools/lazyconfig_train_net.py, with accumulation.

    d2-memfit train --config-file FILE.py [--num-gpus N] [--resume] [path.key=value]

FILE.py is a file, or the name of one in Detectron2's model zoo. In addition to the fields of
Detectron2's configs/common/train.py, it may have:

    train.accumulation_steps    batches from the loader per optimizer step (1)
    train.amp.enabled           mixed precision (False)
    train.memfit                a dict with the keys of MEMFIT in lower case, such as
                                {"budget_gb": 6, "oom": {"policy": "split"}} ({})
"""

import argparse
import inspect
import logging
from typing import Any, Optional
from unittest.mock import patch

import torch
from detectron2.config import instantiate
from detectron2.engine import default_writers, hooks
from detectron2.evaluation import COCOEvaluator, print_csv_format
from detectron2.utils import comm
from detectron2.utils.registry import locate
from omegaconf import DictConfig, ListConfig

from ..compat import create_ddp_model, has_compiled_ops
from ..config.files import find_config_file
from ..config.lazy import cfg_of_lazy
from ..config.precision import Precision
from ..config.settings import check_settings
from ..engine.build import build_trainer
from ..engine.checkpoint import MemfitCheckpointer
from ..engine.ending import causes_named
from ..engine.evaluating import evaluating
from ..engine.launch import usable_device, world_size
from ..errors import ConfigError, exit_on_error
from ..job import Job, load_lazy_config
from ..memory import enforce_budget, use_expandable_segments
from ..planner.fit_config import fit_config
from ..predict.predictor import WholeModelCheckpointer
from .next_step import after_training
from .options import opts_of_budget, opts_of_fit, with_opts
from .run_folder import check_folder, set_up_rank
from .screen import progress_hooks, show

__all__ = ["main", "prepare"]


def evaluate(job: Job, model: torch.nn.Module) -> Optional[dict[str, Any]]:
    if not job.evaluates:
        return None
    with evaluating(job.cfg, model):
        results = job.parts.test(model)
    print_csv_format(results)
    return results


def _use_available_implementation(evaluator: Any) -> None:
    """Let each LazyCall of COCOEvaluator without a choice take an implementation that is there."""
    for call in evaluator if isinstance(evaluator, ListConfig) else [evaluator]:
        target = locate(call._target_) if isinstance(call._target_, str) else call._target_
        if inspect.isclass(target) and issubclass(target, COCOEvaluator):
            call.setdefault("use_fast_impl", has_compiled_ops())


def train(cfg: DictConfig, job: Job, resume: bool) -> None:
    trainer = build_trainer(job)
    model = trainer.model
    logging.getLogger("d2_memfit").info("Model:\n%s", model)
    checkpointer = MemfitCheckpointer(model, cfg.train.output_dir, trainer=trainer)
    is_main = comm.is_main_process()
    writers = default_writers(cfg.train.output_dir, cfg.train.max_iter) if is_main else []
    trainer.register_hooks(
        [
            hooks.IterationTimer(),
            hooks.LRScheduler(scheduler=instantiate(cfg.lr_multiplier)),
            hooks.PeriodicCheckpointer(checkpointer, **cfg.train.checkpointer) if is_main else None,
            hooks.EvalHook(cfg.train.eval_period, lambda: evaluate(job, model)),
            hooks.PeriodicWriter(writers, period=cfg.train.log_period) if is_main else None,
            *(progress_hooks(cfg.train.max_iter) if is_main else []),
        ]
    )
    checkpointer.resume_or_load(cfg.train.init_checkpoint, resume=resume)
    # The checkpoint has the iteration that was just finished.
    start_iter = trainer.iter + 1 if resume and checkpointer.has_checkpoint() else 0
    trainer.train(start_iter, cfg.train.max_iter)
    if is_main:
        show(after_training(cfg.train.output_dir, [], checkpointer.get_checkpoint_file()))


def load_config(args: argparse.Namespace) -> DictConfig:
    args.config_file = find_config_file(args.config_file, ".py")
    cfg = load_lazy_config(args.config_file, args.opts)
    cfg = with_opts(cfg, opts_of_budget(args.card, args.budget, args.opts))
    if args.fit:
        values = opts_of_fit(cfg_of_lazy(cfg), args.eval_only)
        cfg = with_opts(cfg, [text for pair in values.items() for text in pair])
    cfg.train.device = usable_device(cfg.train.device)
    if "evaluator" in cfg.dataloader:
        _use_available_implementation(cfg.dataloader.evaluator)
    return cfg


@exit_on_error
@causes_named()
@patch.object(logging, "raiseExceptions", False)  # on a full disk, no traceback for each line
def main(args: argparse.Namespace) -> None:
    """Run one rank."""
    cfg = load_config(args)
    set_up_rank(args, cfg, cfg.train.output_dir, cfg.train.device)
    if args.eval_only:
        job = Job.from_lazy(cfg)
        enforce_budget(job.budget_gb, cfg.train.device)
        model = job.parts.build_model(cfg.train.device)
        checkpointer = WholeModelCheckpointer(model, cfg.train.output_dir)
        checkpointer.resume_or_load(cfg.train.init_checkpoint, resume=args.resume)
        evaluate(job, create_ddp_model(model))
        last = checkpointer.get_checkpoint_file() if args.resume else ""
        weights = last or cfg.train.init_checkpoint
        if comm.is_main_process() and weights:
            show(after_training(cfg.train.output_dir, [], weights, eval_only=True))
    else:
        cfg = fit_config(cfg)
        train(cfg, Job.from_lazy(cfg), args.resume)


def prepare(args: argparse.Namespace) -> None:
    """Check all that can be checked before a process starts. Nothing is written."""
    for name in ("coco", "hold_out", "training_only"):
        if getattr(args, name):
            option = "--" + name.replace("_", "-")
            raise ConfigError(
                f"{option} only works with yaml configs. A LazyConfig itself says what is built"
            )
    cfg = load_config(args)
    ranks = world_size(args.num_gpus, args.num_machines)
    keys = check_settings(cfg_of_lazy(cfg), ranks, trains=not args.eval_only)
    Precision.from_cfg(keys)
    if keys.MEMFIT.BUDGET_GB is not None or keys.MEMFIT.PRESET:
        use_expandable_segments()  # before anything queries the GPU
    check_folder(args, cfg.train.output_dir, cfg.train.init_checkpoint)
