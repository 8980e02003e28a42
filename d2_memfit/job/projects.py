# Copyright (c) the d2_memfit developers.
"""Projects that extend Detectron2: their config keys, trainers and registries."""

import importlib
import re
import sys
from collections.abc import Callable
from types import FunctionType
from typing import Any, Optional

from detectron2.config import CfgNode
from detectron2.modeling import META_ARCH_REGISTRY
from fvcore.common.registry import Registry

from ..common.checks import did_you_mean
from ..compat import registry_name
from ..errors import ConfigError

__all__ = ["PROJECT", "find_function", "own_registry", "projects_of"]

PROJECT = "detectron2.projects.point_rend:add_pointrend_config"
_TRAINER = "train_net:Trainer"


def find_function(name: str, option: str = "--project") -> Callable[..., Any]:
    """Find the object named MODULE:NAME. Importing its module registers the project's models.

    Args:
        name: MODULE:NAME.
        option: the command-line option, for messages.

    Raises:
        ConfigError: there is no such module or function, or the module cannot be imported.
    """
    example = _TRAINER if option == "--trainer" else PROJECT
    what = "CLASS" if option == "--trainer" else "FUNCTION"
    module_name, colon, function_name = name.partition(":")
    is_a_path = "/" in module_name or module_name.endswith(".py")
    if is_a_path or not (module_name and colon and function_name):
        raise ConfigError(f"{option} must be MODULE:{what}, such as {example}, got {name!r}")
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as e:  # a project's code may raise anything
        elsewhere = ". If it is in another folder, add --project FOLDER" * (option == "--trainer")
        raise ConfigError(
            f"{option} {name}: importing {module_name} failed ({type(e).__name__}: {e}){elsewhere}"
        ) from e
    function = getattr(module, function_name, None)
    if not callable(function):
        raise ConfigError(
            f"{option} {name}: {module_name} has no {what.lower()} {function_name!r}"
            f"{did_you_mean(function_name, dir(module))}"
        )
    return function


def projects_of(trainer: str) -> list[str]:
    """The functions with which a trainer's script makes its config, as values of ``--project``.

    They are those that its functions call by names such as ``add_maskdino_config``, in this order,
    and a ``get_cfg`` that is not Detectron2's.

    Args:
        trainer: MODULE:CLASS.
    """
    find_function(trainer, "--trainer")
    name = trainer.partition(":")[0]
    known = vars(sys.modules[name])
    own = [f for f in known.values() if isinstance(f, FunctionType) and f.__module__ == name]
    called = dict.fromkeys(called for f in own for called in f.__code__.co_names)
    return [
        f"{name}:{f}"
        for f in called
        if re.fullmatch(r"get_cfg|add_\w*configs?", f)
        and not known[f].__module__.startswith(("detectron2.config", "d2_memfit."))
    ]


def own_registry(cfg: CfgNode) -> Optional[str]:
    """The module with its own registry that has the config's meta-architecture; None if none has.

    The registry is not Detectron2's.
    """
    name, kind = cfg.MODEL.META_ARCHITECTURE, registry_name(META_ARCH_REGISTRY)
    for module_name, module in list(sys.modules.items()):
        if module_name.startswith("detectron2"):
            continue
        for value in list(getattr(module, "__dict__", {}).values()):
            is_other = type(value) is Registry and value is not META_ARCH_REGISTRY
            if is_other and registry_name(value) == kind and name in value:
                return module_name
    return None
