# Copyright (c) the d2_memfit developers.
"""Reading of images and videos one image at a time, and writing of pictures of them."""

import os
import shutil
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import numpy as np
from detectron2.data import Metadata
from detectron2.data.detection_utils import convert_image_to_rgb, read_image
from numpy.typing import NDArray
from PIL import Image

from ..common.errors import ConfigError, DataError, printable
from ..common.files import checked, output_file
from ..memory import is_out_of_memory

__all__ = ["draw", "find_files", "is_video", "picture_name", "read_images", "write_pictures"]

_IMAGES = (".bmp", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp")
_VIDEOS = (".avi", ".mkv", ".mov", ".mp4", ".webm")
_FORMATS = {".jpg": "JPEG", ".jpeg": "JPEG", ".png": "PNG"}  # of pictures
# Limits of a picture's longer side, in pixels.
_LEAST_SIDE = 600
_MOST_SIDE = 4096

Pixels = NDArray[np.uint8]


def find_files(path: Path) -> list[Path]:
    """A file, or the images and videos of a folder by name.

    Raises:
        ConfigError: the folder has none.
        DataError: it is neither a file nor a folder.
    """
    if not path.is_dir():
        return [Path(checked(path, "--input "))]
    files = [f for f in sorted(path.iterdir()) if f.suffix.lower() in _IMAGES + _VIDEOS]
    if not files:
        ends = ", ".join(_IMAGES + _VIDEOS)
        raise ConfigError(f"--input {path} has no images or videos: names must end in {ends}")
    return files


def read_images(file: Path, image_format: str, in_tiles: bool = False) -> Iterator[Pixels]:
    """Yield an image, or the images of a video, in a model's order of channels.

    Args:
        in_tiles: whether the image may be larger than Pillow allows, because it will be cut.

    Raises:
        DataError: the file cannot be read.
    """
    checked(file)
    if is_video(file):
        for frame in _frames(file):
            yield frame[:, :, ::-1] if image_format == "RGB" else frame
        return
    # Pillow refuses twice this number. An image that is cut takes 20 bytes of RAM per pixel.
    most = 2**27 if in_tiles else Image.MAX_IMAGE_PIXELS
    try:
        with patch.object(Image, "MAX_IMAGE_PIXELS", most):
            image = read_image(str(file), format=image_format)
    except Exception as e:  # each library raises many kinds of errors for damaged files
        if is_out_of_memory(e):
            raise
        advice = ". Try --tile-size" if isinstance(e, Image.DecompressionBombError) else ""
        raise DataError(f"{file} cannot be read ({' '.join(str(e).split())}){advice}") from e
    yield image


def _frames(file: Path) -> Iterator[Pixels]:
    import cv2

    os.environ.setdefault("OPENCV_FFMPEG_LOGLEVEL", "-8")  # only our own line for a damaged file
    video = cv2.VideoCapture(str(file))
    number = 0
    while (read := video.read())[0]:
        number += 1
        yield read[1]
    if number == 0:
        raise DataError(f"{file} cannot be read as a video")


def is_video(file: Path) -> bool:
    return file.suffix.lower() in _VIDEOS


def picture_name(file: Path) -> str:
    """The name of the picture of an image or video, different for each file of a folder."""
    kept = [".mp4"] if is_video(file) else list(_FORMATS)
    is_free = Path(file.stem).suffix.lower() not in _IMAGES + _VIDEOS  # a.bmp has a.bmp.jpg
    return file.name if file.suffix.lower() in kept and is_free else file.name + kept[0]


def write_pictures(file: Path, path: Path, pictures: Iterator[Pixels]) -> None:
    """Write the pictures of an image or video.

    A video becomes an MP4. It appears when it is complete.

    Args:
        path: path of the picture, with the suffix of :func:`picture_name`.
        pictures: each [height, width, 3] in RGB, all of one size.

    Raises:
        ConfigError: a picture could not be written.
        DataError: from ``pictures``, or OpenCV cannot write such a video.
    """
    first = next(pictures)
    if not is_video(file):
        with output_file(path) as f:
            Image.fromarray(first).save(f, format=_FORMATS[path.suffix.lower()])
        return
    import cv2

    with output_file(path) as f, TemporaryDirectory(dir=path.parent) as folder:
        part = os.path.join(folder, "part.mp4")  # OpenCV takes the format from the suffix
        frames_per_s = cv2.VideoCapture(str(file)).get(cv2.CAP_PROP_FPS) or 25.0
        size = first.shape[1], first.shape[0]
        video = cv2.VideoWriter(part, cv2.VideoWriter.fourcc(*"mp4v"), frames_per_s, size)
        if not video.isOpened():
            raise DataError(f"{file}: OpenCV has no MP4 of {size[0]} x {size[1]} pixels")
        for picture in chain([first], pictures):
            video.write(picture[:, :, ::-1])
        video.release()
        if not cv2.VideoCapture(part).isOpened():  # OpenCV's writer reports no errors
            raise OSError("OpenCV could not write it: is the disk full?")
        with open(part, "rb") as written:
            shutil.copyfileobj(written, f)


def draw(
    image: Pixels,
    image_format: str,
    results: Sequence[dict[str, Any]],
    metadata: Metadata,
    keeps_size: bool = False,
) -> Pixels:
    """Draw objects into an image, with Detectron2's ``Visualizer``. The picture is in RGB.

    Masks are decoded one at a time. Small images are enlarged and very large ones reduced, unless
    ``keeps_size``.

    Args:
        image: pixels [height, width, 3] in ``image_format``, such as "BGR".
        results: in COCO's results format, with the model's classes.
        metadata: names of the classes and rules for keypoints, if there are any.

    Raises:
        ConfigError: OpenCV is not installed.
    """
    try:
        from detectron2.utils.visualizer import Visualizer
    except ImportError as e:
        what = f"Detectron2 draws with OpenCV ({e}): pip install opencv-python-headless"
        raise ConfigError(what) from e
    longer = max(image.shape)
    scale = 1.0 if keeps_size else min(max(1.0, _LEAST_SIDE / longer), _MOST_SIDE / longer)
    visualizer = Visualizer(convert_image_to_rgb(image, image_format), metadata, scale)
    names = dict(enumerate(metadata.get("thing_classes") or ()))
    for result in sorted(results, key=lambda r: -r["bbox"][2] * r["bbox"][3]):
        x, y, width, height = result["bbox"]
        # A name may be long, or matplotlib's formula.
        name = str(names.get(result["category_id"], result["category_id"]))[:100]
        keypoints = result.get("keypoints")
        visualizer.overlay_instances(
            boxes=np.array([[x, y, x + width, y + height]]),
            labels=[printable(name).replace("$", r"\$") + f" {result['score']:.0%}"],
            masks=[result["segmentation"]] if "segmentation" in result else None,
            keypoints=None if keypoints is None else np.reshape(keypoints, (1, -1, 3)),
        )
    picture: Pixels = visualizer.get_output().get_image()
    return picture
