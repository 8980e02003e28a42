# Copyright (c) the d2_memfit developers.
"""Config files by path, or by name in Detectron2's model zoo and ours, and arithmetic in them.

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
from pathlib import Path
from typing import Any
from unittest.mock import patch

import detectron2
import yaml
from detectron2.config import CfgNode

from ..common.checks import did_you_mean
from ..common.errors import ConfigError
from ..common.files import SafeLoader, is_file
from .keys import leaves

__all__ = ["DETECTRON2_ZOO", "OUR_ZOO", "arithmetic_in_yaml", "find_config_file"]
__all__ += ["keys_in_own_files"]

_EXAMPLE = "COCO-InstanceSegmentation/mask_rcnn_R_50_FPN_3x.yaml"


# detectron2.model_zoo is not imported: it needs pkg_resources, which setuptools 82 and later do not
# have.
DETECTRON2_ZOO = Path(detectron2.__file__).parent / "model_zoo" / "configs"
_INSTALLED = Path(__file__).parent / "configs"
_CHECKOUT = Path(__file__).parents[2] / "configs"
OUR_ZOO = _INSTALLED if _INSTALLED.is_dir() else _CHECKOUT
_ZOOS = (OUR_ZOO, DETECTRON2_ZOO)


def find_config_file(name: str, suffix: str = ".yaml") -> str:
    """Find the path of a config file.

    Args:
        name: a path, or the name of a config in our zoo or Detectron2's, with or without suffix.
        suffix: ".yaml", or ".py" for a LazyConfig.

    Raises:
        ConfigError: there is no such file.
    """
    if is_file(name):
        return name
    for file in (zoo / f"{name}{end}" for zoo in _ZOOS for end in ("", suffix)):
        if file.is_file():
            return str(file)
    files = {f.relative_to(zoo).as_posix() for zoo in _ZOOS for f in zoo.glob(f"*/**/*{suffix}")}
    same = {file for file in files if Path(file).stem == Path(name).stem}  # in any folder
    hint = did_you_mean(name, sorted(same or files), cutoff=0.5)
    raise ConfigError(
        f"--config-file {name!r} does not exist, as a file or as a config of the zoo{hint}. An "
        f"example is {_EXAMPLE}"
    )


def keys_in_own_files(config_file: str) -> set[str]:
    """Keys that a config file and its bases set, without the zoos' files.

    A recipe of the zoo is for the zoo's dataset. A user's own file is for the user's dataset.
    """
    with arithmetic_in_yaml():
        return {*dict(leaves(_OwnFiles.load_yaml_with_base(config_file)))}


class _OwnFiles(CfgNode):
    @classmethod
    def load_yaml_with_base(cls, filename: str, allow_unsafe: bool = False) -> dict[str, Any]:
        path = Path(filename).resolve()
        if any(path.is_relative_to(folder.resolve()) for folder in _ZOOS):
            return {}
        return super().load_yaml_with_base(filename, allow_unsafe=allow_unsafe)


_OPERATORS: dict[type, Callable[[Any, Any], Any]] = {
    **{ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul},
    **{ast.Div: operator.truediv, ast.FloorDiv: operator.floordiv},
    **{ast.Mod: operator.mod, ast.Pow: operator.pow},
}
_FUNCTIONS: dict[str, Callable[..., Any]] = {"int": int, "range": range}


class _Loader(SafeLoader):
    """Reads plain data, and computes arithmetic."""


def arithmetic_in_yaml() -> AbstractContextManager[Any]:
    """While open, ``yaml.safe_load`` computes such values. Anything else is still an error."""
    return patch.object(yaml, "SafeLoader", _Loader)


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
    if isinstance(node, ast.Call) and ast.unparse(node.func) in _FUNCTIONS:
        return _FUNCTIONS[ast.unparse(node.func)](*[_value(item, names) for item in node.args])
    raise ValueError(f"{ast.unparse(node)[:100]!r} is not arithmetic")
