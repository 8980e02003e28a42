# Copyright (c) the d2_memfit developers.
"""Training and evaluation on tiles of images that do not fit as a whole.

Each tile has a dict of Detectron2's format, whose file name is ``IMAGE#X0,Y0,X1,Y1``.
"""

import copy
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Optional

import numpy as np
import rasterio
import torch
from detectron2.config import CfgNode
from detectron2.data import (
    DatasetCatalog,
    DatasetMapper,
    build_detection_test_loader,
    build_detection_train_loader,
    get_detection_dataset_dicts,
)
from detectron2.data import transforms as T
from detectron2.data.detection_utils import check_image_size, read_image
from detectron2.data.samplers import InferenceSampler
from detectron2.evaluation import COCOEvaluator
from detectron2.structures import BoxMode
from numpy.typing import NDArray
from PIL import Image
from pycocotools import mask as coco_mask
from torch import nn

from d2_memfit.cli.train import Trainer as MemfitTrainer
from d2_memfit.common.checks import check_positive_int, value_of
from d2_memfit.common.errors import ConfigError, DataError, one_line
from d2_memfit.config.load import with_settings
from d2_memfit.memory import return_large_blocks
from d2_memfit.predict.tiles import Grid, SeamMerger, Tile, found_in_tile, move, to_coco

__all__ = ["TileMapper", "TileMerger", "Trainer", "add_tiled_config", "open_image", "tiles_of"]

# A tile has the objects of which it shows this share of the box, or, if they are larger than a
# tile, of what a tile can show. It is SAHI's default.
_MIN_VISIBLE = 0.1
_MERGE_IOU = 0.5
_MAX_DETECTIONS = 10_000  # per image that count. COCO's 100 is for images of one tile

Image.MAX_IMAGE_PIXELS = None  # Pillow only reads their sizes


def add_tiled_config(cfg: CfgNode) -> None:
    """Add the node TILES to a Detectron2 config."""
    cfg.TILES = CfgNode()
    # Height and width of a tile, in pixels of the image. An image smaller than that is one tile.
    cfg.TILES.SIZE = 1024
    # Pixels that a tile shares with its neighbour. Objects up to this size are whole in some tile;
    # larger ones are put together out of their parts.
    cfg.TILES.OVERLAP = 200


def check_tiled_config(cfg: CfgNode) -> None:
    """Raise :class:`ConfigError` if tiles cannot be made."""
    size, overlap = cfg.TILES.SIZE, cfg.TILES.OVERLAP
    check_positive_int("TILES.SIZE", size)
    check_positive_int("TILES.OVERLAP", overlap)  # without, nothing can be merged
    if overlap >= size:
        raise ConfigError(f"TILES.OVERLAP must be less than TILES.SIZE, {size}, got {overlap}")
    for key in ("MODEL.KEYPOINT_ON", "MODEL.LOAD_PROPOSALS"):
        if value_of(cfg, key):
            raise ConfigError(f"{key} must be False: tiles have boxes and masks of objects")


def tiles_of(images: Sequence[dict[str, Any]], size: int, overlap: int) -> list[dict[str, Any]]:
    """Dicts of the tiles of images, with their part of the annotations, if there are any.

    Args:
        images: dicts of Detectron2's format.
        size, overlap: as for :class:`Grid`.
    """
    dicts = []
    for image in images:
        grid = Grid(image["height"], image["width"], size, overlap)
        annotations = image.get("annotations", [])
        boxes = np.array([_box_of(a) for a in annotations]).reshape(-1, 4)
        most = np.minimum(boxes[:, 2:] - boxes[:, :2], size).prod(axis=1)
        for tile in grid:
            name = f"{image['file_name']}#{','.join(map(str, tile))}"
            tiled = {**image, "file_name": name, "grid": grid, "tile": tile}
            tiled.update(height=tile.height, width=tile.width)
            if "annotations" in image:
                cut = np.clip(boxes, tile[:2] * 2, tile[2:] * 2)
                shown = (cut[:, 2:] - cut[:, :2]).prod(axis=1)
                inside = np.flatnonzero((shown > 0) & (shown >= _MIN_VISIBLE * most))
                clipped = (_clipped(annotations[i], tile, boxes[i], cut[i]) for i in inside)
                tiled["annotations"] = [annotation for annotation in clipped if annotation]
            dicts.append(tiled)
    return dicts


