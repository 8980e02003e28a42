# Copyright (c) the d2_memfit developers.
"""Rules for the values of keys, and the check of a whole config by them."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Optional

from detectron2.config import CfgNode

from ..common.checks import (
    Problems,
    check_bool,
    check_choice,
    check_device,
    check_int,
    check_number,
    check_positive_int,
    check_strings,
    did_you_mean,
    fits,
    value_of,
)
from ..config import budget_of_preset, default_keys, keys_of
from ..errors import ConfigError, UnknownKeyError
from ..iteration import FEATURES
from ..memory import check_budget
from ..techniques import TECHNIQUES, TIERS
from .scaling import auto_scale_workers

__all__ = ["Rules", "check_arguments", "check_settings"]

Rule = Callable[[str, Any], Any]


class Rules(NamedTuple):
    """Rules for keys, which raise :class:`ConfigError`.

    Attributes:
        values: rules by key, each called with the key and its value.
        relations: rules for several keys, each called with the config if they are right alone.
    """

    values: Mapping[str, Rule]
    relations: Sequence[tuple[Sequence[str], Callable[[CfgNode], Any]]] = ()


_NO_MORE = Rules({})


def _or_none(rule: Rule) -> Rule:
    return lambda key, value: None if value is None else rule(key, value)


def _choice(*choices: str) -> Rule:
    return partial(check_choice, choices=choices)


def _preset(key: str, value: Any) -> None:
    if value:
        budget_of_preset(value)


def _decay(key: str, value: Any) -> None:
    if not (isinstance(value, float) and 0 < value < 1):
        raise ConfigError(
            f"{key} must be a number above 0 and below 1, such as 0.999, got {value!r}"
        )


def _cost_sums(key: str, value: Any) -> None:
    is_of_sums = fits(value, list[list[float]])
    if not is_of_sums or any(len(b) != len(FEATURES) or min(b) < 0 for b in value):
        raise ConfigError(
            f"{key} must be lists of {len(FEATURES)} numbers from 0, as d2-memfit plan "
            f"--cost-model finds them, got {value!r}"
        )


def _counted_losses(key: str, value: Any) -> None:
    for pair in value:
        if not fits(pair, tuple[str, str]) or pair[1] not in ("objects", "sum"):
            raise ConfigError(
                f'{key} must be pairs of a pattern of names of losses and "objects" or "sum", such '
                f'as [["loss_mask*", "objects"]], got {pair!r}'
            )


def _tiers(key: str, value: Any) -> None:
    check_strings(key, value)
    for tier in value:
        check_choice(key, tier, TIERS)


def _predicted(key: str, value: Any) -> None:
    if not fits(value, list[float]) or len(value) not in (0, 3):
        raise ConfigError(
            f"{key} must be three numbers of GB, as a plan writes them, or [], got {value!r}"
        )


def _has_budget(key: str, cfg: CfgNode) -> None:
    if value_of(cfg, key) and cfg.MEMFIT.BUDGET_GB is None and not cfg.MEMFIT.PRESET:
        raise ConfigError(f"{key} needs a MEMFIT.BUDGET_GB, or a MEMFIT.PRESET")


def _patience_has_metric(cfg: CfgNode) -> None:
    if cfg.MEMFIT.BEST.PATIENCE is not None and not cfg.MEMFIT.BEST.METRIC:
        raise ConfigError('MEMFIT.BEST.PATIENCE needs a MEMFIT.BEST.METRIC, such as "bbox/AP"')


def _metric_is_evaluated(cfg: CfgNode) -> None:
    metric = cfg.MEMFIT.BEST.METRIC
    if metric and not (cfg.TEST.EVAL_PERIOD > 0 and cfg.DATASETS.TEST):
        raise ConfigError(
            f"MEMFIT.BEST.METRIC {metric}: nothing is evaluated before the end of the run. Set "
            "TEST.EVAL_PERIOD and DATASETS.TEST"
        )


_RULES: dict[str, Rule] = {
    "MODEL.DEVICE": lambda key, value: check_device(value),
    "SOLVER.ACCUMULATION_STEPS": check_positive_int,
    "SOLVER.IMS_PER_BATCH": check_positive_int,
    "SOLVER.MAX_ITER": check_positive_int,
    "MEMFIT.MICRO_BATCH": _or_none(check_positive_int),
    # Without mixed precision it is float32: SOLVER.AMP.ENABLED False.
    "MEMFIT.AMP_DTYPE": _choice("float16", "bfloat16"),
    "MEMFIT.BUDGET_GB": lambda key, value: check_budget(value),
    "MEMFIT.PRESET": _preset,
    "MEMFIT.STOP_ON_SIGNALS": check_bool,
    "MEMFIT.EMA_DECAY": _or_none(_decay),
    "MEMFIT.BEST.MODE": _choice("max", "min"),
    "MEMFIT.BEST.PATIENCE": _or_none(check_positive_int),
    "MEMFIT.COST_MODEL.BYTES": _cost_sums,
    "MEMFIT.COST_MODEL.ERROR_GB": check_number,
    "MEMFIT.COST_MODEL.OVERHEAD_PIXELS": check_number,
    "MEMFIT.OOM.POLICY": _choice("raise", "split"),
    "MEMFIT.OOM.GROW_AFTER": check_positive_int,
    "MEMFIT.OOM.ALLOW_RESIZE": check_bool,
    "MEMFIT.OOM.LAST_RESORT": _choice("raise", "skip"),
    "MEMFIT.OOM.MAX_SKIPPED": partial(check_number, most=1),
    "MEMFIT.NORMALIZERS.POLICY": _choice("window", "exact", "off"),
    "MEMFIT.NORMALIZERS.LOSSES": _counted_losses,
    "MEMFIT.MONITOR.PERIOD": _or_none(check_positive_int),
    "MEMFIT.MONITOR.LEAK_WINDOW": _or_none(partial(check_int, at_least=40)),
    "MEMFIT.MONITOR.SNAPSHOT_ITER": _or_none(partial(check_int, at_least=0)),
    "MEMFIT.MONITOR.SNAPSHOT_ON_OOM": check_bool,
    "MEMFIT.EVALUATION.ON_DISK": check_bool,
    "MEMFIT.PLAN.ENABLED": check_bool,
    "MEMFIT.PLAN.COST_MODEL": check_bool,
    "MEMFIT.PLAN.FROM_RUNS": check_bool,
    "MEMFIT.PLAN.PREDICTED_GB": _predicted,
    "MEMFIT.PLAN.MARGIN": _or_none(partial(check_number, most=0.99)),
    "MEMFIT.PLAN.PREFER": _choice("exact", "speed"),
    "MEMFIT.PLAN.ALLOW": _tiers,
}
_BUDGET = ("MEMFIT.BUDGET_GB", "MEMFIT.PRESET")
_BEST = ("MEMFIT.BEST.METRIC", "MEMFIT.BEST.PATIENCE", "TEST.EVAL_PERIOD")
_RELATIONS: tuple[tuple[Sequence[str], Callable[[CfgNode], Any]], ...] = (
    *(
        ((key, *_BUDGET), partial(_has_budget, key))
        for key in ("MEMFIT.PLAN.ENABLED", "MEMFIT.COST_MODEL.BYTES")
    ),
    (_BEST, _patience_has_metric),
    (_BEST, _metric_is_evaluated),
)


def check_arguments(values: Mapping[str, tuple[str, Any]]) -> None:
    """Check arguments by the rules for keys.

    Args:
        values: names and values of the arguments, by key.

    Raises:
        ConfigError: values cannot work; all of them are named.
    """
    problems = Problems()
    for key, (name, value) in values.items():
        problems.of([key], _RULES[key], name, value)
    problems.raise_all()


def check_settings(
    cfg: CfgNode, ranks: Optional[int] = None, more: Rules = _NO_MORE, trains: bool = True
) -> CfgNode:
    """Check a config that has all keys of d2_memfit.

    Args:
        ranks: the number of ranks, where that is known.
        more: rules in addition to those for the keys of d2_memfit.
        trains: False for an evaluation, which does not read the keys of training.

    Returns:
        CfgNode: the config, scaled to the ranks by :func:`auto_scale_workers`.

    Raises:
        ConfigError: values cannot work; all of them are named.
    """
    problems = Problems()
    known = list(keys_of(default_keys()))
    for key in keys_of(cfg.MEMFIT, "MEMFIT."):
        problems.of([key], _check_name, key, known)
    problems.raise_all()
    for key in known:
        problems.of([key], _check_kind, key, cfg)
    problems.raise_all()
    own = {key: rule for key, rule in _RULES.items() if trains or not key.startswith("SOLVER.")}
    for key, rule in {**own, **more.values}.items():
        problems.of([key], rule, key, value_of(cfg, key))
    for name, technique in TECHNIQUES:
        problems.of([name], technique.is_on, cfg)  # raises on a value that cannot work
    for keys, relation in (*(_RELATIONS if trains else ()), *more.relations):
        problems.of(keys, relation, cfg)
    scaled = None
    if trains and ranks is not None:
        for name, technique in TECHNIQUES:
            problems.of([name], technique.check, cfg, ranks)
        keys = ("SOLVER.IMS_PER_BATCH", "SOLVER.ACCUMULATION_STEPS")
        scaled = problems.of(keys, _scaled, cfg, ranks)
    problems.raise_all()
    return cfg if scaled is None else scaled


def _check_name(key: str, known: Sequence[str]) -> None:
    if key not in known:
        raise UnknownKeyError(f"there is no config key {key}{did_you_mean(key.upper(), known)}")


def _check_kind(key: str, cfg: CfgNode) -> None:
    is_node = isinstance(value_of(default_keys(), key), CfgNode)
    if is_node and not isinstance(value_of(cfg, key), CfgNode):
        raise ConfigError(f"{key} must be a node with keys, got {value_of(cfg, key)!r}")


def _scaled(cfg: CfgNode, ranks: int) -> CfgNode:
    scaled = auto_scale_workers(cfg, ranks)
    if scaled.SOLVER.IMS_PER_BATCH % ranks:
        raise ConfigError(
            f"SOLVER.IMS_PER_BATCH must be divisible by the number of ranks, {ranks}, "
            f"got {scaled.SOLVER.IMS_PER_BATCH}"
        )
    return scaled
