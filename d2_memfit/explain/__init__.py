# Copyright (c) the d2_memfit developers.
"""What a log of a training tells: what ran, what it needed, how it ended, what would have fit."""

import sys
from types import ModuleType
from typing import Any

from .rebuild import Help
from .verdict import Explanation, explain

__all__ = ["Explanation", "Help", "explain"]


class _Callable(ModuleType):
    """The room, which is called as the function: ``d2_memfit.explain(path)``."""

    def __call__(self, *args: Any, **kwargs: Any) -> Explanation:
        return explain(*args, **kwargs)


sys.modules[__name__].__class__ = _Callable
