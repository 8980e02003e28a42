# Copyright (c) the d2_memfit developers.
"""Train or evaluate a detector: Detectron2's tools/train_net.py, with the keys of d2_memfit.

    d2-memfit train --config-file FILE --fit --coco NAME JSON IMAGE_DIR ...
    d2-memfit train --config-file FILE [--num-gpus N] [--resume] [--eval-only] [KEY VALUE ...]
    torchrun --nproc-per-node N -m d2_memfit train --config-file FILE

FILE is a file, or the name of a config in Detectron2's model zoo or ours. One that ends in .py is a
LazyConfig, which takes path.key=value. Without a GPU it trains on the CPU, on N processes with
--num-gpus N. In a checkout, tools/train_net.py is the same command.
"""

import argparse
import logging
import os
import sys
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from traceback import walk_tb
from typing import Any, Optional
from unittest.mock import patch

import torch
from detectron2.config import CfgNode
from detectron2.data import MetadataCatalog
from detectron2.engine import default_argument_parser, hooks
from detectron2.evaluation import (
    CityscapesInstanceEvaluator,
    CityscapesSemSegEvaluator,
    COCOEvaluator,
    COCOPanopticEvaluator,
    DatasetEvaluator,
    DatasetEvaluators,
    LVISEvaluator,
    PascalVOCDetectionEvaluator,
    SemSegEvaluator,
    verify_results,
)
from detectron2.modeling import GeneralizedRCNNWithTTA
from detectron2.utils import comm
from torch import nn

from ..common.checks import check_positive_int, value_of, whole
from ..common.files import whole_file
from ..compat import has_compiled_ops
from ..config.files import find_config_file
from ..config.load import load_cfg, merge_opts, with_settings
from ..config.precision import Precision
from ..config.settings import check_settings
from ..data.classes import class_keys
from ..data.hold_out import hold_out
from ..data.registration import check_datasets, register_coco
from ..engine.checkpoint import MemfitCheckpointer
from ..engine.defaults import MemfitTrainer
from ..engine.ending import causes_named, signals_end_at_once
from ..engine.launch import launch, usable_device, world_size
from ..errors import ConfigError, MemfitError, exit_on_error
from ..memory import use_expandable_segments
from ..planner.fit_config import fit_config
from ..predict.predictor import WholeModelCheckpointer
from . import train_lazy
from .command_line import add_card_and_coco_options
from .next_step import after_training
from .options import check_opts, opts_of_budget, opts_of_fit, opts_of_settings, with_data
from .run_folder import check_folder, set_up_rank
from .screen import progress_hooks, say, show

__all__ = ["Trainer", "argument_parser", "run", "run_script"]

logger = logging.getLogger(__name__)

AddKeys = Sequence[Callable[[CfgNode], Any]]

_OTHER_EVALUATORS = {
    "cityscapes_instance": CityscapesInstanceEvaluator,
    "cityscapes_sem_seg": CityscapesSemSegEvaluator,
    "pascal_voc": PascalVOCDetectionEvaluator,
}


