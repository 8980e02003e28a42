# Copyright (c) the d2_memfit developers.
"""What a log of a training tells: what ran, what it needed, how it ended, what would have fit."""

import sys
from types import ModuleType

from .rebuild import Help
from .verdict import Explanation, explain

__all__ = ["Explanation", "Help", "explain"]


class _Callable(ModuleType):
    """The room, which is called as the function: ``d2_memfit.explain(path)``."""

    __call__ = staticmethod(explain)


sys.modules[__name__].__class__ = _Callable
