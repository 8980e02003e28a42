# Copyright (c) the d2_memfit developers.
"""Prediction on image and video files: pictures, and results in COCO's format."""

import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Union

from detectron2.config import CfgNode
from detectron2.data import Metadata, MetadataCatalog

from ..common.errors import DataError
from ..common.files import output_file
from ..memory import is_out_of_memory, release_memory
from .images import Pixels, draw, is_video, picture_name, read_images, write_pictures
from .predictor import Predictor

__all__ = ["FilePrediction", "metadata_of", "outputs_of", "results_file"]

_RESULTS, _IMAGES = "coco_instances_results.json", "images.json"


Write = Callable[[Iterable[dict[str, Any]]], None]


@contextmanager
def results_file(path: Union[str, Path]) -> Iterator[Write]:
    """Open a JSON file for results in COCO's format, which are not kept in memory.

    It appears when all results are written, and not after an error.

    Yields:
        A function that writes the results of an image: all of them or, after an error, none.
    """
    separator = "\n"

    def write(results: Iterable[dict[str, Any]]) -> None:
        nonlocal separator
        for line in [json.dumps(result) for result in results]:
            file.write(separator + line)
            separator = ",\n"

    with output_file(path, "w") as file:
        file.write("[")
        yield write
        file.write("\n]\n")


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


@dataclass
class FilePrediction:
    """Predicts on images and videos.

    Attributes:
        predictor: finds the objects of an image.
        output: folder for ``coco_instances_results.json``, for ``images.json``, which has the
            images and categories of these results, and for the folder ``pictures``.
        metadata: metadata of the model's dataset.
        min_score: the lowest score of an object that is drawn.
        images: the images with predictions, as in a COCO file. Their ids count from 1.
        seconds: time of all predictions, without reading and drawing.
    """

    predictor: Predictor
    output: Path
    metadata: Metadata
    min_score: float
    images: list[dict[str, Any]] = field(default_factory=list)
    seconds: float = 0.0

    def run(self, files: Sequence[Path], say: Callable[[str], None]) -> int:
        """Predict on files. One that fails does not stop the others.

        Args:
            say: called with the line of each failure.

        Returns:
            The number of files that failed.
        """
        failures = 0
        device = next(self.predictor.model.parameters()).device
        root = self.output / "pictures"
        with results_file(self.output / _RESULTS) as write:
            for file, path in zip(files, _pictures_of(files, root)):
                failure = ""
                try:
                    pictures = self._pictures(file, path.parent.relative_to(root), write)
                    write_pictures(file, path, pictures)
                except DataError as e:
                    failure = str(e) if str(file) in str(e) else f"{file} is skipped: {e}"
                except Exception as e:
                    if not is_out_of_memory(e):
                        raise
                    failure = (
                        f"{file} does not fit into memory: use --tile-size, or a smaller one, or "
                        "a smaller INPUT.MIN_SIZE_TEST and MAX_SIZE_TEST"
                    )
                if failure:
                    release_memory(device)  # without the traceback, which keeps tensors
                    say(failure)
                    failures += 1
        categories = [
            {"id": self._id_of(number), "name": name}
            for number, name in enumerate(self.metadata.get("thing_classes") or ())
        ]
        with output_file(self.output / _IMAGES, "w") as f:
            json.dump({"images": self.images, "annotations": [], "categories": categories}, f)
        return failures

    def _pictures(self, file: Path, folder: Path, write: Write) -> Iterator[Pixels]:
        """Predict on the images of a file, and write the results; yield the pictures.

        Args:
            folder: folder of the pictures, for the images' names.
        """
        image_format = self.predictor.image_format
        in_tiles = self.predictor.tile_size is not None
        for number, image in enumerate(read_images(file, image_format, in_tiles)):
            image_id = len(self.images) + 1
            began = time.perf_counter()
            found = self.predictor(image, image_id)
            self.seconds += time.perf_counter() - began
            name = str(folder / file.name) + (f"#{number}" if is_video(file) else "")
            height, width = image.shape[:2]
            entry = {"id": image_id, "file_name": name, "height": height, "width": width}
            self.images.append(entry)
            drawn = [result for result in found if result["score"] >= self.min_score]
            picture = draw(image, image_format, drawn, self.metadata, is_video(file))
            write({**r, "category_id": self._id_of(r["category_id"])} for r in found)
            yield picture

    def _id_of(self, number: int) -> int:
        """The dataset's id of a category, or the model's number."""
        ids = self.metadata.get("thing_dataset_id_to_contiguous_id") or {}
        return next((id_ for id_, n in ids.items() if n == number), number)
