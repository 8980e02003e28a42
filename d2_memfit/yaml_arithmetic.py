# Copyright (c) the d2_memfit developers.
"""Arithmetic in YAML, without running code from a file.

Some of Detectron2's own configs (all of RetinaNet's) have values such as

    SIZES: !!python/object/apply:eval ["[[x, x * 2**(1.0/3)] for x in [32, 64]]"]

Detectron2 therefore loads them with ``yaml.unsafe_load``, which runs any Python in the file. Here
such a value may only contain numbers, arithmetic, lists, comprehensions, and calls of a few
functions.
"""

import ast
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import yaml

__all__ = ["arithmetic_in_yaml"]

_TAG = "tag:yaml.org,2002:python/object/apply:eval"
_FUNCTIONS = {f.__name__: f for f in (float, int, len, list, max, min, range, round, sum, tuple)}
_NODES = (
    ast.Expression,
    ast.Constant,
    ast.Name,
    ast.expr_context,
    ast.List,
    ast.Tuple,
    ast.ListComp,
    ast.comprehension,
    ast.BinOp,
    ast.UnaryOp,
    ast.operator,
    ast.unaryop,
    ast.Call,
)


@contextmanager
def arithmetic_in_yaml() -> Iterator[None]:
    """While open, ``yaml.safe_load`` computes such values. Anything else stays an error."""
    yaml.SafeLoader.add_constructor(_TAG, _construct)
    try:
        yield
    finally:
        del yaml.SafeLoader.yaml_constructors[_TAG]


def _construct(loader: yaml.SafeLoader, node: yaml.Node) -> Any:
    (text,) = loader.construct_sequence(node)
    tree = ast.parse(text, mode="eval")
    for part in ast.walk(tree):
        if not isinstance(part, _NODES) or (
            isinstance(part, ast.Call) and getattr(part.func, "id", None) not in _FUNCTIONS
        ):
            raise yaml.constructor.ConstructorError(
                problem=f"only arithmetic is computed in a config, not {text!r}",
                problem_mark=node.start_mark,
            )
    return eval(compile(tree, "<config>", "eval"), {"__builtins__": {}, **_FUNCTIONS})
