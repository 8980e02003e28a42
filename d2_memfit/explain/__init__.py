# Copyright (c) the d2_memfit developers.
"""What a log of a training tells: what ran, what it needed, how it ended, what would have fit."""

import sys
from types import ModuleType
from typing import Any

from .explanation import *
from .fitting import *
from .page import *
from .rebuild import *
from .records import *
from .sources import *
from .text import *
from .whole import *


class _Callable(ModuleType):
    """The room, which is called as the function: ``d2_memfit.explain(path)``."""

    def __call__(self, *args: Any, **kwargs: Any) -> "Explanation":
        return explain(*args, **kwargs)


sys.modules[__name__].__class__ = _Callable
