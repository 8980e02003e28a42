# Copyright (c) the d2_memfit developers.
"""Checks of single config values, and one error for several failed checks."""

import difflib
import math
import numbers
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, Union, get_args, get_origin

import torch
from detectron2.config import CfgNode

from .errors import ConfigError, ConfigErrors, one_line

__all__ = ["Check", "check_all", "check_bool", "check_device", "check_positive_int"]
__all__ += ["check_positive_number", "check_strings", "choice", "did_you_mean", "fits", "or_none"]
__all__ += ["shorter_sides", "usable_device", "value_of", "whole"]


def value_of(cfg: CfgNode, key: str) -> Any:
    """The value of a config key by its full name, such as SOLVER.MAX_ITER."""
    return reduce(getattr, key.split("."), cfg)


def shorter_sides(value: Union[int, Sequence[int]]) -> tuple[int, ...]:
    """INPUT.MIN_SIZE_TRAIN or INPUT.MIN_SIZE_TEST, a number or several, as a tuple."""
    return (value,) if isinstance(value, int) else tuple(value)


@dataclass(frozen=True)
class Check:
    """Raises :class:`ConfigError` unless a value passes a test.

    Attributes:
        what: what a value must be, for messages and docs.
    """

    what: str
    test: Callable[[Any], bool]

    def __call__(self, name: str, value: Any) -> None:
        if not self.test(value):
            raise ConfigError(f"{name} must be {self.what}, got {value!r:.999}")


def whole(least: int = 1, most: float = math.inf) -> Check:
    """A check for integers."""
    what = "a positive integer" if least == 1 else f"an integer of at least {least}"
    what = what if most == math.inf else f"{what} up to {most}"
    return Check(what, lambda value: fits(value, int) and least <= value <= most)


def choice(*values: Any) -> Check:
    """A check for one of two or more values of one type."""
    quoted = [repr(value) for value in values]
    what = f"{', '.join(quoted[:-1])} or {quoted[-1]}"
    return Check(what, lambda value: type(value) is type(values[0]) and value in values)


def or_none(check: Check) -> Check:
    """A check that None passes, too."""
    return Check(f"{check.what} or None", lambda value: value is None or check.test(value))


def check_device(name: str) -> torch.device:
    """The device of this name. Raise :class:`ConfigError` if PyTorch does not know it."""
    try:
        return torch.device(name)
    except RuntimeError as e:
        raise ConfigError(f"MODEL.DEVICE {name!r} is not a device of PyTorch: {e}") from e


def usable_device(name: str, is_asked_for: bool = False) -> str:
    """The device itself; "cpu" for a CUDA device on a machine without one.

    Args:
        is_asked_for: whether the command line names it, so that no other will do.

    Raises:
        ConfigError: PyTorch does not know the device, or cannot compute on it here.
    """
    device = check_device(name)
    number = getattr(torch, device.type).device_count() if hasattr(torch, device.type) else 0
    if device.type == "cuda" and not number and not is_asked_for:
        return "cpu"
    if (device.index or 0) >= number:
        raise ConfigError(f"MODEL.DEVICE {name}: PyTorch sees {number} devices of this kind")
    return name


def fits(value: Any, hint: Any) -> bool:
    """Whether a value fits a hint such as ``list[int]``. NaN is not a number here."""
    kind, inner = get_origin(hint) or hint, get_args(hint)
    if kind in (list, tuple) and isinstance(value, Sequence) and not isinstance(value, str):
        types = inner if kind is tuple else inner * len(value)
        return len(types) == len(value) and all(map(fits, value, types))
    if kind in (int, float):  # of 64 bits; True is not a number
        is_number = isinstance(value, numbers.Integral if kind is int else numbers.Real)
        return is_number and not isinstance(value, bool) and abs(value) < 2**63
    return kind is Any or isinstance(value, kind)


check_bool = choice(True, False)
check_positive_int = whole()
check_positive_number = Check("a positive number", lambda value: fits(value, float) and value > 0)
check_strings = Check("a list of names", lambda value: fits(value, list[str]))


def did_you_mean(name: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """Text " (did you mean ...?)" with known names that are close to an unknown one, or nothing."""
    names = difflib.get_close_matches(name, list(known), n=3, cutoff=cutoff)
    return f" (did you mean {' or '.join(names)}?)" if names else ""


def check_all(checks: Iterable[tuple[Sequence[str], Callable[[], Any]]]) -> None:
    """Raise the errors of all checks as one :class:`ConfigError`, with a line for each.

    Args:
        checks: each with its keys. It is skipped if an earlier check failed for one of them.
    """
    errors: list[ConfigError] = []
    wrong: set[str] = set()
    for keys, check in checks:
        if wrong.isdisjoint(keys):
            try:
                check()
            except ConfigError as e:
                errors.append(e)
                wrong.update(keys)
    if errors:
        raise ConfigErrors("\n".join(map(one_line, errors))) if len(errors) > 1 else errors[0]
