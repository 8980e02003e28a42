# Copyright (c) the d2_memfit developers.
"""Detection in images of any size, tile by tile."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from detectron2.config import CfgNode
from torch import nn
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm

from d2_memfit.memory import return_large_blocks
from d2_memfit.predict.tiles import Detection, Grid, SeamMerger, found_in_tile, to_coco

from .reader import open_image

__all__ = ["TiledPredictor"]


class TiledPredictor(nn.Module):
    """Runs a Detectron2 detector on the tiles of images, and merges its detections.

    It keeps in memory the current tiles, the detections of overlapping rows of tiles, and objects
    that reach further.

    A call takes a list of dicts of whole images. It returns ``{"instances": [...]}`` for each, in
    COCO's results format, with the model's categories.

    Args:
        cfg: gives TILES, INPUT.FORMAT and DATALOADER.NUM_WORKERS.
        model: returns boxes, and masks if it has any. Its mode is not changed.
    """

    def __init__(self, cfg: CfgNode, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.train(model.training)
        self._tiles = cfg.TILES
        self._image_format = cfg.INPUT.FORMAT
        self._num_workers = cfg.DATALOADER.NUM_WORKERS
        # Small results would keep the memory blocks of the tiles' tensors, between which they lie.
        return_large_blocks()

    def forward(self, inputs: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [
            {"instances": [to_coco(d, i["image_id"]) for d in self.detect(i["file_name"])]}
            for i in inputs
        ]

    def detect(self, file_name: str) -> Iterator[Detection]:
        """Yield an image's objects, each once no later tile can show more of it.

        A progress bar is shown in a terminal.

        Raises:
            DataError: the image cannot be read; some objects may have come before.
        """
        parts = _TilesOfImage(file_name, self._image_format, self._tiles)
        merger = SeamMerger(parts.grid, self._tiles.MERGE_IOU)
        loader = DataLoader(
            parts,
            batch_size=self._tiles.BATCH_SIZE,
            num_workers=min(self._num_workers, parts.max_workers),
            collate_fn=list,
        )
        with tqdm(total=len(parts), desc=file_name, unit="tile", disable=None) as progress:
            for batch in loader:
                with torch.no_grad():
                    outputs = self.model(batch)
                for tile_input, output in zip(batch, outputs):
                    found = found_in_tile(output["instances"], tile_input["tile"])
                    yield from merger.add(tile_input["tile"], found)
                progress.update(len(batch))
        yield from merger.finish()


class _TilesOfImage(Dataset[dict[str, Any]]):
    """The model's input for each tile of an image."""

    def __init__(self, file_name: str, image_format: str, tiles: CfgNode) -> None:
        self._arguments = file_name, image_format
        image = open_image(*self._arguments)
        self.grid = Grid(image.height, image.width, tiles.SIZE, tiles.OVERLAP)
        # An image that is decoded as a whole should be decoded once.
        self.max_workers = 0 if image.decodes_whole else len(self)
        self._file_name = file_name

    def __len__(self) -> int:
        return len(self.grid)

    def __getitem__(self, index: int) -> dict[str, Any]:
        tile = self.grid[index]
        pixels = open_image(*self._arguments).read(tile)
        return {
            "image": torch.as_tensor(np.ascontiguousarray(pixels.transpose(2, 0, 1))),
            "height": tile.height,
            "width": tile.width,
            "file_name": self._file_name,
            "tile": tile,
        }