class Trainer(MemfitTrainer):
    @classmethod
    def build_evaluator(
        cls, cfg: CfgNode, dataset_name: str, output_folder: Optional[str] = None
    ) -> DatasetEvaluator:
        """Build the evaluator that Detectron2's ``tools/train_net.py`` uses for the dataset."""
        folder = output_folder or os.path.join(cfg.OUTPUT_DIR, "inference")
        kind = MetadataCatalog.get(dataset_name).get("evaluator_type")
        made: list[DatasetEvaluator] = []
        if kind in ("sem_seg", "coco_panoptic_seg"):
            made.append(SemSegEvaluator(dataset_name, distributed=True, output_dir=folder))
        if kind in ("coco", "coco_panoptic_seg"):
            made.append(
                COCOEvaluator(
                    dataset_name,
                    output_dir=folder,
                    use_fast_impl=has_compiled_ops(),
                    kpt_oks_sigmas=cfg.TEST.KEYPOINT_OKS_SIGMAS,
                )
            )
        if kind == "coco_panoptic_seg":
            made.append(COCOPanopticEvaluator(dataset_name, folder))
        if kind == "lvis":
            made.append(LVISEvaluator(dataset_name, output_dir=folder))
        if kind in _OTHER_EVALUATORS:
            made.append(_OTHER_EVALUATORS[kind](dataset_name))
        if not made:
            raise NotImplementedError(
                f"no evaluator for the dataset {dataset_name!r} with evaluator_type {kind!r}: "
                "override build_evaluator of the trainer"
            )
        return made[0] if len(made) == 1 else DatasetEvaluators(made)

    @classmethod
    def test_with_TTA(cls, cfg: CfgNode, model: nn.Module) -> dict[str, Any]:
        """Evaluate with test-time augmentation, which R-CNNs support."""
        folder = os.path.join(cfg.OUTPUT_DIR, "inference_TTA")
        evaluators = [cls.build_evaluator(cfg, name, folder) for name in cfg.DATASETS.TEST]
        results = cls.test(cfg, GeneralizedRCNNWithTTA(cfg, model), evaluators)
        return OrderedDict((k + "_TTA", v) for k, v in results.items())

    @classmethod
    def load_weights(cls, cfg: CfgNode, model: nn.Module, resume: bool) -> None:
        """Load the weights to evaluate: the last checkpoint, or MODEL.WEIGHTS."""
        checkpointer = WholeModelCheckpointer(model, cfg.OUTPUT_DIR)
        if not cfg.MODEL.WEIGHTS and not (resume and checkpointer.has_checkpoint()):
            logger.warning(
                "--eval-only evaluates random weights, because MODEL.WEIGHTS is empty. Set it, or "
                "add --resume for the last checkpoint of OUTPUT_DIR"
            )
        checkpointer.resume_or_load(cfg.MODEL.WEIGHTS, resume=resume)


def argument_parser() -> argparse.ArgumentParser:
    parser = default_argument_parser(epilog=__doc__)
    parser.add_argument(
        "--fit",
        action="store_true",
        help="make the job fit this machine: sets MEMFIT.BUDGET_GB auto, unless a budget is given, "
        "MEMFIT.PLAN.ENABLED True and MEMFIT.OOM.POLICY split",
    )
    parser.add_argument(
        "--budget",
        metavar="GB",
        help="device memory in GB that the job may use, such as 5.2; auto takes what is free on "
        "this machine; sets MEMFIT.BUDGET_GB",
    )
    parser.add_argument(
        "--training-only",
        action="store_true",
        help="do not evaluate, and do not plan for evaluation",
    )
    of_share = "evaluate on this share of the images of --coco, such as 0.2, and train on the rest"
    parser.add_argument("--hold-out", type=float, metavar="SHARE", help=of_share)
    add_card_and_coco_options(parser)
    return parser


def prepare(
    args: argparse.Namespace, trainer: type[Trainer] = Trainer, add_keys: AddKeys = ()
) -> tuple[CfgNode, int]:
    """Check all that can be checked before a process starts, and complete the arguments.

    Nothing is written to OUTPUT_DIR, except for the files of ``--hold-out``, which become the
    values of ``args.coco``. ``args.opts`` gets the keys of ``--card``, ``--fit`` and the data,
    before the user's. ``args.notes`` gets lines about the settings from the data.

    Args:
        trainer, add_keys: as for :func:`run`.

    Returns:
        The config, and the effective batch of its file.
    """
    check_opts(args.opts)
    opts = [*opts_of_budget(args.card, args.budget, args.opts), *args.opts]
    if args.training_only:
        opts = [*opts, "DATASETS.TEST", "()"]
    recipe = load_cfg(args.config_file, (), add_keys, opts)
    ranks = world_size(args.num_gpus, args.num_machines)
    trains = not args.eval_only
    check = partial(check_settings, ranks=ranks, trains=trains)
    if args.hold_out is not None:
        cfg, _ = with_data(recipe, [], args.config_file, opts, check)
        args.coco = hold_out(args.coco, args.hold_out, cfg.OUTPUT_DIR, args.resume)
    cfg, settings = with_data(
        recipe,
        args.coco,
        args.config_file,
        opts,
        check,
        eval_only=args.eval_only,
        reads_images=True,
        progress=say,
    )
    args.notes = [str(setting) for setting in settings]
    wanted = opts_of_fit(cfg, args.eval_only) if args.fit else {}
    of_fit = [text for key in wanted if key not in opts[::2] for text in (key, wanted[key])]
    merge_opts(cfg, of_fit)
    args.opts = [*of_fit, *opts_of_settings(settings), *opts]
    cfg.MODEL.DEVICE = usable_device(cfg.MODEL.DEVICE, "MODEL.DEVICE" in args.opts[::2])
    cfg.freeze()
    _check(args, cfg, trainer)
    return cfg, recipe.SOLVER.IMS_PER_BATCH * recipe.SOLVER.ACCUMULATION_STEPS