def _box_of(annotation: dict[str, Any]) -> list[float]:
    """The box x0, y0, x1, y1 of an annotation, in pixels of the image."""
    if annotation["bbox_mode"] == BoxMode.XYWHA_ABS:
        raise DataError(
            f"rotated boxes cannot be cut into tiles, and there is one: {annotation['bbox']}. "
            "Make them boxes along the axes, with the outline as segmentation"
        )
    box: list[float] = BoxMode.convert(
        list(annotation["bbox"]), annotation["bbox_mode"], BoxMode.XYXY_ABS
    )
    return box


def _clipped(
    annotation: dict[str, Any], tile: Tile, box: NDArray[Any], cut: NDArray[Any]
) -> Optional[dict[str, Any]]:
    """An annotation in pixels of a tile; None if the tile shows nothing of its mask.

    Polygons are only moved: what rasterises them leaves out what is outside.

    Args:
        box, cut: its box, and the part of it in the tile, in pixels of the image [4].
    """
    shown = (cut - tile[:2] * 2).tolist()
    clipped = {**annotation, "bbox": shown, "bbox_mode": BoxMode.XYXY_ABS}
    if old := annotation.get("segmentation"):
        size, new = (tile.height, tile.width), old
        if isinstance(old, dict):
            new = rle = move(old, -tile.x0, -tile.y0, *size)
        else:
            new = [(np.reshape(p, (-1, 2)) - tile[:2]).ravel().tolist() for p in old]
            rle = coco_mask.merge(coco_mask.frPyObjects(new, *size))
        if not coco_mask.area(rle):
            return None
        clipped["segmentation"] = new
        if (box != cut).any():  # drawn around the rest of the mask
            x, y, width, height = coco_mask.toBbox(rle).tolist()
            clipped["bbox"] = [x, y, x + width, y + height]
    return clipped


@contextmanager
def open_image(file_name: str) -> Iterator[Any]:
    """Open an image with rasterio, which reads parts of it.

    Raises:
        DataError: it cannot be read.
    """
    try:
        with warnings.catch_warnings():
            # Photographs are not on a map.
            warnings.simplefilter("ignore", rasterio.errors.NotGeoreferencedWarning)
            with rasterio.open(file_name) as file:
                yield file
    except rasterio.errors.RasterioIOError as e:
        raise DataError(f"the image {file_name} cannot be read ({one_line(e)})") from e


def _read_tile(file_name: str, image_format: str) -> NDArray[Any]:
    """Pixels [height, width, 3] of a tile: uint8, otherwise float32."""
    name, _, tile = file_name.rpartition("#")
    if not name:  # an empty image of a dry run
        return read_image(file_name, format=image_format)
    x0, y0, x1, y1 = map(int, tile.split(","))
    with open_image(name) as file:
        if rasterio.enums.ColorInterp.palette in file.colorinterp:
            raise DataError(f"{name} has a palette: gdal_translate -expand rgb {name} OUT.tif")
        bands = [1, 2, 3] if file.count > 2 else [1, 1, 1]
        pixels = file.read(bands, window=((y0, y1), (x0, x1))).transpose(1, 2, 0)
    pixels = pixels[..., ::-1] if image_format == "BGR" else pixels
    # PyTorch has few operators for other integers.
    return pixels if pixels.dtype == np.uint8 else pixels.astype(np.float32)


