# Copyright (c) the d2_memfit developers.
"""The configs of Detectron2's model zoo."""

from pathlib import Path

import detectron2

__all__ = ["detectron2_zoo"]


def detectron2_zoo() -> Path:
    """The folder with the configs of Detectron2's model zoo.

    ``detectron2.model_zoo`` is not imported: it needs pkg_resources, which setuptools 82 and later
    do not have.
    """
    return Path(detectron2.__file__).parent / "model_zoo" / "configs"
