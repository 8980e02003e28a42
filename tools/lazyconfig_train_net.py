#!/usr/bin/env python3
"""Train or evaluate by a LazyConfig: Detectron2's tools/lazyconfig_train_net.py, with accumulation.

    tools/lazyconfig_train_net.py --config-file FILE.py [--num-gpus N] [--resume] [path.key=value]

FILE.py is a file, or the name of one in Detectron2's model zoo. Beside the fields of Detectron2's
configs/common/train.py it may have:

    train.accumulation_steps    batches from the loader behind one optimizer step (1)
    train.micro_batch           images in one forward on each rank (None: the loader's batch)
    train.amp.enabled           mixed precision (False)
    train.amp.dtype             "float16" or "bfloat16" ("float16")
    train.budget_gb             as MEMFIT.BUDGET_GB, a number or "auto" (None)
    train.oom                   a dict with the keys of MEMFIT.OOM in lower case ({})
    train.memfit                the same for techniques and the monitor, such as
                                {"checkpoint": {"modules": ["backbone"]}} ({})
"""

import argparse
from typing import Any, Optional

from d2_memfit.quiet import ignore_warnings_of_libraries

ignore_warnings_of_libraries()

import torch
from detectron2.config import CfgNode, LazyConfig, instantiate
from detectron2.engine import default_argument_parser, default_setup, default_writers, hooks
from detectron2.evaluation import inference_on_dataset, print_csv_format
from detectron2.utils import comm
from detectron2.utils.logger import setup_logger
from omegaconf import DictConfig

from d2_memfit import AccumulatingTrainer
from d2_memfit.checks import check_positive_int
from d2_memfit.compat import create_ddp_model, local_world_size, without_ddp
from d2_memfit.config import cfg_of_techniques
from d2_memfit.config_files import find_config_file
from d2_memfit.engine import (
    ConsolidateOptimizer,
    MemfitCheckpointer,
    Precision,
    RecoveryOptions,
    launch,
    memory_hooks,
    recovering_inference,
    usable_device,
)
from d2_memfit.errors import ConfigError, exit_on_error
from d2_memfit.evaluation import use_available_implementation
from d2_memfit.memory import (
    auto_budget_gb,
    check_budget,
    enforce_budget,
    use_expandable_segments,
)
from d2_memfit.techniques import ShardedOptimizer, apply_techniques, ready_to_evaluate


def evaluate(cfg: DictConfig, model: torch.nn.Module) -> Optional[dict[str, Any]]:
    if "evaluator" not in cfg.dataloader:
        return None
    memfit, options = techniques(cfg.train), recovery_options(cfg.train)
    with ready_to_evaluate(without_ddp(model), memfit), recovering_inference(model, options):
        results = inference_on_dataset(
            model, instantiate(cfg.dataloader.test), instantiate(cfg.dataloader.evaluator)
        )
    print_csv_format(results)
    return results


def train(cfg: DictConfig, model: torch.nn.Module, resume: bool) -> None:
    memfit = techniques(cfg.train)
    model = apply_techniques("model", model, memfit)
    cfg.optimizer.params.model = model
    optimizer = apply_techniques("optimizer", instantiate(cfg.optimizer), memfit)
    model = create_ddp_model(model, **apply_techniques("ddp", dict(cfg.train.ddp), memfit))
    build_loader = apply_techniques("loader", instantiate, memfit)
    loader = build_loader(cfg.dataloader.train)
    trainer = AccumulatingTrainer(model, loader, optimizer, **accumulation(cfg.train))
    checkpointer = MemfitCheckpointer(model, cfg.train.output_dir, trainer=trainer)
    is_main = comm.is_main_process()
    writers = default_writers(cfg.train.output_dir, cfg.train.max_iter) if is_main else []
    periods = cfg.train.checkpointer.period, cfg.train.eval_period
    is_sharded = isinstance(optimizer, ShardedOptimizer)
    trainer.register_hooks(
        [
            *memory_hooks(memfit.MEMFIT.MONITOR, cfg.train.output_dir, cfg.train.get("budget_gb")),
            hooks.IterationTimer(),
            ConsolidateOptimizer(optimizer, *periods) if is_sharded else None,
            hooks.LRScheduler(scheduler=instantiate(cfg.lr_multiplier)),
            hooks.PeriodicCheckpointer(checkpointer, **cfg.train.checkpointer) if is_main else None,
            hooks.EvalHook(cfg.train.eval_period, lambda: evaluate(cfg, model)),
            hooks.PeriodicWriter(writers, period=cfg.train.log_period) if is_main else None,
        ]
    )
    checkpointer.resume_or_load(cfg.train.init_checkpoint, resume=resume)
    # The checkpoint has the iteration that was just finished.
    start_iter = trainer.iter + 1 if resume and checkpointer.has_checkpoint() else 0
    trainer.train(start_iter, cfg.train.max_iter)


