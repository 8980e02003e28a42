# Copyright (c) the d2_memfit developers.
"""Names that Detectron2 v0.6 uses, and that current NumPy, Pillow and setuptools have no more.

``tools/make_venv.py`` puts this file into an environment for Python 3.12 and later, with a .pth
file that imports it when Python starts. Detectron2's own files stay as they are.
"""

import importlib.util
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import numpy as np
from PIL import Image

# Gone from NumPy 1.24: https://numpy.org/doc/stable/release/1.24.0-notes.html
for _type in (bool, int, float, object, str):
    if _type.__name__ not in vars(np):
        setattr(np, _type.__name__, _type)

# Gone from Pillow 10: https://pillow.readthedocs.io/en/stable/deprecations.html
if not hasattr(Image, "LINEAR"):
    Image.LINEAR = Image.BILINEAR


def _resource_filename(package: str, name: str) -> str:
    spec = importlib.util.find_spec(package)
    assert spec is not None
    assert spec.origin is not None
    return str(Path(spec.origin).parent / name)


# Gone from setuptools 82. Detectron2's model_zoo finds its configs with the first of these
# functions; the second is for pytest, which calls it where it finds the module.
if importlib.util.find_spec("pkg_resources") is None:
    _module = ModuleType("pkg_resources")
    _module.__spec__ = ModuleSpec("pkg_resources", None)
    vars(_module)["resource_filename"] = _resource_filename
    vars(_module)["fixup_namespace_packages"] = lambda *_: None
    sys.modules["pkg_resources"] = _module
