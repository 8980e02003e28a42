"""Whether the images of a dataset are there, and of the size that its file says."""

import os
from collections.abc import Sequence
from typing import Any

from detectron2.utils.file_io import PathManager
from PIL import Image

from ..errors import DataError

__all__ = ["check_images"]

_MOST_OPENED = 50
_ORIENTATION = 0x0112  # the tag of EXIF
_LIES_ON_ITS_SIDE = (5, 6, 7, 8)


def check_images(name: str, images: Sequence[dict[str, Any]], folder: str) -> None:
    """Look for all of them, and into some.

    Args:
        name: of the dataset.
        images: the list of a COCO file.
        folder: that their names are relative to.

    Raises:
        DataError: one does not exist, cannot be read, or has another size than its entry.
    """
    files = [os.path.join(folder, str(image["file_name"])) for image in images]
    if "://" in folder:  # files elsewhere are not listed, and each look takes its time
        missing = [] if PathManager.isfile(files[0]) else files[:1]
    else:
        folders = {os.path.dirname(file) for file in files}
        there = {f: set(os.listdir(f)) if os.path.isdir(f) else set() for f in folders}
        missing = [f for f in files if os.path.basename(f) not in there[os.path.dirname(f)]]
    if missing:
        raise DataError(
            f"dataset {name}: {len(missing)} of {len(files)} images do not exist, the first is "
            f"{missing[0]}"
        )
    if "://" in folder:
        return
    step = max(len(files) // _MOST_OPENED, 1)
    for image, file in zip(images[::step], files[::step]):
        expected = image["width"], image["height"]
        if _size(name, file) != expected:
            raise DataError(
                f"dataset {name}: {file} has {_size(name, file)} pixels of width and height, and "
                f"its entry says {expected}. Detectron2 turns photographs as their EXIF data say"
            )


def _size(name: str, file: str) -> tuple[int, int]:
    """Width and height in pixels, as Detectron2 reads it."""
    try:
        with Image.open(file) as image:
            width, height = image.size
            orientation = image.getexif().get(_ORIENTATION)
    except OSError as e:  # UnidentifiedImageError, too
        raise DataError(f"dataset {name}: the image {file} cannot be read ({e})") from e
    return (height, width) if orientation in _LIES_ON_ITS_SIDE else (width, height)
