#!/usr/bin/env python3
# Copyright (c) the d2_memfit developers.
"""Train or evaluate a detector of the transformers library.

projects/Transformers/train_transformers.py --config-file FILE [--coco NAME JSON IMAGE_DIR ...]
    [--card SIZE] [--num-gpus N] [--resume] [--eval-only] [KEY VALUE ...]
"""

from d2_memfit.common.library_warnings import ignore_warnings_of_libraries

ignore_warnings_of_libraries()

import argparse

from d2_transformers import Trainer, add_transformers_config
from detectron2.config import CfgNode
from detectron2.engine import default_argument_parser, default_setup
from detectron2.evaluation import verify_results
from detectron2.utils import comm

from d2_memfit import fit_config
from d2_memfit.cli.command_line import add_card_and_coco_options
from d2_memfit.cli.options import check_opts, opts_of_budget, opts_of_settings, settings_of_data
from d2_memfit.config import check_config, load_cfg
from d2_memfit.data import check_datasets, register_coco
from d2_memfit.engine import launch, usable_device, world_size
from d2_memfit.engine.resuming import MemfitCheckpointer
from d2_memfit.errors import exit_on_error
from d2_memfit.memory import use_expandable_segments

ADD_KEYS = [add_transformers_config]


def make_cfg(args: argparse.Namespace) -> CfgNode:
    for dataset in args.coco:
        register_coco(*dataset)
    cfg = load_cfg(args.config_file, args.opts, ADD_KEYS)
    cfg.MODEL.DEVICE = usable_device(cfg.MODEL.DEVICE)
    cfg.freeze()
    return cfg


@exit_on_error
def main(args: argparse.Namespace) -> None:
    """Run one rank."""
    cfg = make_cfg(args)
    default_setup(cfg, args)
    if args.eval_only:
        model = Trainer.build_model(cfg)
        checkpointer = MemfitCheckpointer(model, cfg.OUTPUT_DIR)
        if cfg.TRANSFORMERS.WEIGHTS:
            model.load_pretrained(cfg.TRANSFORMERS.WEIGHTS)
        checkpointer.resume_or_load(cfg.MODEL.WEIGHTS, resume=args.resume)
        results = Trainer.test(cfg, model)
        if comm.is_main_process():
            verify_results(cfg, results)
        return
    trainer = Trainer(fit_config(cfg, Trainer))
    trainer.resume_or_load(resume=args.resume)
    trainer.train()


@exit_on_error
def run() -> None:
    parser = default_argument_parser(epilog=__doc__)
    add_card_and_coco_options(parser)
    args = parser.parse_args()
    check_opts(args.opts)
    opts = [*opts_of_budget(args.card, None, args.opts), *args.opts]
    settings = settings_of_data(
        args.coco, args.config_file, opts, ADD_KEYS, eval_only=args.eval_only, reads_images=True
    )
    args.opts = [*opts_of_settings(settings), *opts]
    cfg = make_cfg(args)
    check_config(cfg, world_size(args.num_gpus, args.num_machines))
    check_datasets(cfg, args.eval_only)
    if cfg.MEMFIT.BUDGET_GB is not None or cfg.MEMFIT.PRESET:
        use_expandable_segments()  # before anything queries the GPU
    launch(main, args.num_gpus, args.num_machines, args.machine_rank, args.dist_url, args=(args,))


if __name__ == "__main__":
    run()
