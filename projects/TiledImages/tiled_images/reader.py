# Copyright (c) the d2_memfit developers.
"""Reading parts of an image file, with no more data than the format requires."""

import logging
import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, Union

import numpy as np
from detectron2.data.detection_utils import read_image
from detectron2.utils.file_io import PathManager
from detectron2.utils.logger import log_first_n
from numpy.typing import NDArray
from PIL import Image

from d2_memfit.errors import DataError, one_line
from d2_memfit.predict.tiles import Tile

try:
    # MB of GDAL's cache for blocks of a file that tiles share; its default is 5% of all RAM.
    os.environ.setdefault("GDAL_CACHEMAX", "64")
    import rasterio
except ImportError:  # an optional extra
    rasterio = None

__all__ = ["CorruptImageError", "ImageReader", "open_image", "warn_left_out"]

_LOGGER = "d2_memfit.tiled_images"
# GDAL's formats that are decoded from the top. Detectron2 reads these as usual.
_SEQUENTIAL = {"GIF", "JPEG", "PNG", "WEBP"}
_LARGE_PIXELS = 4096**2  # decoding that many at once is worth a warning


class CorruptImageError(DataError):
    """An image cannot be read. The message has its name."""


def warn_left_out(error: CorruptImageError) -> None:
    """Warn, once for each image, that it was left out."""
    log_first_n(logging.WARNING, f"Left out: {one_line(error)}", key="message", name=_LOGGER)


def open_image(file_name: str, image_format: str, bands: Sequence[int]) -> "ImageReader":
    """Open an :class:`ImageReader`; each process keeps the last few open."""
    return _kept_open(os.getpid(), file_name, image_format, tuple(bands))


@lru_cache(maxsize=8)
def _kept_open(process: int, *args: Any) -> "ImageReader":
    return ImageReader(*args)


class ImageReader:
    """An image from which parts can be read.

    - ``.npy`` files [height, width, channels] are mapped into memory.
    - With rasterio installed, formats that GDAL reads by parts are read this way: TIFF and GeoTIFF
      (tiled is best), JPEG 2000, ENVI and more.
    - Detectron2 decodes all other files as a whole, with a warning for a large one.

    Args:
        image_format: "BGR" or "RGB", the model's order of channels.
        bands: numbers of the file's red, green and blue bands, from 1. A file's single band is used
            for each.

    Attributes:
        height, width: in pixels.
        decodes_whole: whether the whole image is in memory.

    Raises:
        CorruptImageError: here or in :meth:`read`.
    """

    def __init__(
        self, file_name: str, image_format: str = "BGR", bands: Sequence[int] = (1, 2, 3)
    ) -> None:
        self._file_name = file_name
        with self._explained():
            path = PathManager.get_local_path(file_name)
            self._source: Union[_Mapped, _Windowed, _Whole]
            if path.endswith(".npy"):
                self._source = _Mapped(path, image_format, bands)
            else:
                file = _open_by_parts(path)
                if file is not None:
                    self._source = _Windowed(file, image_format, bands)
                else:
                    self._source = _Whole(path, image_format, bands)
        self.height: int
        self.width: int
        self.height, self.width = self._source.size
        self.decodes_whole = isinstance(self._source, _Whole)

    def read(self, tile: Tile) -> NDArray[Any]:
        """Pixels [height, width, channels] of a part of the image: uint8, otherwise float32."""
        with self._explained():
            pixels = self._source.read(tile)
        # PyTorch has few operators for other integers.
        return pixels if pixels.dtype == np.uint8 else pixels.astype(np.float32)

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            with warnings.catch_warnings():
                # rasterio warns that photographs are not on a map.
                warnings.filterwarnings("ignore", message="Dataset has no geotransform")
                yield
        except MemoryError:
            raise
        except Exception as e:  # each library has many errors for damage
            raise CorruptImageError(
                f"the image {self._file_name} cannot be read ({' '.join(str(e).split())}). Mend "
                "it, take it out of the dataset, or leave out all such images with "
                "TILES.SKIP_CORRUPT True. What is too large for Pillow can be read as a tiled "
                "TIFF, with rasterio installed"
            ) from e


