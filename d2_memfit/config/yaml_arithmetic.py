# Copyright (c) the d2_memfit developers.
"""Arithmetic in YAML, without running code from a file.

Some of Detectron2's own configs (all of RetinaNet's) have values such as

    SIZES: !!python/object/apply:eval ["[[x, x * 2**(1.0/3)] for x in [32, 64]]"]

Detectron2 therefore loads them with ``yaml.unsafe_load``, which runs any Python in the file. Here
such a value may only contain numbers, arithmetic, lists, list comprehensions, ``range`` and ``int``
(which MaskFormer's configs and configs derived from them call).
"""

import ast
import operator
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import yaml

from ..common.patching import replaced_functions
from ..common.reading import SafeLoader

__all__ = ["arithmetic_in_yaml"]

_OPERATORS: dict[type, Callable[[Any, Any], Any]] = {
    **{ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul},
    **{ast.Div: operator.truediv, ast.FloorDiv: operator.floordiv},
    **{ast.Mod: operator.mod, ast.Pow: operator.pow},
}


class _Loader(SafeLoader):
    """Reads plain data, and computes arithmetic."""


def arithmetic_in_yaml() -> AbstractContextManager[None]:
    """While open, ``yaml.safe_load`` computes such values. Anything else is still an error."""
    return replaced_functions([yaml], {"SafeLoader": lambda _: _Loader})


def _construct(loader: yaml.SafeLoader, node: yaml.Node) -> Any:
    (text,) = loader.construct_sequence(node)
    try:
        return _value(ast.parse(text, mode="eval").body, {})
    except Exception as e:
        raise yaml.constructor.ConstructorError(
            problem=f"only arithmetic is computed in a config, not {text[:100]!r} ({e})",
            problem_mark=node.start_mark,
        ) from e


_Loader.add_constructor("tag:yaml.org,2002:python/object/apply:eval", _construct)


def _value(node: ast.expr, names: Mapping[str, Any]) -> Any:
    """The value of an expression; ``names`` are the variables of the loops around it."""
    if isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
        return node.value
    if isinstance(node, ast.Name) and node.id in names:
        return names[node.id]
    if isinstance(node, (ast.List, ast.Tuple)):
        return [_value(item, names) for item in node.elts]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand, names)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        function = _OPERATORS[type(node.op)]
        pair = _value(node.left, names), _value(node.right, names)
        function(*map(float, pair))  # raises if the result is too large
        return function(*pair)
    if isinstance(node, ast.ListComp) and len(node.generators) == 1:
        loop = node.generators[0]
        if isinstance(loop.target, ast.Name) and not loop.ifs:
            name, items = loop.target.id, _value(loop.iter, names)
            return [_value(node.elt, {**names, name: item}) for item in items]
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        if node.func.id == "range":
            return list(range(*[_value(argument, names) for argument in node.args]))
        if node.func.id == "int" and len(node.args) == 1:
            return int(_value(node.args[0], names))
    raise ValueError(f"{ast.unparse(node)[:100]!r} is not arithmetic")
