# Copyright (c) the d2_memfit developers.
"""Names of 0.1.0 that are others now, for one release."""

import warnings
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

__all__ = ["deprecated_property", "renamed_argument"]

_Function = TypeVar("_Function", bound=Callable[..., Any])


def renamed_argument(old: str, new: str) -> Callable[[_Function], _Function]:
    """Decorator of a function that takes the keyword argument ``old`` as ``new``, with a
    DeprecationWarning.
    """

    def decorate(function: _Function) -> _Function:
        @wraps(function)
        def renamed(*args: Any, **kwargs: Any) -> Any:
            if old in kwargs:
                _warn(old, new)
                kwargs[new] = kwargs.pop(old)
            return function(*args, **kwargs)

        return renamed  # type: ignore[return-value]

    return decorate


def deprecated_property(old: str, new: str) -> property:
    """Property ``old`` of a class that is the attribute ``new``, with a DeprecationWarning."""

    def get(self: Any) -> Any:
        _warn(old, new)
        return getattr(self, new)

    return property(get, doc=f"Deprecated name of ``{new}``.")


def _warn(old: str, new: str) -> None:
    warnings.warn(f"{old} is deprecated: it is {new} now", DeprecationWarning, stacklevel=3)
