"""Every config key of d2_memfit. The defaults leave Detectron2's behaviour unchanged."""

import difflib
import numbers
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import yaml
from detectron2.config import CfgNode as CN
from detectron2.config import get_cfg as _get_detectron2_cfg

from .errors import ConfigError
from .yaml_arithmetic import arithmetic_in_yaml

__all__ = [
    "add_memfit_config",
    "check_config",
    "check_positive_int",
    "get_cfg",
    "load_cfg",
]

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
# It cannot take more: on a GPU PyTorch's allocator is limited, on a Linux CPU the kernel limits the
# process and each of the loader's workers. None is no limit.
_C.MEMFIT.BUDGET_GB = None

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
# Names of classes of modules, beside SyncBN, that communicate with other ranks in their forward.
_C.MEMFIT.OOM.COMMUNICATING_MODULES = []


def add_memfit_config(cfg: CN) -> None:
    """Add the keys of d2_memfit to a Detectron2 config. Those it has already keep their values."""
    _add_missing(cfg, _C)


def get_cfg() -> CN:
    """Detectron2's ``get_cfg()`` plus the keys of d2_memfit."""
    cfg = _get_detectron2_cfg()
    add_memfit_config(cfg)
    return cfg


def load_cfg(config_file: str = "", opts: Sequence[str] = ()) -> CN:
    """:func:`get_cfg`, then a config file, then ``KEY VALUE`` pairs from a command line.

    Raises:
        ConfigError: the file does not exist or is not safe YAML, or a key or value is wrong.
    """
    cfg = get_cfg()
    if config_file:
        with _explained(cfg, f"{config_file}: "), arithmetic_in_yaml():
            cfg.merge_from_file(config_file, allow_unsafe=False)
    with _explained(cfg):
        cfg.merge_from_list(list(opts))
    return cfg


def check_config(cfg: CN, world_size: int = 1) -> None:
    """Raise :class:`ConfigError` on the first value that cannot work on ``world_size`` ranks."""
    known = set(_keys(_C.MEMFIT))
    for key in _keys(cfg.MEMFIT):
        if key not in known:
            raise ConfigError(_no_such_key(f"MEMFIT.{key}", cfg))
    check_positive_int("SOLVER.ACCUMULATION_STEPS", cfg.SOLVER.ACCUMULATION_STEPS)
    if cfg.MEMFIT.MICRO_BATCH is not None:
        check_positive_int("MEMFIT.MICRO_BATCH", cfg.MEMFIT.MICRO_BATCH)
    if cfg.MEMFIT.AMP_DTYPE not in ("float16", "bfloat16"):
        raise ConfigError(
            f"MEMFIT.AMP_DTYPE must be 'float16' or 'bfloat16', got {cfg.MEMFIT.AMP_DTYPE!r}. "
            "For float32, set SOLVER.AMP.ENABLED False"
        )
    check_positive_int("SOLVER.IMS_PER_BATCH", cfg.SOLVER.IMS_PER_BATCH)
    if cfg.SOLVER.IMS_PER_BATCH % world_size:
        raise ConfigError(
            f"SOLVER.IMS_PER_BATCH must be divisible by the number of ranks, {world_size}, "
            f"got {cfg.SOLVER.IMS_PER_BATCH}"
        )


def check_positive_int(name: str, value: object) -> None:
    """Raise :class:`ConfigError` unless ``value`` is an integer of at least 1."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < 1:
        raise ConfigError(f"{name} must be a positive integer, got {value!r}")


@contextmanager
def _explained(cfg: CN, where: str = "") -> Iterator[None]:
    """Make one line out of what merging raises, with the key and what is wrong with it.

    yacs says "Non-existent config key: MEMFIT.X", and "Type mismatch (<class 'int'> vs. <class
    'float'>) with values (1 vs. 2.5) for config key: SOLVER.X".
    """
    try:
        yield
    except (AssertionError, KeyError, OSError, ValueError, yaml.YAMLError) as e:
        text = " ".join(str(e.args[0] if isinstance(e, KeyError) and e.args else e).split())
        unknown = re.search(r"Non-existent.* key: (\S+)", text)
        if unknown:
            text = _no_such_key(unknown[1], cfg)
        mismatch = re.search(r"<class '(\w+)'> vs.* \(.* vs\. (.*)\) for config key: (\S+)", text)
        if mismatch:
            text = f"{mismatch[3]} must be of type {mismatch[1]}, got {mismatch[2]}"
        raise ConfigError(where + text) from e
    except (AttributeError, TypeError) as e:  # from looking for keys in what has none
        raise ConfigError(f"{where}not a config: it must be a mapping of keys to values") from e


def _no_such_key(key: str, cfg: CN) -> str:
    near = difflib.get_close_matches(key, sorted(set(_keys(cfg)) - {key}), n=3)
    return f"there is no config key {key}" + (f" (near: {', '.join(near)})" if near else "")


def _keys(cfg: CN, prefix: str = "") -> Iterator[str]:
    for key, value in cfg.items():
        yield prefix + key
        if isinstance(value, CN):
            yield from _keys(value, f"{prefix}{key}.")


def _add_missing(cfg: CN, defaults: CN) -> None:
    for key, value in defaults.items():
        if key not in cfg:
            setattr(cfg, key, value.clone() if isinstance(value, CN) else value)
        elif isinstance(value, CN):
            _add_missing(cfg[key], value)
