# Copyright (c) the d2_memfit developers.
"""The folder of a run: checked before a process starts, and set up by each rank."""

import argparse
import logging
from pathlib import Path
from typing import Union

import torch
from detectron2.config import CfgNode
from detectron2.engine import default_setup
from detectron2.utils import comm
from detectron2.utils.logger import setup_logger
from omegaconf import DictConfig

from ..common.files import FolderLock, check_run_folder, whole_file
from ..engine.checkpoint import MemfitCheckpointer
from ..errors import ConfigError
from .command_line import files_read
from .screen import leave_out_dumps

__all__ = ["check_folder", "set_up_rank"]

logger = logging.getLogger(__name__)


def check_folder(args: argparse.Namespace, output_dir: str, weights: str) -> None:
    """Check that a run can use its folder and load its weights. Nothing is written.

    Raises:
        ConfigError: the folder cannot be used, or another process trains in it.
        CheckpointError: the weights or the checkpoint to resume cannot be read.
    """
    check_run_folder(output_dir, files_read(args))
    if not args.eval_only and (Path(output_dir) / FolderLock.FILE_NAME).exists():
        # Before anything of the other run is changed. Under torchrun, each rank comes here.
        FolderLock(output_dir, is_shared=True).release()
    MemfitCheckpointer(torch.nn.Module(), output_dir).check(weights, resume=args.resume)


def set_up_rank(
    args: argparse.Namespace, cfg: Union[CfgNode, DictConfig], output_dir: str, device: str
) -> None:
    """Run Detectron2's ``default_setup``; an evaluation keeps the config.yaml of the training.

    Raises:
        ConfigError: the folder cannot be written.
    """
    config_file = Path(output_dir) / "config.yaml"
    try:
        is_kept = args.eval_only and comm.is_main_process() and config_file.is_file()
        of_training = config_file.read_text() if is_kept else None
        leave_out_dumps(output_dir, comm.get_rank())
        if comm.is_main_process() and isinstance(cfg, CfgNode):
            with whole_file(config_file, "w") as file:  # default_setup leaves a part on a full disk
                file.write(cfg.dump())
        default_setup(cfg, args)
        if of_training is not None:  # an evaluation may have other keys
            with whole_file(config_file, "w") as file:
                file.write(of_training)
    except OSError as e:  # such as a full disk
        raise ConfigError(f"OUTPUT_DIR {output_dir} cannot be written ({e.strerror})") from e
    setup_logger(output_dir, distributed_rank=comm.get_rank(), name="d2_memfit")
    if device == "cpu" and not torch.cuda.is_available():
        logger.warning("No GPU is visible: running on the CPU")
