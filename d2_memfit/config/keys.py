# Copyright (c) the d2_memfit developers.
"""The table of the config keys. Their defaults leave Detectron2's behaviour unchanged.

Defaults, checks, names in LazyConfigs and docs/CONFIG.md follow from its rows. The key of a
technique is an attribute of its class, in :mod:`d2_memfit.techniques`.
"""

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from detectron2.config import CfgNode as CN
from detectron2.config import get_cfg

from ..common.checks import Check, check_device, choice, did_you_mean, fits, or_none, whole
from ..common.errors import ConfigError
from ..techniques.registry import TECHNIQUES, TIERS
from .cards import PRESETS

__all__ = ["KEYS", "Key", "all_keys", "checks_of", "leaves", "unknown_key"]


class Key(NamedTuple):
    """A config key.

    Attributes:
        check: a check for its values.
        text: what it does, with its unit.
    """

    name: str
    default: Any
    check: Check
    text: str


_IMAGES = whole(1, 10**6)
_BUDGET = Check(
    "a number of GB above 0, such as 6 or 7.5, 'auto' or None",
    lambda value: value in (None, "auto") or (fits(value, float) and value > 0),
)
_COUNTS = Check(
    'pairs of a pattern of names and "objects" or "sum", such as [["loss_mask*", "objects"]]',
    lambda v: fits(v, list[tuple[str, str]]) and {of for _, of in v} <= {"objects", "sum"},
)
_TIERS = Check(
    f"a list of {', '.join(TIERS)}", lambda value: fits(value, list[str]) and {*value} <= {*TIERS}
)

# fmt: off
KEYS = (
    Key("SOLVER.ACCUMULATION_STEPS", 1, _IMAGES,
        "Batches of IMS_PER_BATCH images for one optimizer step. MAX_ITER, STEPS and all periods "
        "count optimizer steps."),
    Key("MEMFIT.MICRO_BATCH", None, or_none(whole()),
        "Images of each rank in one forward and backward. The effective batch stays the same. "
        "None: the loader's batch, IMS_PER_BATCH / number of ranks."),
    Key("MEMFIT.AMP_DTYPE", "float16", choice("float16", "bfloat16"),
        "Number format of SOLVER.AMP.ENABLED. float16 has a gradient scaler, as in Detectron2. "
        "bfloat16 has none; it needs a CPU, or a GPU from Ampere on."),
    Key("MEMFIT.BUDGET_GB", None, _BUDGET,
        "Device memory in GB (2^30 bytes) of each rank, with the CUDA context. PyTorch's allocator "
        "enforces it on a GPU; on a Linux CPU the kernel does, there also for each worker of the "
        "loader. auto: what is free at the start, less a margin. None: no limit."),
    Key("MEMFIT.PRESET", "", choice("", *PRESETS),
        "A budget by the nominal memory of a card, instead of BUDGET_GB. --card 6GB sets it."),
    Key("MEMFIT.OOM.POLICY", "raise", choice("raise", "split"),
        "What happens at an out-of-memory error. raise ends the run, as in Detectron2. split runs "
        "the same images again in smaller micro-batches, in training and in evaluation."),
    Key("MEMFIT.OOM.LAST_RESORT", "raise", choice("raise", "resize", "skip"),
        "What happens to an image that does not fit alone. raise an error that names it; resize it "
        "to 0.7, 0.49 or 0.34 of its size, then raise; or skip it."),
    Key("MEMFIT.NORMALIZERS.POLICY", "window", choice("window", "exact", "off"),
        "Which counts in losses come from the whole effective batch. window: counts that the model "
        "adds up over ranks, those of window_count, and the weights of weighted means. exact: also "
        "the means of R-CNN's heads, for one more forward. off: none."),
    Key("MEMFIT.NORMALIZERS.LOSSES", [], _COUNTS,
        "What losses are divided by, if the model does not add up a count over ranks: objects, "
        "the annotated objects in the batch; or sum, for a loss that is a sum over images."),
    Key("MEMFIT.MONITOR.PERIOD", None, or_none(whole()),
        "Iterations between reports of the memory of all ranks, in the log and as scalars "
        "memfit/... None: no reports."),
    Key("MEMFIT.MONITOR.LEAKS", None, or_none(whole(40)),
        "Iterations over which memory must grow steadily for a warning that names the tensors that "
        "grow, such as 400. None: no warning."),
    Key("MEMFIT.MONITOR.SNAPSHOT", False, choice(True, False),
        "Whether OUTPUT_DIR/memfit_oom_<number>.json shows the owners of the memory at the first "
        "three out-of-memory errors."),
    Key("MEMFIT.PLAN.ENABLED", False, choice(True, False),
        "Whether fit_config, which d2-memfit train calls, plans before training so that the job "
        "fits BUDGET_GB."),
    Key("MEMFIT.PLAN.ALLOW", ["exact", "precision"], _TIERS,
        "Tiers of techniques that a plan may use."),
    Key("MEMFIT.PLAN.PREFER", "exact", choice("exact", "speed"),
        "What a plan prefers if an exact plan fits. exact keeps the gradients. speed takes mixed "
        "precision first on cards that are faster with it, even if the job fits without changes."),
)
# fmt: on