def _check(args: argparse.Namespace, cfg: CfgNode, trainer: type[Trainer]) -> None:
    if cfg.MEMFIT.BUDGET_GB is not None or cfg.MEMFIT.PRESET:
        use_expandable_segments()  # before anything queries the GPU
    _check_model(cfg, trainer)
    args.config_file = find_config_file(args.config_file)  # which is logged
    Precision.from_cfg(cfg)
    check_datasets(cfg, args.eval_only)
    if not cfg.OUTPUT_DIR:
        raise ConfigError("OUTPUT_DIR is empty: name a folder")
    check_folder(args, cfg.OUTPUT_DIR, cfg.MODEL.WEIGHTS)


def _check_model(cfg: CfgNode, trainer: type[Trainer]) -> None:
    """Build the model without memory for its weights, which takes a tenth of a second."""
    for key in class_keys(cfg) or ():
        check_positive_int(key, value_of(cfg, key))
    try:
        with torch.device("meta"):
            trainer.build_model(with_settings(cfg, {"MODEL.DEVICE": "meta"}))
    except MemfitError:
        raise
    except Exception as e:
        frames = list(walk_tb(e.__traceback__))
        place = f"{frames[-1][0].f_code.co_filename}:{frames[-1][1]}"
        raise ConfigError(
            f"the model cannot be built from this config ({e!r}, in {place}). Compare its keys "
            "with a config of the zoo. A project's model is trained by the project's script"
        ) from e


@exit_on_error
@causes_named()
@patch.object(logging, "raiseExceptions", False)  # on a full disk, no traceback for each line
def main(
    args: argparse.Namespace,
    cfg: CfgNode,
    batch_of_file: int,
    trainer_class: type[Trainer] = Trainer,
    add_keys: AddKeys = (),
) -> None:
    """Run one rank, with the arguments, config and batch of :func:`prepare`."""
    for dataset in args.coco:
        register_coco(*dataset)
    set_up_rank(args, cfg, cfg.OUTPUT_DIR, cfg.MODEL.DEVICE)
    for note in args.notes:
        logger.info("From the data: %s", note)

    if args.eval_only:
        weights = _evaluate(args, cfg, trainer_class)
    else:
        _warn_of_batch(args.opts, cfg, batch_of_file)
        weights = _train(args, _fitted(cfg, trainer_class), trainer_class)
    if weights and comm.is_main_process():
        own = None if trainer_class is Trainer else trainer_class
        eval_only = args.eval_only
        text = after_training(
            cfg.OUTPUT_DIR, args.coco, weights, own, add_keys, eval_only=eval_only
        )
        show(text)


def _evaluate(args: argparse.Namespace, cfg: CfgNode, trainer_class: type[Trainer]) -> str:
    """Evaluate; return the file of the weights, or "" if they are random."""
    model = trainer_class.build_model(cfg)
    trainer_class.load_weights(cfg, model, args.resume)
    results = trainer_class.test(cfg, model)
    if cfg.TEST.AUG.ENABLED:
        results.update(trainer_class.test_with_TTA(cfg, model))
    if comm.is_main_process():
        verify_results(cfg, results)
    last = MemfitCheckpointer(model, cfg.OUTPUT_DIR).get_checkpoint_file() if args.resume else ""
    return last or cfg.MODEL.WEIGHTS


