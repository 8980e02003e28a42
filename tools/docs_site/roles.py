# Copyright (c) the d2_memfit developers.
"""Show the roles of Sphinx in docstrings, such as :class:`Job`, as code."""

import re
from typing import Any

import griffe


class Roles(griffe.Extension):
    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring:
            obj.docstring.value = re.sub(r":\w+:`[~.]*([^`]+)`", r"`\1`", obj.docstring.value)
