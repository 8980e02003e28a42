# Copyright (c) the d2_memfit developers.
"""The command train: one run of a yaml config or a LazyConfig, on all its ranks."""

import logging
import os
import sys
from argparse import Namespace
from functools import partial
from pathlib import Path
from typing import Any, Optional
from unittest.mock import patch

import torch
from detectron2 import evaluation
from detectron2.config import CfgNode, LazyConfig, instantiate
from detectron2.data import MetadataCatalog
from detectron2.engine import default_setup, default_writers, hooks
from detectron2.modeling import GeneralizedRCNNWithTTA
from detectron2.utils import comm
from omegaconf import DictConfig
from torch import nn

from ..common.compat import has_compiled_ops
from ..common.errors import ConfigError, MemfitError, exit_on_error
from ..common.files import LOCK, check_run_folder, lock_folder, whole_file
from ..config.files import find_config_file
from ..config.lazy import cfg_of_lazy
from ..config.load import with_settings
from ..config.settings import Precision, check_settings
from ..data.registration import check_datasets, register_coco
from ..engine.build import build_trainer
from ..engine.checkpoint import MemfitCheckpointer
from ..engine.defaults import MemfitTrainer
from ..engine.ending import causes_named, signals_end_at_once
from ..engine.evaluating import evaluating
from ..engine.launch import launch, world_size
from ..job import Job, LazyParts, TrainerParts
from ..memory import keep_plan, use_expandable_segments
from ..planner.fit_config import fit_config
from .command_line import argument_parser, files_read
from .options import AddKeys, Config, check_lazy_options, is_lazy, load_lazy, load_yaml
from .screen import leave_out_dumps, next_step, show

logger = logging.getLogger(__name__)

if not has_compiled_ops():  # the fast evaluation, which COCOEvaluator uses by default, needs them
    evaluation.coco_evaluation.COCOeval_opt = evaluation.coco_evaluation.COCOeval


class Trainer(MemfitTrainer):
    @classmethod
    def build_evaluator(cls, cfg: CfgNode, dataset_name: str, output_folder: Any = None) -> Any:
        """Build the evaluator that Detectron2's ``tools/train_net.py`` uses for the dataset."""
        into = {"output_dir": output_folder or os.path.join(cfg.OUTPUT_DIR, "inference")}
        sem_seg = partial(evaluation.SemSegEvaluator, **into)
        sigmas = cfg.TEST.KEYPOINT_OKS_SIGMAS
        coco = partial(evaluation.COCOEvaluator, kpt_oks_sigmas=sigmas, **into)
        kinds: dict[str, list[Any]] = {
            "sem_seg": [sem_seg],
            "coco": [coco],
            "coco_panoptic_seg": [sem_seg, coco, partial(evaluation.COCOPanopticEvaluator, **into)],
            "lvis": [partial(evaluation.LVISEvaluator, **into)],
            "cityscapes_instance": [evaluation.CityscapesInstanceEvaluator],
            "cityscapes_sem_seg": [evaluation.CityscapesSemSegEvaluator],
            "pascal_voc": [evaluation.PascalVOCDetectionEvaluator],
        }
        kind = MetadataCatalog.get(dataset_name).get("evaluator_type")
        if kind not in kinds:
            what = f"dataset {dataset_name!r} has evaluator_type {kind!r}"
            raise NotImplementedError(f"{what}: override build_evaluator")
        return evaluation.DatasetEvaluators([make(dataset_name) for make in kinds[kind]])

    @classmethod
    def test_with_TTA(cls, cfg: CfgNode, model: nn.Module) -> dict[str, Any]:
        """Evaluate with test-time augmentation, which R-CNNs support."""
        folder = os.path.join(cfg.OUTPUT_DIR, "inference_TTA")
        evaluators = [cls.build_evaluator(cfg, name, folder) for name in cfg.DATASETS.TEST]
        results = cls.test(cfg, GeneralizedRCNNWithTTA(cfg, model), evaluators)
        return {f"{k}_TTA": v for k, v in results.items()}

    @classmethod
    def load_weights(cls, cfg: CfgNode, model: nn.Module, resume: bool) -> None:
        """Load the weights to evaluate: the last checkpoint, or MODEL.WEIGHTS."""
        checkpointer = MemfitCheckpointer(model, cfg.OUTPUT_DIR)
        checkpointer.needs_all = True
        checkpointer.resume_or_load(cfg.MODEL.WEIGHTS, resume=resume)