_SIZES = Check(
    "one or more sizes in pixels, each an integer of at least 0",
    lambda v: whole(0).test(v) or (fits(v, list[int]) and min(v, default=-1) >= 0),
)
_NAMES = Check("a list of names", lambda value: fits(value, list[str]))
# Detectron2's own keys, from which batches, schedules and the largest batch are computed.
_DETECTRON2: dict[str, Callable[[str, Any], Any]] = {
    "MODEL.DEVICE": lambda _, name: check_device(name),
    **dict.fromkeys(("DATASETS.TRAIN", "DATASETS.TEST"), _NAMES),
    "SOLVER.IMS_PER_BATCH": _IMAGES,
    "SOLVER.MAX_ITER": whole(1, 10**9),
    "SOLVER.BASE_LR": Check("at least 0", lambda v: not (fits(v, float) and v < 0)),
    "SOLVER.CHECKPOINT_PERIOD": Check(
        "a number of iterations other than 0, such as one above MAX_ITER for no checkpoints but "
        "the last",
        lambda v: v != 0,
    ),
    "SEED": Check("below 2^32", lambda v: not isinstance(v, int) or v < 2**32),
    "SOLVER.REFERENCE_WORLD_SIZE": whole(0),
    "DATALOADER.NUM_WORKERS": whole(0),
    **dict.fromkeys(("INPUT.MIN_SIZE_TRAIN", "INPUT.MIN_SIZE_TEST"), _SIZES),
    **dict.fromkeys(("INPUT.MAX_SIZE_TRAIN", "INPUT.MAX_SIZE_TEST"), whole()),
}


def leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Full names and values of all keys of a config or of nested mappings, without nodes."""
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def all_keys() -> Iterator[Key]:
    """All keys of d2_memfit, with those of techniques, also of a project's."""
    yield from KEYS
    for t in TECHNIQUES:
        if t.key:
            text = (inspect.getdoc(t) or "").partition("\n\nKey: ")[2].partition("\n\n")[0]
            yield Key(t.key, t.off, t.check, f"{' '.join(text.split())} ({t.tier})")


def checks_of(cfg: CN, trains: bool = True) -> Iterator[tuple[Sequence[str], Callable[[], Any]]]:
    """Checks of the values in a config, each with its keys, for :func:`check_all`.

    Args:
        trains: False for an evaluation, which does not read the keys of training.
    """
    values = dict(leaves(cfg))
    checks = _DETECTRON2 | {key.name: key.check for key in all_keys()}
    for key, check in checks.items():
        if trains or not key.startswith("SOLVER."):
            yield [key], partial(check, key, values.get(key))
    if trains:
        yield ["MEMFIT.PLAN.ENABLED", "MEMFIT.BUDGET_GB", "MEMFIT.PRESET"], partial(_budgeted, cfg)
    known = [*checks, *dict(leaves(get_cfg()))]
    for key, value in values.items():
        yield [key], partial(_known_and_finite, key, value, known)


def _budgeted(cfg: CN) -> None:
    if cfg.MEMFIT.PLAN.ENABLED and cfg.MEMFIT.BUDGET_GB is None and not cfg.MEMFIT.PRESET:
        raise ConfigError("MEMFIT.PLAN.ENABLED needs a MEMFIT.BUDGET_GB, or a MEMFIT.PRESET")


def unknown_key(key: str, known: Sequence[str], where: str = "") -> ConfigError:
    """The error of a key that there is not, or that is a node."""
    if below := [name for name in known if name.startswith(f"{key}.")]:
        return ConfigError(f"{where}{key} is a node: name a key in it, such as {below[0]}")
    why = "If a project adds it, name the function that does: --project MODULE:FUNCTION"
    if key.startswith("MEMFIT."):
        why = "CHANGELOG.md has the keys that have left"
    hint = did_you_mean(key.upper(), known)
    return ConfigError(f"{where}there is no config key {key}{hint}. {why}")


def _known_and_finite(key: str, value: Any, known: Sequence[str]) -> None:
    if key.startswith("MEMFIT.") and key not in known:
        raise unknown_key(key, known)
    if isinstance(value, (list, tuple)):
        for item in value:
            _known_and_finite(key, item, known)
    elif isinstance(value, float) and (math.isnan(value) or (math.isinf(value) and key in known)):
        raise ConfigError(f"{key} must be a finite number, got {value!r}")
