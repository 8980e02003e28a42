# Copyright (c) the d2_memfit developers.
"""Prediction with a trained model, tile by tile if an image is too large."""

from .estimate import InferenceEstimate, estimate_inference
from .export import SUFFIXES, export
from .grid import Grid, Tile
from .images import find_files, read_images
from .merge import Detection, SeamMerger, found_in_tile
from .pictures import draw, import_visualizer
from .predict import FilePrediction, metadata_of
from .predictor import Predictor, WholeModelCheckpointer, load_whole_model, weights_of
from .results import CocoResultsWriter, to_coco
from .rle import Rle, move

__all__ = [
    "SUFFIXES",
    "CocoResultsWriter",
    "Detection",
    "FilePrediction",
    "Grid",
    "InferenceEstimate",
    "Predictor",
    "Rle",
    "SeamMerger",
    "Tile",
    "WholeModelCheckpointer",
    "draw",
    "estimate_inference",
    "export",
    "find_files",
    "found_in_tile",
    "import_visualizer",
    "load_whole_model",
    "metadata_of",
    "move",
    "read_images",
    "to_coco",
    "weights_of",
]
