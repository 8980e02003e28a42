#!/usr/bin/env python3
# Copyright (c) the d2_memfit developers.
"""Train a detector on tiles of images, and evaluate it on whole images.

projects/TiledImages/train_tiles.py --config-file FILE --coco NAME JSON IMAGE_DIR ...
    [--num-gpus N] [--resume] [--eval-only] [KEY VALUE ...]
"""

from d2_memfit.common.library_warnings import ignore_warnings_of_libraries

ignore_warnings_of_libraries()

import argparse

from detectron2.config import CfgNode
from detectron2.engine import default_argument_parser, default_setup
from tiled_images import TiledTrainer, fit_tiled_config, load_tiled_cfg

from d2_memfit import MemfitMixin
from d2_memfit.cli.command_line import add_options
from d2_memfit.data.registration import check_datasets, register_coco
from d2_memfit.engine.checkpoint import MemfitCheckpointer
from d2_memfit.engine.launch import launch
from d2_memfit.errors import exit_on_error
from d2_memfit.memory import use_expandable_segments


class Trainer(MemfitMixin, TiledTrainer):
    pass


def setup(args: argparse.Namespace) -> CfgNode:
    for dataset in args.coco:
        register_coco(*dataset)
    cfg = load_tiled_cfg(args.config_file, args.opts)
    check_datasets(cfg, args.eval_only)
    return cfg


@exit_on_error
def main(args: argparse.Namespace) -> None:
    """Run one rank."""
    cfg = setup(args)
    default_setup(cfg, args)
    if args.eval_only:
        model = Trainer.build_model(cfg)
        checkpointer = MemfitCheckpointer(model, cfg.OUTPUT_DIR)
        checkpointer.resume_or_load(cfg.MODEL.WEIGHTS, resume=args.resume)
        Trainer.test(cfg, model)
        return
    trainer = Trainer(fit_tiled_config(cfg))
    trainer.resume_or_load(resume=args.resume)
    trainer.train()


@exit_on_error
def run() -> None:
    parser = default_argument_parser(epilog=__doc__)
    add_options(parser, "--coco")
    args = parser.parse_args()
    memfit = setup(args).MEMFIT
    if memfit.BUDGET_GB is not None or memfit.PRESET:
        use_expandable_segments()  # before anything queries the GPU
    launch(main, args.num_gpus, args.num_machines, args.machine_rank, args.dist_url, args=(args,))


if __name__ == "__main__":
    run()
