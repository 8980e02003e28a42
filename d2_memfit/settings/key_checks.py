# Copyright (c) the d2_memfit developers.
"""Checks for the values of config keys, and the function that checks a config by them."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Optional

from detectron2.config import CfgNode

from ..common.checks import (
    check_all,
    check_bool,
    check_choice,
    check_device,
    check_int,
    check_number,
    check_positive_int,
    check_strings,
    did_you_mean,
    fits,
    must,
    value_of,
)
from ..config import budget_of_preset, default_keys, keys_of
from ..errors import ConfigError, UnknownKeyError
from ..memory import check_budget
from ..techniques import TECHNIQUES, TIERS
from .lazy import ARGUMENTS
from .scaling import auto_scale_workers

__all__ = ["KeyChecks", "check_arguments", "check_settings"]

Check = Callable[[str, Any], Any]


class KeyChecks(NamedTuple):
    """Checks for keys, which raise :class:`ConfigError`.

    Attributes:
        values: checks by key, each called with the key and its value.
        relations: checks for several keys. Each is called with the config if the keys pass their
            own checks.
    """

    values: Mapping[str, Check]
    relations: Sequence[tuple[Sequence[str], Callable[[CfgNode], Any]]] = ()


_NO_MORE = KeyChecks({})


def _or_none(check: Check) -> Check:
    return lambda key, value: None if value is None else check(key, value)


def _choice(*choices: str) -> Check:
    return partial(check_choice, choices=choices)


def _preset(key: str, value: Any) -> None:
    if value:
        budget_of_preset(value)


def _tiers(key: str, value: Any) -> None:
    check_strings(key, value)
    for tier in value:
        check_choice(key, tier, TIERS)


def _are_counts(value: Any) -> bool:
    return fits(value, list[tuple[str, str]]) and all(of in ("objects", "sum") for _, of in value)


def _plan_has_budget(cfg: CfgNode) -> None:
    if cfg.MEMFIT.PLAN.ENABLED and cfg.MEMFIT.BUDGET_GB is None and not cfg.MEMFIT.PRESET:
        raise ConfigError("MEMFIT.PLAN.ENABLED needs a MEMFIT.BUDGET_GB, or a MEMFIT.PRESET")


_SWITCHES = (
    *("MONITOR.SNAPSHOT_ON_OOM", "OOM.ALLOW_RESIZE"),
    *("PLAN.ENABLED", "STOP_ON_SIGNALS"),
)
_CHECKS: dict[str, Check] = {
    **{f"MEMFIT.{key}": check_bool for key in _SWITCHES},
    "MODEL.DEVICE": lambda key, value: check_device(value),
    "SOLVER.ACCUMULATION_STEPS": check_positive_int,
    "SOLVER.IMS_PER_BATCH": check_positive_int,
    "SOLVER.MAX_ITER": check_positive_int,
    "MEMFIT.MICRO_BATCH": _or_none(check_positive_int),
    # Without mixed precision it is float32: SOLVER.AMP.ENABLED False.
    "MEMFIT.AMP_DTYPE": _choice("float16", "bfloat16"),
    "MEMFIT.BUDGET_GB": lambda key, value: check_budget(value),
    "MEMFIT.PRESET": _preset,
    "MEMFIT.OOM.POLICY": _choice("raise", "split"),
    "MEMFIT.OOM.LAST_RESORT": _choice("raise", "skip"),
    "MEMFIT.NORMALIZERS.POLICY": _choice("window", "exact", "off"),
    "MEMFIT.NORMALIZERS.LOSSES": must(
        'pairs of a pattern of names of losses and "objects" or "sum", such as [["loss_mask*", '
        '"objects"]]',
        _are_counts,
    ),
    "MEMFIT.MONITOR.PERIOD": _or_none(check_positive_int),
    "MEMFIT.MONITOR.LEAK_WINDOW": _or_none(partial(check_int, at_least=40)),
    "MEMFIT.PLAN.PREDICTED_GB": must(
        "three numbers of GB, as a plan writes them, or []",
        lambda value: fits(value, list[float]) and len(value) in (0, 3),
    ),
    "MEMFIT.PLAN.OFFLOADED_GB": check_number,
    "MEMFIT.PLAN.MARGIN": _or_none(partial(check_number, most=0.99)),
    "MEMFIT.PLAN.PREFER": _choice("exact", "speed"),
    "MEMFIT.PLAN.ALLOW": _tiers,
}
_PLAN = ("MEMFIT.PLAN.ENABLED", "MEMFIT.BUDGET_GB", "MEMFIT.PRESET")
_BATCH = ("SOLVER.IMS_PER_BATCH", "SOLVER.ACCUMULATION_STEPS")
_RELATIONS: tuple[tuple[Sequence[str], Callable[[CfgNode], Any]], ...] = (
    (_PLAN, _plan_has_budget),
)


def check_arguments(node: str, arguments: Mapping[str, Any]) -> None:
    """Check arguments by the checks for keys.

    Args:
        node: the node of the keys, for arguments that are not in :data:`ARGUMENTS`.

    Raises:
        ConfigError: some values cannot work. The message names all of them.
    """
    keys = {name: ARGUMENTS.get(name, f"{node}.{name.upper()}") for name in arguments}
    check_all(
        ([key], partial(_CHECKS[key], name, arguments[name]))
        for name, key in keys.items()
        if key in _CHECKS
    )


def check_settings(
    cfg: CfgNode, ranks: Optional[int] = None, more: KeyChecks = _NO_MORE, trains: bool = True
) -> CfgNode:
    """Check a config that has all keys of d2_memfit.

    Args:
        ranks: the number of ranks; None if it is not known.
        more: checks in addition to those for the keys of d2_memfit.
        trains: False for an evaluation, which does not read the keys of training.

    Returns:
        CfgNode: the config, scaled to the ranks by :func:`auto_scale_workers`.

    Raises:
        ConfigError: some values cannot work. The message names all of them.
    """
    known = list(keys_of(default_keys()))
    names = keys_of(cfg.MEMFIT, "MEMFIT.")
    check_all(([name], partial(_check_name, name, known)) for name in names)
    check_all(([key], partial(_check_kind, key, cfg)) for key in known)
    scaled = [cfg]

    def checks() -> Iterator[tuple[Sequence[str], Callable[[], Any]]]:
        for key, check in {**_CHECKS, **more.values}.items():
            if trains or key in more.values or not key.startswith("SOLVER."):
                yield [key], partial(check, key, value_of(cfg, key))
        for name, technique in TECHNIQUES:
            yield [name], partial(technique.is_on, cfg)  # raises on a value that cannot work
            if trains and ranks is not None:
                yield [name], partial(technique.check, cfg, ranks)
        for keys, relation in (*(_RELATIONS if trains else ()), *more.relations):
            yield keys, partial(relation, cfg)
        if trains and ranks is not None:
            yield _BATCH, lambda: scaled.append(_scaled(cfg, ranks))

    check_all(checks())
    return scaled[-1]


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