def prepare(
    args: Namespace, trainer: type[Trainer] = Trainer, add_keys: AddKeys = ()
) -> Optional[CfgNode]:
    """Check all that can be checked before a process starts, and complete the arguments.

    Nothing is written to OUTPUT_DIR, except for the files of ``--hold-out``, which become the
    values of ``args.coco``. ``args.notes`` gets lines about the config for the log.

    Args:
        trainer, add_keys: as for :func:`train`.

    Returns:
        The config. A LazyConfig is None: its objects may not be picklable, so each rank loads it.

    Raises:
        ConfigError: a value cannot work, or another process trains in OUTPUT_DIR.
        CheckpointError: the weights or the checkpoint to resume cannot be read.
    """
    ranks, trains, cfg = world_size(args.num_gpus, args.num_machines), not args.eval_only, None
    if is_lazy(args.config_file) and trainer is Trainer:
        check_lazy_options(args, "hold_out", "training_only")
        keys = cfg_of_lazy(load_lazy(args))
        check_settings(keys, ranks, trains)
    else:
        keys = cfg = load_yaml(args, add_keys, trains=trains, ranks=ranks, runs=True)
        if args.training_only:
            cfg.DATASETS.TEST = ()
        cfg.freeze()
    if keys.MEMFIT.BUDGET_GB is not None or keys.MEMFIT.PRESET:
        use_expandable_segments()  # before anything queries the GPU
    if cfg is not None:
        _check_model(cfg, trainer)
        args.config_file = find_config_file(args.config_file)  # which is logged
        check_datasets(cfg, args.eval_only)
    Precision.from_cfg(keys)
    if not keys.OUTPUT_DIR:
        raise ConfigError("OUTPUT_DIR is empty: name a folder")
    check_run_folder(keys.OUTPUT_DIR, files_read(args))
    if trains and (Path(keys.OUTPUT_DIR) / LOCK).exists():
        # Before anything of the other run is changed. Under torchrun, each rank comes here.
        lock_folder(keys.OUTPUT_DIR, is_shared=True).close()
    MemfitCheckpointer(nn.Module(), keys.OUTPUT_DIR).check(keys.MODEL.WEIGHTS, resume=args.resume)
    return cfg


def _check_model(cfg: CfgNode, trainer: type[Trainer]) -> None:
    """Build the model without memory for its weights, which takes a tenth of a second."""
    try:
        with torch.device("meta"):
            trainer.build_model(with_settings(cfg, {"MODEL.DEVICE": "meta"}))
    except MemfitError:
        raise
    except Exception as e:
        raise ConfigError(
            f"the model cannot be built from this config ({e!r}). Compare its keys with a config "
            "of the zoo. A project's model is trained by the project's script"
        ) from e


@exit_on_error
@causes_named()
@patch.object(logging, "raiseExceptions", False)  # on a full disk, no traceback for each line
def main(args: Namespace, cfg: Optional[Config], trainer_class: type[Trainer]) -> None:
    """Run one rank, with the arguments and the config of :func:`prepare`."""
    for dataset in args.coco:
        register_coco(*dataset)
    cfg = load_lazy(args) if cfg is None else cfg
    keys = cfg_of_lazy(cfg) if isinstance(cfg, DictConfig) else cfg
    _set_up_rank(args, cfg, keys)
    for note in args.notes:
        logger.info(note)
    run_it = _evaluate if args.eval_only else _train
    run_it(args, cfg, keys, trainer_class)


def _set_up_rank(args: Namespace, cfg: Config, keys: CfgNode) -> None:
    """Run Detectron2's ``default_setup``; an earlier config.yaml stays until a training begins."""
    folder, is_main = Path(keys.OUTPUT_DIR), comm.is_main_process()
    config_file = folder / "config.yaml"
    try:
        earlier = config_file.read_text() if config_file.is_file() else None
        leave_out_dumps(keys.OUTPUT_DIR, comm.get_rank())
        if is_main and isinstance(cfg, CfgNode):
            with whole_file(config_file, "w") as file:  # default_setup leaves a part on a full disk
                file.write(cfg.dump())
        default_setup(cfg, args)
        if is_main and earlier is not None:  # which may have other keys
            with whole_file(config_file, "w") as file:
                file.write(earlier)
        if is_main and not args.eval_only:
            keep_plan(args.config_file, folder)
    except OSError as e:  # such as a full disk
        raise ConfigError(f"OUTPUT_DIR {folder} cannot be written ({e.strerror})") from e
    if keys.MODEL.DEVICE == "cpu" and not torch.cuda.is_available():
        logger.warning("No GPU is visible: running on the CPU")


def _evaluate(args: Namespace, cfg: Config, keys: CfgNode, trainer_class: type[Trainer]) -> None:
    parts = LazyParts(cfg) if isinstance(cfg, DictConfig) else TrainerParts(cfg, trainer_class)
    model = parts.build_model(keys.MODEL.DEVICE)
    trainer_class.load_weights(keys, model, args.resume)
    results = _tested(parts, keys, model)
    if keys.TEST.AUG.ENABLED:
        results.update(trainer_class.test_with_TTA(keys, model))
    if comm.is_main_process():
        evaluation.verify_results(keys, results)
        show(f"Written: {Path(keys.OUTPUT_DIR, 'inference')} (results)")


