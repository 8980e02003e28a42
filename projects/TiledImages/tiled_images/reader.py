# Copyright (c) the d2_memfit developers.
"""Reading parts of an image file, with no more data than the format requires."""

import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import numpy as np
from detectron2.data.detection_utils import read_image
from detectron2.utils.file_io import PathManager
from detectron2.utils.logger import log_first_n
from numpy.typing import NDArray

from d2_memfit.errors import DataError, one_line
from d2_memfit.predict.tiles import Tile

try:
    # MB of GDAL's cache for blocks of a file that tiles share; its default is 5% of all RAM.
    os.environ.setdefault("GDAL_CACHEMAX", "64")
    import rasterio
except ImportError:  # an optional extra
    rasterio = None

__all__ = ["ImageReader", "open_image"]

# GDAL's formats that are decoded from the top. Detectron2 reads these as usual.
_SEQUENTIAL = {"GIF", "JPEG", "PNG", "WEBP"}
_LARGE_PIXELS = 4096**2  # decoding that many at once is worth a warning


def open_image(file_name: str, image_format: str) -> "ImageReader":
    """Open an :class:`ImageReader`; each process keeps the last few open."""
    return _kept_open(os.getpid(), file_name, image_format)


@lru_cache(maxsize=8)
def _kept_open(process: int, *args: Any) -> "ImageReader":
    return ImageReader(*args)


class ImageReader:
    """An image from which parts can be read.

    With rasterio installed, formats that GDAL reads by parts are read this way: TIFF and GeoTIFF
    (tiled is best), JPEG 2000 and more. Detectron2 decodes all other files as a whole, with a
    warning for a large one.

    Args:
        image_format: "BGR" or "RGB", the model's order of channels.

    Attributes:
        height, width: in pixels.
        decodes_whole: whether the whole image is in memory.

    Raises:
        DataError: here or in :meth:`read`, the image cannot be read.
    """

    def __init__(self, file_name: str, image_format: str = "BGR") -> None:
        self._file_name, self._format = file_name, image_format
        with self._explained():
            path = PathManager.get_local_path(file_name)
            self._file = _open_by_parts(path)
            self.decodes_whole = self._file is None
            if self.decodes_whole:
                self._pixels = read_image(path, format=image_format)
                self.height, self.width = self._pixels.shape[:2]
            else:
                self.height, self.width = self._file.height, self._file.width
                bands = [1, 2, 3] if self._file.count > 2 else [1, 1, 1]
                self._bands = bands[::-1] if image_format == "BGR" else bands
        blocks = [] if self._file is None else self._file.block_shapes
        at_once = max((h * w for h, w in blocks), default=self.height * self.width)
        if at_once > _LARGE_PIXELS:
            text = (
                f"{file_name} is read in parts of {at_once / 1e6:.0f} megapixels, and so may be "
                "others. A tiled TIFF is read by tiles: pip install rasterio; "
                "rio convert --co TILED=YES IN OUT.tif"
            )
            log_first_n(logging.WARNING, text, name="d2_memfit.tiled_images")

    def read(self, tile: Tile) -> NDArray[Any]:
        """Pixels [height, width, channels] of a part of the image: uint8, otherwise float32."""
        if self._file is None:
            return self._pixels[tile.y0 : tile.y1, tile.x0 : tile.x1]
        window = (tile.y0, tile.y1), (tile.x0, tile.x1)
        with self._explained():
            pixels = self._file.read(self._bands, window=window).transpose(1, 2, 0)
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
            raise DataError(
                f"the image {self._file_name} cannot be read ({one_line(e)}). Mend it, or take it "
                "out of the dataset. What is too large for Pillow can be read as a tiled TIFF, "
                "with rasterio installed"
            ) from e


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
