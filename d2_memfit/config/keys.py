# Copyright (c) the d2_memfit developers.
"""The config keys of d2_memfit. Their defaults leave Detectron2's behaviour unchanged.

The keys of techniques are defined in their files, in :mod:`d2_memfit.techniques`.
"""

from collections.abc import Iterator
from functools import lru_cache

from detectron2.config import CfgNode as CN

from ..techniques import TECHNIQUES, Technique

__all__ = ["default_keys", "keys_of"]

_C = CN()

_C.SOLVER = CN()
# Batches from the data loader for one optimizer step. The effective batch has IMS_PER_BATCH x
# ACCUMULATION_STEPS images. MAX_ITER, STEPS and all periods count optimizer steps.
_C.SOLVER.ACCUMULATION_STEPS = 1

_C.MEMFIT = CN()
# Images of each rank that go through the model in one forward and backward. None means the loader's
# batch, IMS_PER_BATCH / number of ranks. A smaller number needs less memory. The effective batch
# stays the same.
_C.MEMFIT.MICRO_BATCH = None
# Number format of mixed precision, which SOLVER.AMP.ENABLED turns on. "float16" has a gradient
# scaler, as in Detectron2. "bfloat16" has none, and runs on CPUs and on GPUs from Ampere on.
_C.MEMFIT.AMP_DTYPE = "float16"
# Device memory that the job may use on each rank, in GB (2^30 bytes), the CUDA context included.
# The budget is enforced. On a GPU, PyTorch's allocator is limited. On a Linux CPU, the kernel
# limits the process and each of the loader's workers. "auto" takes the memory that is free when the
# job starts, less a margin: of the GPU, or of the RAM for a CPU. None: no limit.
_C.MEMFIT.BUDGET_GB = None

# A budget by the nominal memory of a card, such as "6GB", instead of BUDGET_GB. "": none. The file
# presets.py lists how much of each card a process can use. --card 6GB sets this key.
_C.MEMFIT.PRESET = ""
# Whether SIGTERM, SIGINT, SIGUSR2 and SIGHUP end the run after the current iteration, with a
# checkpoint.
_C.MEMFIT.STOP_ON_SIGNALS = True

_C.MEMFIT.OOM = CN()
# What happens at an out-of-memory error. "raise" ends the run, as in Detectron2. "split" undoes the
# unfinished work and runs the same images again in smaller micro-batches, in training and in
# evaluation.
_C.MEMFIT.OOM.POLICY = "raise"
# Whether an image that does not fit alone may be trained on at 0.7, 0.49 or 0.34 of its size.
_C.MEMFIT.OOM.ALLOW_RESIZE = False
# What happens to an image that does not fit at all: "raise" an error that names it, or "skip" it.
_C.MEMFIT.OOM.LAST_RESORT = "raise"

_C.MEMFIT.NORMALIZERS = CN()
# Which counts in losses come from the whole effective batch, if it goes through the model in
# several micro-batches. "window": those that the model adds up over ranks, that an adapter or
# window_count declares, and the weights of weighted means. A count that does not add up is not
# used. "exact": the means of R-CNN's heads as well, at the cost of one more forward. "off": none.
_C.MEMFIT.NORMALIZERS.POLICY = "window"
# What losses are divided by, if the model does not add up a count over ranks. Each entry is a pair
# of a pattern of their names and "objects", the number of annotated objects in the batch, or "sum",
# for a loss that is a sum over images. An example is [["loss_mask*", "objects"]].
_C.MEMFIT.NORMALIZERS.LOSSES = []

_C.MEMFIT.MONITOR = CN()
# Iterations between reports of the memory of all ranks, as scalars memfit/... and on the console.
# None: no reports.
_C.MEMFIT.MONITOR.PERIOD = None
# Iterations over which memory must grow steadily for a warning about a leak. None: no warning.
_C.MEMFIT.MONITOR.LEAK_WINDOW = None
# Whether OUTPUT_DIR/memfit_oom_<number>.json shows the owners of the memory at the first three
# out-of-memory errors.
_C.MEMFIT.MONITOR.SNAPSHOT_ON_OOM = False

_C.MEMFIT.PLAN = CN()
# Whether fit_config, which d2-memfit train calls, plans before training so that the job fits
# BUDGET_GB.
_C.MEMFIT.PLAN.ENABLED = False
# Headroom of a plan, as a share of the budget, because estimates are not exact. None: the memory
# that other software versions and another context may add.
_C.MEMFIT.PLAN.MARGIN = None
# Tiers of techniques that a plan may use: "exact", "precision", "recipe".
_C.MEMFIT.PLAN.ALLOW = ["exact", "precision"]
# What a plan prefers if an exact plan fits. "exact" keeps the gradients. "speed" takes mixed
# precision first on cards that are faster with it, even if the job would fit without changes.
_C.MEMFIT.PLAN.PREFER = "exact"
# GB that a plan predicts for its largest images: allocated, reserved, and outside PyTorch's
# allocator. Plans write this key, and the run records it with its own peaks.
_C.MEMFIT.PLAN.PREDICTED_GB = []
# GB of page-locked RAM that a plan's offload takes on each rank. Plans write this key.
# HOST.BUDGET_GB leaves this memory to the offload.
_C.MEMFIT.PLAN.OFFLOADED_GB = 0.0


def default_keys() -> CN:
    """All keys of d2_memfit, frozen."""
    return _with_techniques(tuple(technique for _, technique in TECHNIQUES))


@lru_cache(maxsize=1)
def _with_techniques(techniques: tuple[type[Technique], ...]) -> CN:
    cfg = _C.clone()
    for technique in techniques:
        technique.add_config(cfg)
    cfg.freeze()
    return cfg


def keys_of(cfg: CN, prefix: str = "") -> Iterator[str]:
    """Full names of all keys and nodes."""
    for key, value in cfg.items():
        yield prefix + key
        if isinstance(value, CN):
            yield from keys_of(value, f"{prefix}{key}.")