def _tested(parts: Any, keys: CfgNode, model: nn.Module) -> Any:
    if not keys.DATASETS.TEST:
        return {}
    with evaluating(keys, model):
        results = parts.test(model)
    if isinstance(parts, LazyParts):  # a trainer prints them itself
        evaluation.print_csv_format(results)
    return results


def _train(args: Namespace, cfg: Config, keys: CfgNode, trainer_class: type[Trainer]) -> None:
    """Train, by a plan with ``--fit``, and say how to use the weights."""
    folder, is_main = Path(keys.OUTPUT_DIR), comm.is_main_process()
    if is_main:
        logger.info("Environment, config and model are in %s", folder / "log.txt")
    if isinstance(cfg, DictConfig):
        trainer = _lazy_trainer(fit_config(cfg))
        trainer.checkpointer.resume_or_load(keys.MODEL.WEIGHTS, resume=args.resume)
        # The checkpoint has the iteration that was just finished.
        goes_on = args.resume and trainer.checkpointer.has_checkpoint()
        if is_main:
            LazyConfig.save(cfg, str(folder / "config.yaml"))
        trainer.train(trainer.iter + 1 if goes_on else 0, keys.SOLVER.MAX_ITER)
    else:
        planned = fit_config(cfg, trainer_class)
        trainer = trainer_class(planned)
        trainer.resume_or_load(resume=args.resume)
        if is_main:
            # For later evaluations, config.yaml has the plan too, but not the measured budget.
            kept = with_settings(planned, {"MEMFIT.BUDGET_GB": cfg.MEMFIT.BUDGET_GB})
            with whole_file(folder / "config.yaml", "w") as file:
                file.write(kept.dump())
        if cfg.TEST.AUG.ENABLED:
            test = partial(trainer.test_with_TTA, trainer.cfg, trainer.model)
            trainer.register_hooks([hooks.EvalHook(0, test)])
        trainer.train()
    if is_main:
        config, weights = folder / "config.yaml", trainer.checkpointer.get_checkpoint_file()
        show(f"Written: {weights} (weights), {folder / 'metrics.json'}, {config}")
        if trainer_class is Trainer:  # a project's needs its code, too: docs/PREDICT.md
            data = {"coco": args.coco[1:2], "input": None if args.coco[1:] else "FOLDER"}
            given = Namespace(config_file=config, weights=weights, **data)
            show(next_step("find objects", "predict", given))


def _lazy_trainer(cfg: DictConfig) -> Any:
    """The trainer and hooks of Detectron2's ``lazyconfig_train_net.py``."""
    job = Job.from_lazy(cfg)
    trainer: Any = build_trainer(job)
    model, folder, is_main = trainer.model, cfg.train.output_dir, comm.is_main_process()
    logger.info("Model:\n%s", model)
    trainer.checkpointer = MemfitCheckpointer(model, folder, trainer=trainer)
    made = [hooks.IterationTimer(), hooks.LRScheduler(scheduler=instantiate(cfg.lr_multiplier))]
    if is_main:
        made.append(hooks.PeriodicCheckpointer(trainer.checkpointer, **cfg.train.checkpointer))
    made.append(hooks.EvalHook(cfg.train.eval_period, partial(_tested, job.parts, job.cfg, model)))
    if is_main:
        writers = default_writers(folder, cfg.train.max_iter)
        made.append(hooks.PeriodicWriter(writers, period=cfg.train.log_period))
    trainer.register_hooks(made)
    return trainer


def train(args: Namespace, trainer: type[Trainer] = Trainer, add_keys: AddKeys = ()) -> None:
    """Check the arguments, then start the ranks, or join those that torchrun started.

    Args:
        trainer: the class that trains and evaluates.
        add_keys: functions that add a project's keys to a config.
    """
    cfg = prepare(args, trainer, add_keys)
    of_rank = partial(main, args, cfg, trainer)
    launch(of_rank, args.num_gpus, args.num_machines, args.machine_rank, args.dist_url)


@exit_on_error
@signals_end_at_once()
def run_script(
    trainer: type[Trainer] = Trainer, add_keys: AddKeys = (), usage: Optional[str] = None
) -> None:
    """Run the command train as a project's script, with its trainer and config keys.

    Args:
        trainer, add_keys: as for :func:`train`.
        usage: the text under the options in the script's help.
    """
    args = argument_parser(usage).parse_args()
    with patch.object(sys, "path", [os.getcwd(), *sys.path]):  # as for ``python -m``
        train(args, trainer, add_keys)
