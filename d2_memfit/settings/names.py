# Copyright (c) the d2_memfit developers.
"""The names that a user gave to keys: places in a LazyConfig, or arguments."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ..errors import ConfigError

__all__ = ["LAZY_NAMES", "argument_name", "lazy_name", "named"]

_KEY = re.compile(
    r"\b(?:OUTPUT_DIR|(?:DATALOADER|DATASETS|MEMFIT|MODEL|SOLVER|TEST)(?:\.[A-Z][A-Z0-9_]*)+)\b"
)
# Keys of yacs with their own place in a LazyConfig; the rest of MEMFIT is in train.memfit.
LAZY_NAMES = {
    "SOLVER.IMS_PER_BATCH": "dataloader.train.total_batch_size",
    "SOLVER.MAX_ITER": "train.max_iter",
    "DATALOADER.NUM_WORKERS": "dataloader.train.num_workers",
    "MODEL.DEVICE": "train.device",
    "MODEL.WEIGHTS": "train.init_checkpoint",
    "OUTPUT_DIR": "train.output_dir",
    "SOLVER.ACCUMULATION_STEPS": "train.accumulation_steps",
    "SOLVER.AMP.ENABLED": "train.amp.enabled",
    "MEMFIT.AMP_DTYPE": "train.amp.dtype",
    "MEMFIT.MICRO_BATCH": "train.micro_batch",
    "MEMFIT.BUDGET_GB": "train.budget_gb",
    "MEMFIT.OOM": "train.oom",
}
_IN_MESSAGES = {"DATASETS.TEST": "dataloader.test", "TEST.EVAL_PERIOD": "train.eval_period"}
_ARGUMENTS = {
    "SOLVER.IMS_PER_BATCH": "images_per_batch",
    "SOLVER.MAX_ITER": "max_iter",
    "SOLVER.ACCUMULATION_STEPS": "accumulation_steps",
    "MODEL.DEVICE": "device",
    "MEMFIT.AMP_DTYPE": "amp_dtype",
    "MEMFIT.MICRO_BATCH": "micro_batch_size",
    "OUTPUT_DIR": "output_dir",
    "DATASETS.TEST": "test_loader",
}


def lazy_name(key: str) -> str:
    """The place of a key in a LazyConfig; the key itself if there is none."""
    if key in LAZY_NAMES:
        return LAZY_NAMES[key]
    if key.startswith("MEMFIT.OOM."):
        return f"train.{key[len('MEMFIT.') :].lower()}"
    return f"train.{key.lower()}" if key.startswith("MEMFIT.") else _IN_MESSAGES.get(key, key)


def argument_name(key: str) -> str:
    """The argument of a :class:`~d2_memfit.job.Job` of pieces for a key."""
    return _ARGUMENTS.get(key, key.lower() if key.startswith("MEMFIT.") else key)


@contextmanager
def named(name: Callable[[str], str]) -> Iterator[None]:
    """While open, errors name keys as ``name`` does."""
    try:
        yield
    except ConfigError as e:
        text = _KEY.sub(lambda match: name(match[0]), str(e))
        if text == str(e):
            raise
        raise type(e)(text) from e