def _train(args: argparse.Namespace, cfg: CfgNode, trainer_class: type[Trainer]) -> str:
    """Train; return the file of the last checkpoint."""
    trainer = trainer_class(cfg)
    trainer.resume_or_load(resume=args.resume)
    if cfg.TEST.AUG.ENABLED:
        trainer.register_hooks(
            [hooks.EvalHook(0, lambda: trainer.test_with_TTA(cfg, trainer.model))]
        )
    if comm.is_main_process():
        logger.info("Environment, config and model are in %s", Path(cfg.OUTPUT_DIR, "log.txt"))
        trainer.register_hooks(progress_hooks(trainer.max_iter))
    trainer.train()
    return trainer.checkpointer.get_checkpoint_file()


def _warn_of_batch(opts: Sequence[str], cfg: CfgNode, batch_of_file: int) -> None:
    """Warn if the command changes the config file's effective batch and not its learning rate."""
    solver = cfg.SOLVER
    factor = solver.IMS_PER_BATCH * solver.ACCUMULATION_STEPS / batch_of_file
    if factor == 1 or solver.REFERENCE_WORLD_SIZE or "SOLVER.BASE_LR" in opts[::2]:
        return
    logger.warning(
        "SOLVER.IMS_PER_BATCH %d x SOLVER.ACCUMULATION_STEPS %d is %.3g times the batch of the "
        "config file, but SOLVER.BASE_LR %g is unchanged. Scale it with the batch "
        "(arXiv:1706.02677): SOLVER.BASE_LR %g. Or keep the batch with SOLVER.ACCUMULATION_STEPS",
        solver.IMS_PER_BATCH,
        solver.ACCUMULATION_STEPS,
        factor,
        solver.BASE_LR,
        solver.BASE_LR * factor,
    )


def _fitted(cfg: CfgNode, trainer: type[Trainer]) -> CfgNode:
    """The config with its plan.

    OUTPUT_DIR/config.yaml has the plan too, for later evaluations, but not the measured budget.
    """
    planned = fit_config(cfg, trainer)
    if planned is not cfg and comm.is_main_process():
        kept = with_settings(planned, {"MEMFIT.BUDGET_GB": cfg.MEMFIT.BUDGET_GB})
        with whole_file(Path(cfg.OUTPUT_DIR) / "config.yaml", "w") as file:
            file.write(kept.dump())
    return planned


def run(args: argparse.Namespace, trainer: type[Trainer] = Trainer, add_keys: AddKeys = ()) -> None:
    """Check the arguments, then start the ranks, or join those that torchrun started.

    Args:
        trainer: the class that trains and evaluates.
        add_keys: functions that add a project's keys to a config.
    """
    whole(0)("--num-gpus", args.num_gpus)
    check_positive_int("--num-machines", args.num_machines)
    if not 0 <= args.machine_rank < args.num_machines:
        raise ConfigError(
            f"--machine-rank must be 0 to {args.num_machines - 1}, because there are "
            f"--num-machines {args.num_machines}, got {args.machine_rank}"
        )
    if args.config_file.endswith(".py") and trainer is Trainer:
        train_lazy.prepare(args)
        of_rank = partial(train_lazy.main, args)
    else:
        cfg, batch_of_file = prepare(args, trainer, add_keys)
        of_rank = partial(main, args, cfg, batch_of_file, trainer, add_keys)
    launch(of_rank, args.num_gpus, args.num_machines, args.machine_rank, args.dist_url)


@exit_on_error
@signals_end_at_once()
def run_script(
    trainer: type[Trainer] = Trainer, add_keys: AddKeys = (), usage: Optional[str] = None
) -> None:
    """Run the command train as a project's script, with its trainer and config keys.

    Args:
        trainer, add_keys: as for :func:`run`.
        usage: the text under the options in the script's help.
    """
    parser = argument_parser()
    parser.epilog = usage or parser.epilog
    with patch.object(sys, "path", [os.getcwd(), *sys.path]):  # as for ``python -m``
        run(parser.parse_args(), trainer, add_keys)