class TileMapper(DatasetMapper):
    """Detectron2's mapper, which reads only a tile."""

    def __call__(self, dataset_dict: dict[str, Any]) -> dict[str, Any]:
        data = copy.deepcopy(dataset_dict)
        image = _read_tile(data["file_name"], self.image_format)
        check_image_size(data, image)
        seen = T.AugInput(image)
        transforms = self.augmentations(seen)
        data["image"] = torch.as_tensor(np.ascontiguousarray(seen.image.transpose(2, 0, 1)))
        if self.is_train:
            self._transform_annotations(data, transforms, seen.image.shape[:2])
        else:
            data.pop("annotations", None)
        return data


class TileMerger:
    """Merges what a model finds in the tiles of images, one image after the other.

    It keeps the detections of overlapping rows of tiles, and objects that reach further.
    """

    _merger: SeamMerger

    def __init__(self) -> None:
        # Small results would keep the memory blocks of the tiles' tensors, between which they lie.
        return_large_blocks()

    def __call__(self, image: dict[str, Any], output: dict[str, Any]) -> list[dict[str, Any]]:
        """Add a tile; return objects that no later tile can show, in COCO's results format.

        Args:
            image, output: the model's input and output for the tile.
        """
        grid, tile = image["grid"], image["tile"]
        if tile == grid[0]:
            self._merger = SeamMerger(grid, _MERGE_IOU)
        found = list(self._merger.add(tile, found_in_tile(output["instances"], tile)))
        if tile == grid[len(grid) - 1]:
            found += self._merger.finish()
        return [to_coco(detection, image["image_id"]) for detection in found]


class TiledEvaluator(COCOEvaluator):
    """Detectron2's evaluator of whole images, which gets their tiles."""

    def reset(self) -> None:
        super().reset()
        self._merge = TileMerger()

    def process(self, inputs: list[Any], outputs: list[Any]) -> None:
        for image, output in zip(inputs, outputs):
            found = self._merge(image, output)
            self._predictions.append({"image_id": image["image_id"], "instances": found})


class Trainer(MemfitTrainer):
    """Trains on tiles and evaluates whole images."""

    @classmethod
    def build_model(cls, cfg: CfgNode) -> nn.Module:
        check_tiled_config(cfg)
        return super().build_model(cfg)

    @classmethod
    def build_train_loader(cls, cfg: CfgNode) -> Any:
        names = tuple(_dataset_of_tiles(cfg, name) for name in cfg.DATASETS.TRAIN)
        of_tiles = with_settings(cfg, {"DATASETS.TRAIN": names})
        return build_detection_train_loader(of_tiles, mapper=TileMapper(cfg))

    @classmethod
    def build_test_loader(cls, cfg: CfgNode, dataset_name: str) -> Any:
        dicts = get_detection_dataset_dicts(_dataset_of_tiles(cfg, dataset_name), False)
        ids = list(dict.fromkeys(tile["image_id"] for tile in dicts))
        own = {ids[i] for i in InferenceSampler(len(ids))}  # all tiles of an image on one rank
        return build_detection_test_loader(
            dicts,
            mapper=TileMapper(cfg, is_train=False),
            sampler=[i for i, tile in enumerate(dicts) if tile["image_id"] in own],
            num_workers=cfg.DATALOADER.NUM_WORKERS,
        )

    @classmethod
    def build_evaluator(cls, cfg: CfgNode, dataset_name: str, output_folder: Any = None) -> Any:
        return TiledEvaluator(
            dataset_name,
            output_dir=output_folder or f"{cfg.OUTPUT_DIR}/inference",
            max_dets_per_image=_MAX_DETECTIONS,
        )


def _dataset_of_tiles(cfg: CfgNode, name: str) -> str:
    """Register the tiles of a dataset's images as a dataset; return its name."""
    size, overlap = cfg.TILES.SIZE, cfg.TILES.OVERLAP
    of_tiles = f"{name}, tiles of {size}, overlap {overlap}"
    if of_tiles not in DatasetCatalog:
        DatasetCatalog.register(of_tiles, partial(_dicts_of_tiles, name, size, overlap))
    return of_tiles


def _dicts_of_tiles(name: str, size: int, overlap: int) -> list[dict[str, Any]]:
    return tiles_of(DatasetCatalog.get(name), size, overlap)
