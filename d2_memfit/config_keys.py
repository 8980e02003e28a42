"""The config keys of d2_memfit, with their defaults, which leave Detectron2's behaviour unchanged.

Those of the techniques stand in their files, in :mod:`d2_memfit.techniques`.
"""

from collections.abc import Iterator

from detectron2.config import CfgNode as CN

from .techniques import TECHNIQUES

__all__ = ["default_keys", "keys_of"]

_C = CN()

_C.SOLVER = CN()
# Batches from the data loader behind one optimizer step. The effective batch, in images, is
# IMS_PER_BATCH x ACCUMULATION_STEPS. MAX_ITER, STEPS and all periods count optimizer steps.
_C.SOLVER.ACCUMULATION_STEPS = 1

_C.MEMFIT = CN()
# Images that each rank sends through the model in one forward and backward. None means the loader's
# batch, IMS_PER_BATCH / number of ranks. A smaller number needs less memory; the effective batch
# stays as it is.
_C.MEMFIT.MICRO_BATCH = None
# Number format of mixed precision when SOLVER.AMP.ENABLED: "float16", with a gradient scaler as in
# Detectron2, or "bfloat16", without one (CPUs, and GPUs from Ampere on).
_C.MEMFIT.AMP_DTYPE = "float16"
# Device memory that the job may use on each rank, in GB (2^30 bytes), the CUDA context included.
# It is enforced: on a GPU PyTorch's allocator is limited, on a Linux CPU the kernel limits the
# process and each of the loader's workers. "auto" is what is free when the job starts, less a
# margin: of the GPU, or the RAM that is available on a CPU. None is no limit.
_C.MEMFIT.BUDGET_GB = None

# A budget by the size that is printed on a card, such as "6GB", in place of BUDGET_GB; "" is none.
# presets.py has the sizes, and what a process can take of each. The same as --card 6GB.
_C.MEMFIT.PRESET = ""
# Whether SIGTERM, SIGINT and SIGUSR2 end the run after the iteration, with a checkpoint.
_C.MEMFIT.STOP_ON_SIGNALS = True

_C.MEMFIT.COST_MODEL = CN()
# Bytes that a rank needs with a micro-batch in the model: the largest of these sums. Each is a list
# of numbers: the bytes of the process, and those for each image, padded pixel, object, padded pixel
# x object, and padded pixel x object of the most crowded image. Where there are some, windows are
# cut so that each micro-batch fits into BUDGET_GB less PLAN.MARGIN and ERROR_GB, and similar sizes
# go together; MICRO_BATCH is then how many of the largest images do, for estimates. A plan finds
# them: d2-memfit plan --cost-model.
_C.MEMFIT.COST_MODEL.BYTES = []
# How much more than predicted a micro-batch may need, in GB.
_C.MEMFIT.COST_MODEL.ERROR_GB = 0.0
# The time that a micro-batch takes beside that of its images, in padded pixels that take as long.
_C.MEMFIT.COST_MODEL.OVERHEAD_PIXELS = 0.0

_C.MEMFIT.OOM = CN()
# What an out-of-memory error does: "raise" ends the run, as in Detectron2; "split" undoes what was
# begun and runs the same images again in smaller micro-batches, in training and in evaluation.
_C.MEMFIT.OOM.POLICY = "raise"
# Iterations without an out-of-memory error before a micro-batch that was halved is doubled again.
_C.MEMFIT.OOM.GROW_AFTER = 1000
# Whether an image that does not fit alone may be trained on at 0.7, 0.49 or 0.34 of its size.
_C.MEMFIT.OOM.ALLOW_RESIZE = False
# What is done about an image that fits in no way: "raise" an error that names it, or "skip" it.
_C.MEMFIT.OOM.LAST_RESORT = "raise"
# The share of all images seen that may be skipped, rounded up to a whole image, before the run ends
# with an error.
_C.MEMFIT.OOM.MAX_SKIPPED = 0.001
# Not used any more: communication in a forward is noticed when it happens.
_C.MEMFIT.OOM.COMMUNICATING_MODULES = []

_C.MEMFIT.NORMALIZERS = CN()
# Which counts that losses are divided by are those of the whole effective batch, where it goes
# through the model in several micro-batches: "window", those that the model adds up over ranks, the
# weights of weighted means, and what it asks window_count for; "exact", the sizes of plain means
# too, such as the proposals of R-CNN, at the price of a forward more; "off", none.
_C.MEMFIT.NORMALIZERS.POLICY = "window"
# Losses that a model divides by the number of annotated objects in its batch without adding that up
# over ranks: pairs of a pattern of their names and "objects", such as [["loss_mask*", "objects"]].
_C.MEMFIT.NORMALIZERS.LOSSES = []

_C.MEMFIT.MONITOR = CN()
# Iterations between reports of all ranks' memory, as scalars memfit/..., and in the console's line.
# None is no reports.
_C.MEMFIT.MONITOR.PERIOD = None
# Iterations over which memory must grow steadily for a warning that it leaks. None is no warning.
_C.MEMFIT.MONITOR.LEAK_WINDOW = None
# The iteration of which OUTPUT_DIR/memfit_memory_<iteration>.json says who has the memory at its
# peak. With this or the next key, the signal SIGUSR1 asks for one more.
_C.MEMFIT.MONITOR.SNAPSHOT_ITER = None
# Whether OUTPUT_DIR/memfit_oom_<number>.json says the same at the first out-of-memory errors.
_C.MEMFIT.MONITOR.SNAPSHOT_ON_OOM = False

_C.MEMFIT.EVALUATION = CN()
# Whether the predictions that Detectron2's COCOEvaluator collects are kept in a file, and evaluated
# in parts of 200 images by the official COCO API: the results are those of the whole.
_C.MEMFIT.EVALUATION.ON_DISK = False

_C.MEMFIT.PLAN = CN()
# Whether fit_config, and with it tools/train_net.py, plans before training so that the job fits
# BUDGET_GB.
_C.MEMFIT.PLAN.ENABLED = False
# Share of the budget that a plan leaves free, for what no estimate knows.
_C.MEMFIT.PLAN.MARGIN = 0.1
# Tiers of techniques that a plan may use: "exact", "precision", "recipe".
_C.MEMFIT.PLAN.ALLOW = ["exact", "precision"]
# Whether a plan finds MEMFIT.COST_MODEL too, by some ten more dry runs.
_C.MEMFIT.PLAN.COST_MODEL = False


def default_keys() -> CN:
    """All keys of d2_memfit."""
    cfg = _C.clone()
    for _, technique in TECHNIQUES:
        technique.add_config(cfg)
    return cfg


def keys_of(cfg: CN, prefix: str = "") -> Iterator[str]:
    """Whole names of all keys and nodes."""
    for key, value in cfg.items():
        yield prefix + key
        if isinstance(value, CN):
            yield from keys_of(value, f"{prefix}{key}.")
