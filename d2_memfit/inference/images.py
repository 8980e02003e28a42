# Copyright (c) the d2_memfit developers.
"""Reading of images and videos one image at a time, and writing of pictures of them."""

import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Optional

import numpy as np
from detectron2.data.detection_utils import read_image
from numpy.typing import NDArray
from PIL import Image

from ..common.files import output_file
from ..common.reading import checked
from ..errors import ConfigError, DataError
from ..memory import is_out_of_memory

__all__ = ["PictureWriter", "find_files", "picture_name", "read_images"]

_IMAGES = (".bmp", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp")
_VIDEOS = (".avi", ".mkv", ".mov", ".mp4", ".webm")
_FORMATS = {".jpg": "JPEG", ".jpeg": "JPEG", ".png": "PNG"}  # of pictures

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
        raise ConfigError(
            f"--input {path} has no images or videos: names must end in "
            f"{', '.join(_IMAGES + _VIDEOS)}"
        )
    return files


def read_images(file: Path, image_format: str, in_tiles: bool = False) -> Iterator[Pixels]:
    """Yield an image, or the images of a video, in a model's order of channels.

    Args:
        in_tiles: whether the image may be larger than Pillow allows, because it will be cut.

    Raises:
        DataError: the file cannot be read, or a video ends too early.
    """
    checked(file)
    if _is_video(file):
        for frame in _frames(file):
            yield frame[:, :, ::-1] if image_format == "RGB" else frame
        return
    most = Image.MAX_IMAGE_PIXELS
    if in_tiles:
        # Pillow refuses twice this number. An image that is cut takes 20 bytes of RAM per pixel.
        Image.MAX_IMAGE_PIXELS = 2**27
    try:
        image = read_image(str(file), format=image_format)
    except Exception as e:  # each library raises many kinds of errors for damaged files
        if is_out_of_memory(e):
            raise
        advice = ". Try --tile-size" if isinstance(e, Image.DecompressionBombError) else ""
        raise DataError(f"{file} cannot be read ({' '.join(str(e).split())}){advice}") from e
    finally:
        Image.MAX_IMAGE_PIXELS = most
    yield image


def _frames(file: Path) -> Iterator[Pixels]:
    import cv2

    os.environ.setdefault("OPENCV_FFMPEG_LOGLEVEL", "-8")  # only our own line for a damaged file
    video = cv2.VideoCapture(str(file))
    announced = video.get(cv2.CAP_PROP_FRAME_COUNT)
    number = 0
    while True:
        is_there, frame = video.read()
        if not is_there:
            break
        number += 1
        yield frame
    if number == 0:
        raise DataError(f"{file} cannot be read as a video")
    tolerance = min(video.get(cv2.CAP_PROP_FPS), announced / 10)  # the number is an estimate
    if number < announced - tolerance:
        raise DataError(f"{file} is damaged: it ends after {number} of {announced:.0f} images")


def _is_video(file: Path) -> bool:
    return file.suffix.lower() in _VIDEOS


def picture_name(file: Path) -> str:
    """The name of the picture of an image or video, different for each file of a folder."""
    kept = [".mp4"] if _is_video(file) else list(_FORMATS)
    is_free = Path(file.stem).suffix.lower() not in _IMAGES + _VIDEOS  # a.bmp has a.bmp.jpg
    return file.name if file.suffix.lower() in kept and is_free else file.name + kept[0]


class PictureWriter:
    """Writes the pictures of a file: an image, or a video in MP4.

    Use it as a context. A video appears when it is complete. If its source cannot be read to the
    end, it has what was read.

    Args:
        path: path of the picture, with the suffix of :func:`picture_name`.

    Raises:
        ConfigError: a picture could not be written.
    """

    def __init__(self, file: Path, path: Path) -> None:
        self.is_video = _is_video(file)
        self._source = file
        self._path = path
        self._open = ExitStack()
        self._video: Optional[Any] = None
        self._num_images = 0

    def __enter__(self) -> "PictureWriter":
        return self

    def write(self, picture: Pixels) -> None:
        """Write a picture [height, width, 3] in RGB. All pictures of a video have the same size."""
        if not self.is_video:
            with output_file(self._path) as f:
                Image.fromarray(picture).save(f, format=_FORMATS[self._path.suffix.lower()])
            return
        import cv2

        if self._video is None:
            self._file = self._open.enter_context(output_file(self._path))
            self._part = f"{self._file.name}.mp4"  # OpenCV takes the format from the suffix
            self._open.callback(Path(self._part).unlink, missing_ok=True)
            frames_per_s = cv2.VideoCapture(str(self._source)).get(cv2.CAP_PROP_FPS)
            height, width = picture.shape[:2]
            code = cv2.VideoWriter.fourcc(*"mp4v")
            video = cv2.VideoWriter(self._part, code, frames_per_s or 25.0, (width, height))
            if not video.isOpened():
                raise DataError(f"{self._source}: OpenCV has no MP4 of {width} x {height} pixels")
            self._video = video
        self._video.write(picture[:, :, ::-1])
        self._num_images += 1

    def __exit__(self, *error: Any) -> None:
        if self._video is None:
            self._open.__exit__(*error)
            return
        import cv2

        with self._open:
            self._video.release()
            made = cv2.VideoCapture(
                self._part
            )  # check it, because OpenCV's writer reports no errors
            if sum(1 for _ in iter(made.grab, False)) < self._num_images:
                raise OSError("OpenCV could not write all images: is the disk full?")
            with open(self._part, "rb") as part:
                shutil.copyfileobj(part, self._file)
