# Copyright (c) the d2_memfit developers.
"""Checks that a dataset's images exist, and have the size that their dicts say."""

import os
from collections.abc import Mapping, Sequence
from typing import Any

from detectron2.utils.file_io import PathManager
from PIL import Image

from ..common.reading import checked
from .faults import Summary, count

__all__ = ["look_at_images", "size_of_image"]

_MOST_OPENED = 2000  # about a second on a local disk
_ORIENTATION = 0x0112  # the tag of EXIF


def look_at_images(summary: Summary, dicts: Sequence[Mapping[str, Any]]) -> None:
    """Count faults of image files. All must exist; up to 2,000 are opened, evenly spread.

    Args:
        dicts: each with ``file_name``, and with ``height`` and ``width`` after EXIF, if known.
            Only the first of files of the form ``scheme://`` is looked for.
    """
    files = [image["file_name"] for image in dicts]
    if any("://" in file for file in files[:1]):  # each check is slow
        if not PathManager.isfile(files[0]):
            count(summary.cases, "missing", files[0])
        return
    folders = {os.path.dirname(file) for file in files}
    there = {f: set(os.listdir(f or ".")) if os.path.isdir(f or ".") else set() for f in folders}
    found = [os.path.basename(file) in there[os.path.dirname(file)] for file in files]
    for file in (file for file, is_there in zip(files, found) if not is_there):
        count(summary.cases, "missing", file)
    images = [image for image, is_there in zip(dicts, found) if is_there]
    for image in images[:: 1 + len(images) // _MOST_OPENED]:
        summary.num_opened += 1
        file, expected = image["file_name"], (image.get("width"), image.get("height"))
        try:
            size = size_of_image(file)
        except Exception as e:  # PIL raises SyntaxError and others, not only OSError
            count(summary.cases, "unreadable", f"{file} ({type(e).__name__}: {e})")
            continue
        if None not in expected and size != expected:
            text = f"{file} has {size} pixels of width and height, but its entry says {expected}"
            count(summary.cases, "size", text)


def size_of_image(file: str) -> tuple[int, int]:
    """Width and height of an image as Detectron2 loads it.

    Raises:
        Exception: of many types, if it is not an image.
    """
    with Image.open(checked(file)) as image:
        width, height = image.size
        # For a PNG, PIL would decode the image to look for EXIF, which is rare there.
        asks = image.format != "PNG" or "exif" in image.info
        is_on_its_side = asks and image.getexif().get(_ORIENTATION) in (5, 6, 7, 8)
    return (height, width) if is_on_its_side else (width, height)