class _Mapped:
    def __init__(self, path: str, image_format: str, bands: Sequence[int]) -> None:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
        if array.ndim not in (2, 3):
            raise ValueError(f"its shape must be height, width, channels, and is {array.shape}")
        self._pixels = array.reshape(*array.shape[:2], -1)
        self.size = self._pixels.shape[:2]
        in_order = _in_order(bands, self._pixels.shape[2], image_format)
        self._channels = [band - 1 for band in in_order]

    def read(self, tile: Tile) -> NDArray[Any]:
        return self._pixels[tile.y0 : tile.y1, tile.x0 : tile.x1, self._channels]


class _Windowed:
    def __init__(self, file: Any, image_format: str, bands: Sequence[int]) -> None:
        self._file = file
        self.size = file.height, file.width
        self._bands = _in_order(bands, self._file.count, image_format)
        block = max(height * width for height, width in self._file.block_shapes)
        if block > _LARGE_PIXELS:
            log_first_n(
                logging.WARNING,
                f"{file.name} is stored in blocks of {block / 1e6:.0f} megapixels, and a tile "
                "needs all of those that it touches; others may be stored so too. Convert it: "
                "rio convert --co TILED=YES IN OUT.tif",
                name=_LOGGER,
            )

    def read(self, tile: Tile) -> NDArray[Any]:
        window = (tile.y0, tile.y1), (tile.x0, tile.x1)
        return self._file.read(self._bands, window=window).transpose(1, 2, 0)


class _Whole:
    def __init__(self, path: str, image_format: str, bands: Sequence[int]) -> None:
        with Image.open(path) as file:
            if file.mode.startswith(("I", "F")):
                raise ValueError("it has more than 8 bits, which need a TIFF and rasterio")
        if tuple(bands) != (1, 2, 3):
            raise ValueError(f"TILES.BANDS {list(bands)} need a TIFF and rasterio")
        self._path, self._format = path, image_format
        self.size = _decode(path, image_format).shape[:2]

    def read(self, tile: Tile) -> NDArray[Any]:
        return _decode(self._path, self._format)[tile.y0 : tile.y1, tile.x0 : tile.x1]


@lru_cache(maxsize=1)  # for the tiles of one image, one after another
def _decode(path: str, image_format: str) -> NDArray[Any]:
    pixels = read_image(path, format=image_format)
    height, width = pixels.shape[:2]
    if height * width > _LARGE_PIXELS:
        log_first_n(
            logging.WARNING,
            f"{path} must be decoded whole, {width} x {height} pixels and "
            f"{pixels.nbytes / 2**20:.0f} MiB in each process that reads it; so must others of its "
            "kind. A tiled TIFF is read by parts: pip install rasterio; "
            "rio convert --co TILED=YES IN OUT.tif",
            name=_LOGGER,
        )
    return pixels


def _open_by_parts(path: str) -> Any:
    """Open with rasterio; None if Detectron2 must read the file, or report its fault."""
    if rasterio is None:
        return None
    try:
        file = rasterio.open(path)
    except rasterio.errors.RasterioIOError:
        return None
    has_palette = rasterio.enums.ColorInterp.palette in file.colorinterp
    return None if file.driver in _SEQUENTIAL or has_palette else file


def _in_order(bands: Sequence[int], count: int, image_format: str) -> list[int]:
    """The bands to read, in the model's order."""
    if count == 1:
        return [1] * len(bands)
    if max(bands) > count:
        raise ValueError(f"it has {count} bands, and TILES.BANDS is {list(bands)}")
    return list(bands)[::-1] if image_format == "BGR" and len(bands) == 3 else list(bands)