def accumulation(cfg_train: DictConfig) -> dict[str, Any]:
    """The arguments of AccumulatingTrainer that a config gives, checked."""
    steps = cfg_train.get("accumulation_steps", 1)
    micro_batch = cfg_train.get("micro_batch")
    check_positive_int("train.accumulation_steps", steps)
    if micro_batch is not None:
        check_positive_int("train.micro_batch", micro_batch)
    dtype = cfg_train.amp.get("dtype", "float16") if cfg_train.amp.enabled else "float32"
    return {
        "accumulation_steps": steps,
        "precision": Precision(dtype, cfg_train.device),
        "images_per_micro_batch": micro_batch,
        "recovery": recovery_options(cfg_train),
    }


def recovery_options(cfg_train: DictConfig) -> Optional[RecoveryOptions]:
    oom, budget_gb = cfg_train.get("oom", {}), cfg_train.get("budget_gb")
    check_budget(budget_gb)
    return RecoveryOptions.from_keys(oom, cfg_train.output_dir, budget_gb)


def techniques(cfg_train: DictConfig) -> CfgNode:
    """The config for techniques and the monitor, checked."""
    memfit = cfg_of_techniques(cfg_train.get("memfit", {}))
    if memfit.MEMFIT.HOST.BUDGET_GB is not None:
        raise ConfigError(
            "train.memfit.host.budget_gb cannot be used in a LazyConfig: lower "
            "dataloader.train.num_workers"
        )
    elsewhere = {"micro_batch", "amp_dtype", "budget_gb", "oom"}
    for key in elsewhere & set(cfg_train.get("memfit", {})):
        name = "amp.dtype" if key == "amp_dtype" else key
        raise ConfigError(f"train.memfit.{key} is train.{name} in a LazyConfig")
    return memfit


def load_config(args: argparse.Namespace) -> DictConfig:
    args.config_file = find_config_file(args.config_file, ".py")
    cfg = LazyConfig.apply_overrides(LazyConfig.load(args.config_file), args.opts)
    cfg.train.device = usable_device(cfg.train.device)
    techniques(cfg.train)
    if "evaluator" in cfg.dataloader:
        use_available_implementation(cfg.dataloader.evaluator)
    return cfg


@exit_on_error
def main(args: argparse.Namespace) -> None:
    """What every rank does."""
    cfg = load_config(args)
    default_setup(cfg, args)
    logger = setup_logger(cfg.train.output_dir, distributed_rank=comm.get_rank(), name="d2_memfit")
    if cfg.train.device == "cpu" and not torch.cuda.is_available():
        logger.warning("No GPU is visible: running on the CPU")

    if cfg.train.get("budget_gb") == "auto":
        cfg.train.budget_gb = auto_budget_gb(cfg.train.device, local_world_size())
    enforce_budget(cfg.train.get("budget_gb"), cfg.train.device)
    model = instantiate(cfg.model).to(cfg.train.device)
    logger.info("Model:\n%s", model)
    if args.eval_only:
        MemfitCheckpointer(model).load(cfg.train.init_checkpoint)
        evaluate(cfg, create_ddp_model(model))
    else:
        train(cfg, model, args.resume)


@exit_on_error
def run() -> None:
    args = default_argument_parser(epilog=__doc__).parse_args()
    cfg = load_config(args)
    if cfg.train.get("budget_gb") is not None:
        use_expandable_segments()  # before anything asks the GPU
    if args.eval_only:
        recovery_options(cfg.train)
    else:
        accumulation(cfg.train)
    # What is wrong is found before a process is started or anything is written.
    checkpointer = MemfitCheckpointer(torch.nn.Module(), cfg.train.output_dir)
    checkpointer.check(cfg.train.init_checkpoint, resume=args.resume and not args.eval_only)
    launch(main, args.num_gpus, args.num_machines, args.machine_rank, args.dist_url, args=(args,))


if __name__ == "__main__":
    run()
