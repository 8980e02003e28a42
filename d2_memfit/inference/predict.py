# Copyright (c) the d2_memfit developers.
"""Prediction on image and video files: pictures, and results in COCO's format."""

import json
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from detectron2.config import CfgNode
from detectron2.data import Metadata, MetadataCatalog

from ..common.files import output_file
from ..errors import DataError
from ..memory import is_out_of_memory, release_memory
from .images import PictureWriter, picture_name, read_images
from .pictures import draw
from .predictor import Predictor
from .results import CocoResultsWriter

__all__ = ["FilePrediction", "metadata_of", "outputs_of"]

_RESULTS, _IMAGES = "coco_instances_results.json", "images.json"


def metadata_of(cfg: CfgNode) -> Metadata:
    """Metadata of the config's first dataset whose class names are known here; or empty."""
    known = [MetadataCatalog.get(name) for name in (*cfg.DATASETS.TEST, *cfg.DATASETS.TRAIN)]
    return next((metadata for metadata in known if metadata.get("thing_classes")), Metadata())


def outputs_of(folder: Path, files: Sequence[Path]) -> list[Path]:
    """The files that predictions for these files write to a folder."""
    return [folder / _RESULTS, folder / _IMAGES, *_pictures_of(files, folder / "pictures")]


def _pictures_of(files: Sequence[Path], folder: Path) -> list[Path]:
    """The pictures of these files, in the same subfolders as the files."""
    root = os.path.commonpath([os.path.abspath(file.parent) for file in files])
    parents = [Path(os.path.relpath(file.parent, root)) for file in files]
    return [folder / parent / picture_name(file) for file, parent in zip(files, parents)]


class FilePrediction:
    """Predicts on images and videos.

    Args:
        predictor: finds the objects of an image.
        output: folder for ``coco_instances_results.json``, for ``images.json``, which has the
            images and categories of these results, and for the folder ``pictures``.
        metadata: metadata of the model's dataset.
        min_score: the lowest score of an object that is drawn.

    Attributes:
        images: the images with predictions, as in a COCO file. Their ids count from 1.
        seconds: time of all predictions, without reading and drawing.
        done: the files for which prediction is complete.
    """

    def __init__(
        self, predictor: Predictor, output: Path, metadata: Metadata, min_score: float
    ) -> None:
        self.images: list[dict[str, Any]] = []
        self.seconds = 0.0
        self.done: list[Path] = []
        self._predictor = predictor
        self._output = output
        self._metadata = metadata
        self._min_score = min_score
        ids = metadata.get("thing_dataset_id_to_contiguous_id") or {}
        self._category_ids = {number: id_ for id_, number in ids.items()}

    def run(self, files: Sequence[Path], say: Callable[[str], None]) -> None:
        """Predict on files. One that fails does not stop the others.

        Args:
            say: called with the line of each failure.
        """
        device = next(self._predictor.model.parameters()).device
        with CocoResultsWriter.open(self._output / _RESULTS) as results:
            for file, picture in zip(files, _pictures_of(files, self._output / "pictures")):
                try:
                    self._predict(file, picture, results)
                    self.done.append(file)
                    continue
                except DataError as e:
                    failure = str(e)
                except Exception as e:
                    if not is_out_of_memory(e):
                        raise
                    error = DataError(
                        f"{file} does not fit into memory: use --tile-size, or a smaller one, or "
                        "a smaller INPUT.MIN_SIZE_TEST and MAX_SIZE_TEST"
                    )
                    failure = str(error)
                release_memory(device)  # without the traceback, which keeps tensors
                say(failure)
        self._write_images()

    def _predict(self, file: Path, path: Path, results: CocoResultsWriter) -> None:
        image_format = self._predictor.image_format
        in_tiles = self._predictor.tile_size is not None
        with PictureWriter(file, path) as pictures:
            for number, image in enumerate(read_images(file, image_format, in_tiles)):
                image_id = len(self.images) + 1
                began = time.perf_counter()
                try:
                    found = self._predictor(image, image_id)
                except DataError as e:
                    raise DataError(f"{file} is skipped: {e}") from e
                self.seconds += time.perf_counter() - began
                name = str(path.relative_to(self._output / "pictures").with_name(file.name))
                name += f"#{number}" if pictures.is_video else ""
                height, width = image.shape[:2]
                entry = {"id": image_id, "file_name": name, "height": height, "width": width}
                self.images.append(entry)
                results.write([self._with_category_id(result) for result in found])
                drawn = [result for result in found if result["score"] >= self._min_score]
                picture = draw(image, image_format, drawn, self._metadata, pictures.is_video)
                pictures.write(picture)

    def _with_category_id(self, result: dict[str, Any]) -> dict[str, Any]:
        number = result["category_id"]
        return {**result, "category_id": self._category_ids.get(number, number)}

    def _write_images(self) -> None:
        names = self._metadata.get("thing_classes") or []
        categories = [
            {"id": self._category_ids.get(number, number), "name": name}
            for number, name in enumerate(names)
        ]
        with output_file(self._output / _IMAGES, "w") as file:
            json.dump({"images": self.images, "annotations": [], "categories": categories}, file)
