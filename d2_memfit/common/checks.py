# Copyright (c) the d2_memfit developers.
"""Checks of single values of a config."""

import difflib
import math
import numbers
from collections.abc import Iterable, Sequence
from functools import reduce
from typing import Any

from detectron2.config import CfgNode

from ..errors import ConfigError

__all__ = [
    "check_bool",
    "check_choice",
    "check_int",
    "check_positive_int",
    "check_positive_number",
    "check_strings",
    "did_you_mean",
    "suggestion",
    "value_of",
]


def value_of(cfg: CfgNode, key: str) -> Any:
    """The value of a whole key, such as SOLVER.MAX_ITER."""
    return reduce(getattr, key.split("."), cfg)


def check_int(name: str, value: object, at_least: int) -> None:
    """Raise :class:`ConfigError` unless ``value`` is an integer that is large enough."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < at_least:
        what = "a positive integer" if at_least == 1 else f"an integer of at least {at_least}"
        raise ConfigError(f"{name} must be {what}, got {value!r}")


def check_positive_int(name: str, value: object) -> None:
    """Raise :class:`ConfigError` unless ``value`` is an integer of at least 1."""
    check_int(name, value, at_least=1)


def check_positive_number(name: str, value: Any) -> None:
    """Raise :class:`ConfigError` unless ``value`` is a finite number above 0."""
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not is_number or not 0 < value < math.inf:
        raise ConfigError(f"{name} must be a positive number, got {value!r}")


def check_bool(name: str, value: object) -> None:
    """Raise :class:`ConfigError` unless ``value`` is True or False."""
    if not isinstance(value, bool):
        raise ConfigError(f"{name} must be True or False, got {value!r}")


def check_choice(name: str, value: object, choices: Sequence[str]) -> None:
    """Raise :class:`ConfigError` unless ``value`` is one of two or more texts."""
    if value not in choices:
        texts = [repr(choice) for choice in choices]
        raise ConfigError(f"{name} must be {', '.join(texts[:-1])} or {texts[-1]}, got {value!r}")


def check_strings(name: str, value: Any) -> None:
    """Raise :class:`ConfigError` unless ``value`` is a list or tuple of texts."""
    is_list = isinstance(value, Sequence) and not isinstance(value, str)
    if not is_list or not all(isinstance(v, str) for v in value):
        raise ConfigError(f"{name} must be a list of names, got {value!r}")


def did_you_mean(name: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """Suggest known names that are close to an unknown one, as :func:`suggestion`."""
    return suggestion(difflib.get_close_matches(name, list(known), n=3, cutoff=cutoff))


def suggestion(names: Sequence[str]) -> str:
    """Text " (did you mean ...?)" with these names, or nothing."""
    return f" (did you mean {' or '.join(names)}?)" if names else ""
