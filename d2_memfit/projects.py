"""Projects on top of Detectron2, which add keys of their own to its config."""

import argparse
import importlib
import os
import sys
from collections.abc import Callable
from typing import Any

from detectron2.config import CfgNode

from .checks import near
from .errors import ConfigError

__all__ = ["add_project_option", "find_function"]

_EXAMPLE = "detectron2.projects.point_rend:add_pointrend_config"


def add_project_option(parser: argparse.ArgumentParser) -> None:
    """Add ``--project MODULE:FUNCTION``, whose values are for :func:`find_function`."""
    parser.add_argument(
        "--project",
        action="append",
        default=[],
        metavar="MODULE:FUNCTION",
        help=f"a function that adds a project's keys to a config, such as {_EXAMPLE}; "
        "may be repeated",
    )


def find_function(name: str) -> Callable[[CfgNode], Any]:
    """The function that adds a project's keys. Importing its module registers the project's models.

    Args:
        name: MODULE:FUNCTION. As for ``python -m``, modules of the current folder come first.

    Raises:
        ConfigError: there is no such module or function, or the module cannot be imported.
    """
    module_name, colon, function_name = name.partition(":")
    if not (module_name and colon and function_name):
        raise ConfigError(f"--project must be MODULE:FUNCTION, such as {_EXAMPLE}, got {name!r}")
    if sys.path[0] != os.getcwd():
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as e:  # whatever a project's code raises
        raise ConfigError(
            f"--project {name}: importing {module_name} failed ({type(e).__name__}: {e})"
        ) from e
    function = getattr(module, function_name, None)
    if not callable(function):
        raise ConfigError(
            f"--project {name}: {module_name} has no function {function_name!r}"
            f"{near(function_name, dir(module))}"
        )
    return function
