# Copyright (c) the d2_memfit developers.
"""Logging in scripts that set up only Detectron2's loggers."""

import logging

from detectron2.utils import comm
from detectron2.utils.logger import setup_logger

__all__ = ["start_logging"]


def start_logging(output_dir: str) -> None:
    """Write the log of d2_memfit to Detectron2's, unless it is set up already."""
    if not logging.getLogger("d2_memfit").isEnabledFor(logging.INFO):
        setup_logger(output_dir, distributed_rank=comm.get_rank(), name="d2_memfit")
