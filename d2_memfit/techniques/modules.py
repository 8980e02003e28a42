# Copyright (c) the d2_memfit developers.
"""Finding modules by name patterns, and changing a method of one module."""

from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

from torch import nn

from ..common.checks import did_you_mean
from ..common.errors import ConfigError

__all__ = ["find_modules", "has_forward", "wrap_method"]


def find_modules(model: nn.Module, key: str, patterns: Sequence[str]) -> list[nn.Module]:
    """The modules whose names match one of the patterns, as in ``fnmatch``.

    The parts of a matching module are not listed again: "backbone.bottom_up.res4.*" gives the
    blocks of res4. A module without a ``forward``, such as a ``ModuleList``, is replaced by its
    parts.

    Args:
        key: the config key of the patterns, for messages.

    Raises:
        ConfigError: a pattern matches nothing.
    """
    names = [name for name, _ in model.named_modules() if name]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ConfigError(
                f"{key}: no module of the model matches {pattern!r}"
                f"{did_you_mean(pattern, names, cutoff=0.4)}"
            )
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        is_inside = any(name.startswith(f"{outer}.") for outer in found)
        if name and not is_inside and any(fnmatchcase(name, pattern) for pattern in patterns):
            found[name] = module
    return [m for module in found.values() for m in _callable_modules(module)]


def has_forward(module: nn.Module) -> bool:
    """Whether a call of the module runs a ``forward``."""
    return "forward" in vars(module) or type(module).forward is not nn.Module.forward


def _callable_modules(module: nn.Module) -> Iterator[nn.Module]:
    if not has_forward(module):
        for child in module.children():
            yield from _callable_modules(child)
    else:
        yield module


def wrap_method(module: nn.Module, name: str, around: Callable[..., Any], *settings: Any) -> None:
    """Replace a method of one module, such as its ``forward``, by a call around it.

    Copies and pickles of the module have it too. Several can be around each other.

    Args:
        around: called with the module, its method, the settings, and the arguments. A function of a
            file, so that it can be pickled.
    """
    method = vars(module).get(name) or partial(getattr(type(module), name), module)
    setattr(module, name, partial(around, module, method, *settings))
