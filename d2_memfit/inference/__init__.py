# Copyright (c) the d2_memfit developers.
"""Prediction with a trained model, tile by tile if an image is too large."""

from .grid import Grid, Tile
from .merge import Detection, SeamMerger, found_in_tile
from .results import CocoResultsWriter, to_coco
from .rle import Rle, move

__all__ = [
    "CocoResultsWriter",
    "Detection",
    "Grid",
    "Rle",
    "SeamMerger",
    "Tile",
    "found_in_tile",
    "move",
    "to_coco",
]
