#!/usr/bin/env python3
"""Train or evaluate a detector: Detectron2's tools/train_net.py, with the keys of d2_memfit.

    tools/train_net.py --config-file FILE [--num-gpus N] [--resume] [--eval-only] [KEY VALUE ...]
    tools/train_net.py --coco NAME JSON IMAGE_DIR ... DATASETS.TRAIN "('NAME',)"
    torchrun --nproc-per-node N tools/train_net.py --config-file FILE

Without a GPU it trains on the CPU, on N processes with --num-gpus N.
"""

import argparse
import os
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, Optional

import torch
from detectron2.config import CfgNode
from detectron2.engine import default_argument_parser, default_setup, hooks
from detectron2.evaluation import DatasetEvaluator, verify_results
from detectron2.modeling import GeneralizedRCNNWithTTA
from detectron2.utils import comm
from detectron2.utils.logger import setup_logger
from torch import nn

from d2_memfit import MemfitTrainer, fit_config
from d2_memfit.config import check_config, check_plan, load_cfg
from d2_memfit.data import add_coco_option, check_coco_file, check_datasets, register_coco
from d2_memfit.engine import (
    MemfitCheckpointer,
    Precision,
    RecoveryOptions,
    launch,
    usable_device,
    world_size,
)
from d2_memfit.errors import ConfigError, exit_on_error
from d2_memfit.evaluation import build_evaluator
from d2_memfit.memory import use_expandable_segments
from d2_memfit.presets import with_preset


class Trainer(MemfitTrainer):
    @classmethod
    def build_evaluator(
        cls, cfg: CfgNode, dataset_name: str, output_folder: Optional[str] = None
    ) -> DatasetEvaluator:
        return build_evaluator(cfg, dataset_name, output_folder)

    @classmethod
    def test_with_TTA(cls, cfg: CfgNode, model: nn.Module) -> dict[str, Any]:
        """Evaluate with test-time augmentation, which R-CNNs can do."""
        folder = os.path.join(cfg.OUTPUT_DIR, "inference_TTA")
        evaluators = [cls.build_evaluator(cfg, name, folder) for name in cfg.DATASETS.TEST]
        results = cls.test(cfg, GeneralizedRCNNWithTTA(cfg, model), evaluators)
        return OrderedDict((k + "_TTA", v) for k, v in results.items())


def parse_args(argv: Optional[Sequence[str]] = None) -> argparse.Namespace:
    parser = default_argument_parser(epilog=__doc__)
    add_coco_option(parser)
    return parser.parse_args(argv)


def make_cfg(args: argparse.Namespace) -> CfgNode:
    for dataset in args.coco:
        register_coco(*dataset)
    cfg = with_preset(load_cfg(args.config_file, args.opts))
    cfg.MODEL.DEVICE = usable_device(cfg.MODEL.DEVICE)
    cfg.freeze()
    return cfg


def check(args: argparse.Namespace) -> None:
    """Find what cannot work before a process is started or OUTPUT_DIR is touched."""
    cfg = make_cfg(args)
    ranks = world_size(args.num_gpus, args.num_machines)
    if not args.eval_only:
        check_config(cfg)
        check_config(Trainer.auto_scale_workers(cfg, ranks), ranks)
    Precision.from_cfg(cfg)
    RecoveryOptions.from_cfg(cfg)
    check_plan(cfg)
    for name, json_file, image_dir in args.coco:
        trains = name in cfg.DATASETS.TRAIN and not args.eval_only
        if trains or name in cfg.DATASETS.TEST:
            needs_objects = trains and cfg.DATALOADER.FILTER_EMPTY_ANNOTATIONS
            check_coco_file(name, json_file, image_dir, needs_objects)
    check_datasets(cfg, args.eval_only)
    if os.path.exists(cfg.OUTPUT_DIR) and not os.path.isdir(cfg.OUTPUT_DIR):
        raise ConfigError(f"OUTPUT_DIR must be a folder, and {cfg.OUTPUT_DIR} is a file")
    checkpointer = MemfitCheckpointer(torch.nn.Module(), cfg.OUTPUT_DIR)
    checkpointer.check(cfg.MODEL.WEIGHTS, resume=args.resume)


@exit_on_error
def main(args: argparse.Namespace) -> None:
    """What every rank does."""
    cfg = make_cfg(args)
    default_setup(cfg, args)
    logger = setup_logger(cfg.OUTPUT_DIR, distributed_rank=comm.get_rank(), name="d2_memfit")
    if cfg.MODEL.DEVICE == "cpu" and not torch.cuda.is_available():
        logger.warning("No GPU is visible: running on the CPU")

    if args.eval_only:
        model = Trainer.build_model(cfg)
        checkpointer = MemfitCheckpointer(model, cfg.OUTPUT_DIR)
        checkpointer.resume_or_load(cfg.MODEL.WEIGHTS, resume=args.resume)
        results = Trainer.test(cfg, model)
        if cfg.TEST.AUG.ENABLED:
            results.update(Trainer.test_with_TTA(cfg, model))
        if comm.is_main_process():
            verify_results(cfg, results)
        return

    cfg = fit_config(cfg)
    trainer = Trainer(cfg)
    trainer.resume_or_load(resume=args.resume)
    if cfg.TEST.AUG.ENABLED:
        trainer.register_hooks(
            [hooks.EvalHook(0, lambda: trainer.test_with_TTA(cfg, trainer.model))]
        )
    trainer.train()


@exit_on_error
def run() -> None:
    args = parse_args()
    if make_cfg(args).MEMFIT.BUDGET_GB is not None:
        use_expandable_segments()  # before anything asks the GPU
    check(args)
    launch(main, args.num_gpus, args.num_machines, args.machine_rank, args.dist_url, args=(args,))


if __name__ == "__main__":
    run()
