# Copyright (c) the d2_memfit developers.
"""Config files by path, or by name in Detectron2's model zoo and ours."""

from pathlib import Path
from typing import Any

import detectron2
from detectron2.config import CfgNode

from ..common.checks import did_you_mean, suggestion
from ..common.files import is_file
from ..errors import ConfigError
from .keys import keys_of
from .yaml_arithmetic import arithmetic_in_yaml

__all__ = ["OUR_ZOO", "detectron2_zoo", "find_config_file", "keys_in_own_files"]

_EXAMPLE = "COCO-InstanceSegmentation/mask_rcnn_R_50_FPN_3x.yaml"


def detectron2_zoo() -> Path:
    """The folder with the configs of Detectron2's model zoo.

    ``detectron2.model_zoo`` is not imported: it needs pkg_resources, which setuptools 82 and later
    do not have.
    """
    return Path(detectron2.__file__).parent / "model_zoo" / "configs"


_INSTALLED = Path(__file__).parent / "configs"
_CHECKOUT = Path(__file__).parents[2] / "configs"
OUR_ZOO = _INSTALLED if _INSTALLED.is_dir() else _CHECKOUT
_ZOOS = (OUR_ZOO, detectron2_zoo())


def find_config_file(name: str, suffix: str = ".yaml") -> str:
    """Find the path of a config file.

    Args:
        name: a path, or the name of a config in our zoo or Detectron2's, with or without suffix.
        suffix: ".yaml", or ".py" for a LazyConfig.

    Raises:
        ConfigError: there is no such file, or the name is empty.
    """
    if not name:
        raise ConfigError(f"--config-file: name a config of the zoo, such as {_EXAMPLE}, or a file")
    if name.endswith(".py") and suffix == ".yaml":
        raise ConfigError(f"{name} is a LazyConfig, but this command takes a yaml config")
    if is_file(name):
        return name
    for folder in _ZOOS:
        for file in (folder / name, folder / f"{name}{suffix}"):
            if file.is_file():
                return str(file)
    files = {f.relative_to(zoo).as_posix() for zoo in _ZOOS for f in zoo.glob(f"*/**/*{suffix}")}
    names = sorted(name for name in files if "/Base-" not in name and "__init__" not in name)
    same = [n for n in names if Path(n).stem == Path(name).stem]  # in any folder of the zoo
    hint = suggestion(same) or did_you_mean(name, names, cutoff=0.5)
    raise ConfigError(
        f"--config-file {name!r} does not exist, as a file or as a config of the zoo{hint}. An "
        f"example is {_EXAMPLE}"
    )


def keys_in_own_files(config_file: str) -> set[str]:
    """Keys that a config file and its bases set, without the zoos' files.

    A recipe of the zoo is for the zoo's dataset. A user's own file is for the user's dataset.
    """
    with arithmetic_in_yaml():
        return {*keys_of(CfgNode(_OwnFiles.load_yaml_with_base(config_file)))}


class _OwnFiles(CfgNode):
    @classmethod
    def load_yaml_with_base(cls, filename: str, allow_unsafe: bool = False) -> dict[str, Any]:
        path = Path(filename).resolve()
        if any(path.is_relative_to(folder.resolve()) for folder in _ZOOS):
            return {}
        return super().load_yaml_with_base(filename, allow_unsafe=allow_unsafe)
