# Copyright (c) the d2_memfit developers.
"""Reading of files that may be damaged."""

import json
import os
import zipfile
from dataclasses import MISSING, fields
from typing import Any, Union, get_type_hints

import yaml
from detectron2.utils.file_io import PathManager

from ..errors import DataError
from .checks import fits
from .files import is_local

__all__ = ["SafeLoader", "checked", "load_fields", "load_json", "load_yaml"]
__all__ += ["verify_checksums"]

SafeLoader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times as fast, with libyaml

_TYPES = {int: "an integer", float: "a finite number", str: "a text", bool: "true or false"}

Name = Union[str, "os.PathLike[str]"]


def checked(path: Name, what: str = "") -> str:
    """Return a path if it is a readable file, or not local.

    Args:
        what: the start of the message, such as the option or key that names the file.

    Raises:
        DataError: it is missing, is not a file, or may not be read.
    """
    name = os.fspath(path)
    try:
        if not is_local(name) or (os.path.isfile(name) and os.access(name, os.R_OK)):
            return name
        os.stat(name)
        why = "permission denied" if os.path.isfile(name) else "it is not a file"
    except (OSError, ValueError) as e:  # ValueError: no file can have such a name
        why = getattr(e, "strerror", None) or str(e)
    raise DataError(f"{what}{name} cannot be read ({why})")


def load_json(path: Name, what: str = "") -> Any:
    """Read a JSON file, which may be of an iopath handler.

    Raises:
        DataError: it cannot be read, or is not valid JSON.
    """
    try:
        with PathManager.open(checked(path, what)) as f:
            return json.load(f)
    except (MemoryError, OSError, RecursionError, ValueError) as e:  # of any depth and size
        raise DataError(f"{what}{path} is not valid JSON ({str(e) or 'it is too large'})") from e


def load_yaml(path: Name, what: str = "") -> Any:
    """Read a YAML file of plain data.

    Raises:
        DataError: it cannot be read, or is not valid YAML.
    """
    try:
        with open(checked(path, what), "rb") as f:
            return yaml.load(f, SafeLoader)
    except (ValueError, yaml.YAMLError) as e:
        raise DataError(f"{what}{path} is not valid YAML ({' '.join(str(e).split())})") from e


def verify_checksums(filename: Name) -> None:
    """Read a ``torch.save`` file once, in small pieces, to verify its checksums.

    Pickle files and PyTorch's format before 1.6 have no checksums.

    Raises:
        zipfile.BadZipFile, or another error of zipfile: the file is damaged.
    """
    if zipfile.is_zipfile(filename):
        with zipfile.ZipFile(filename) as file:
            damaged = file.testzip()
        if damaged is not None:
            raise zipfile.BadZipFile(f"wrong checksum of {damaged}")


def load_fields(cls: Any, values: Any, where: str) -> Any:
    """Make an instance of a dataclass from the fields of a record in a file.

    Args:
        where: the start of the message: the file.

    Raises:
        DataError: a field is missing or unknown, or has a value of another type. NaN is not a
            number here.
    """
    hints = get_type_hints(cls)
    values = values if isinstance(values, dict) else {}
    for field in fields(cls):
        is_needed = field.default is field.default_factory is MISSING
        if is_needed and field.name not in values:
            raise DataError(f"{where}: the field {field.name} is missing")
    for name, value in values.items():
        if name not in hints:
            raise DataError(f"{where}: there is no field {name}")
        if not fits(value, hint := hints[name]):
            raise DataError(f"{where}: {name} must be {_TYPES.get(hint, hint)}, got {value!r:.99}")
    return cls(**values)
