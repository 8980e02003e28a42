# Copyright (c) the d2_memfit developers.
"""Checks that a dataset's images exist, can be read, and match their dicts."""

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Optional

from detectron2.utils.file_io import PathManager
from PIL import Image

from ..common.reading import checked
from ..errors import DataError, printable
from .annotations import Case

__all__ = ["check_images", "complaints_about_images", "look_at_images", "read_header"]

# Wall-clock seconds to open files, spread evenly over the dataset: some 10,000 on a local disk. The
# order is always the same.
_MOST_S = 3.0
_STRIDE = 7919  # a prime: images that were written together are often alike
_ORIENTATION = 0x0112  # the tag of EXIF
_LIES_ON_ITS_SIDE = (5, 6, 7, 8)
_DEEP = ("I", "F")  # PIL's modes of more than 8 bits; "I;16" is one of several
_ENDS = {"JPEG": b"\xff\xd9", "PNG": b"IEND"}
_TAIL = 1024  # bytes at the end of a file that contain its end marker

_ERRORS = ("missing", "unreadable", "size")  # of a COCO file; others are warnings
# What is wrong with image files, by fault. The total is the number of opened images, or of all.
_IMAGES = {
    "missing": "{number} of {total} images do not exist, the first is {first}",
    "unreadable": "{number} of {total} opened images cannot be decoded. Training stops when one is "
    "loaded: {first}",
    "size": "{number} of {total} opened images have another size than their dict says. Detectron2 "
    "rotates photographs as their EXIF data say. Training stops when one is loaded: {first}",
    "turned": "{number} of {total} opened images are rotated or mirrored as their EXIF data say. "
    "Were their annotations drawn on the rotated image? The first is {first}",
    "deep": "{number} of {total} opened images have more than 8 bits in a channel. Detectron2 "
    "reads all brighter pixels as 255, so these images are nearly white: convert them to 8 bits: "
    "{first}",
}


def check_images(name: str, images: Sequence[dict[str, Any]], folder: str) -> None:
    """Check that all images of a COCO file exist, and open as many as time allows.

    Args:
        name: name of the dataset.
        images: the list in a COCO file.
        folder: folder of the image files.

    Raises:
        DataError: an image does not exist, cannot be read, or has another size than its entry.
    """
    files = [os.path.join(folder, str(image["file_name"])) for image in images]
    cases = look_at_images(files, [(image["width"], image["height"]) for image in images])
    for fault, complaint in complaints_about_images(cases, len(files)):
        if fault in _ERRORS:
            raise DataError(f"dataset {name}: {complaint}")


def complaints_about_images(cases: Mapping[str, Case], total: int) -> Iterator[tuple[str, str]]:
    """Each fault of image files with a line about it.

    Args:
        cases: those of :func:`look_at_images`.
        total: number of all images.
    """
    for fault, text in _IMAGES.items():
        if case := cases.get(fault):
            of = total if fault == "missing" else cases["opened"].number
            yield fault, text.format(number=case.number, total=of, first=case.first)


def look_at_images(
    files: Sequence[str], sizes: Sequence[tuple[Optional[int], Optional[int]]]
) -> dict[str, Case]:
    """Find faults of image files.

    Args:
        files: paths; those of the form ``scheme://`` are not opened.
        sizes: width and height, in pixels, in the dataset, after EXIF; None if unknown.

    Returns:
        dict: cases of "missing", "unreadable", "deep" (more than 8 bits per channel), "size" (a
        wrong one) and "turned" (by EXIF, invisible in the size). "opened" counts the opened images.
    """
    cases: dict[str, Case] = {"opened": Case()}
    if any("://" in file for file in files[:1]):  # each check is slow
        if not PathManager.isfile(files[0]):
            _count(cases, "missing", files[0])
        return cases
    folders = {os.path.dirname(file) for file in files}
    there = {f: set(os.listdir(f or ".")) if os.path.isdir(f or ".") else set() for f in folders}
    is_there = [os.path.basename(file) in there[os.path.dirname(file)] for file in files]
    for file, exists in zip(files, is_there):
        if not exists:
            _count(cases, "missing", file)
    end = time.monotonic() + _MOST_S
    step = _STRIDE if len(files) % _STRIDE else 1  # reaches all of them
    for i in range(len(files)):
        if time.monotonic() > end:
            break
        index = i * step % len(files)
        if is_there[index]:
            cases["opened"].number += 1
            _look_into(files[index], sizes[index], cases)
    return cases


def _count(cases: dict[str, Case], fault: str, where: str) -> None:
    cases.setdefault(fault, Case(0, [printable(where)])).number += 1


def _look_into(
    file: str, expected: tuple[Optional[int], Optional[int]], cases: dict[str, Case]
) -> None:
    try:
        (width, height), mode, orientation = read_header(file)
    except Exception as e:  # PIL raises SyntaxError and others, not only OSError
        _count(cases, "unreadable", f"{file} ({type(e).__name__}: {e})")
        return
    if None not in expected and (width, height) != expected:
        found = width, height
        text = f"{file} has {found} pixels of width and height, but its entry says {expected}"
        _count(cases, "size", text)
    elif orientation in (2, 3, 4) or (orientation in _LIES_ON_ITS_SIDE and width == height):
        _count(cases, "turned", f"{file}, orientation {orientation}")
    if mode.startswith(_DEEP):
        _count(cases, "deep", f"{file}, mode {mode}")


def read_header(file: str) -> tuple[tuple[int, int], str, int]:
    """Width and height of an image as Detectron2 loads it, PIL's mode, and EXIF's orientation.

    Raises:
        Exception: of many types, if the image cannot be decoded, or ends too early.
    """
    with Image.open(checked(file)) as image:
        width, height = image.size
        mode = image.mode
        if _may_be_truncated(file, image.format):
            image.load()
        # For a PNG, PIL would decode the image to look for EXIF, which is rare there.
        asks = image.format != "PNG" or "exif" in image.info
        orientation = image.getexif().get(_ORIENTATION, 1) if asks else 1
    is_on_its_side = orientation in _LIES_ON_ITS_SIDE
    return (height, width) if is_on_its_side else (width, height), mode, orientation


def _may_be_truncated(file: str, image_format: Optional[str]) -> bool:
    """Whether a file's end marker is missing. Some files have other data after it."""
    end = _ENDS.get(image_format or "")
    if end is None:
        return False
    with open(file, "rb") as f:
        f.seek(max(os.path.getsize(file) - _TAIL, 0))
        return end not in f.read()
