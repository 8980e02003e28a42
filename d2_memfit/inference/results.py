# Copyright (c) the d2_memfit developers.
"""Results in COCO's format, written as they arrive."""

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Union

from ..common.files import output_file
from .merge import Detection

__all__ = ["CocoResultsWriter", "to_coco"]


def to_coco(detection: Detection, image_id: int, categories: Sequence[int] = ()) -> dict[str, Any]:
    """Convert a merged detection to COCO's results format.

    Args:
        categories: the dataset's category id for each class of the model; if empty, the class
            itself is the id.
    """
    category = detection.category
    x0, y0, x1, y1 = detection.box.tolist()
    result = {
        "image_id": image_id,
        "category_id": categories[category] if categories else category,
        "bbox": [x0, y0, x1 - x0, y1 - y0],
        "score": detection.score,
    }
    if detection.mask is not None:
        counts = detection.mask["counts"].decode("utf-8")
        result["segmentation"] = {"size": list(detection.mask["size"]), "counts": counts}
    return result


class CocoResultsWriter:
    """Writes results to a JSON file, without keeping them in memory."""

    def __init__(self, file: IO[str]) -> None:
        self._file = file
        self._separator = "\n"

    @classmethod
    @contextmanager
    def open(cls, path: Union[str, Path]) -> "Iterator[CocoResultsWriter]":
        """Open a file. It appears when all results are written, and not after an error."""
        with output_file(path, "w") as file:
            file.write("[")
            yield cls(file)
            file.write("\n]\n")

    def write(self, results: Iterable[dict[str, Any]]) -> None:
        """Write the results of an image, all of them or, after an error, none."""
        for line in [json.dumps(result) for result in results]:
            self._file.write(self._separator + line)
            self._separator = ",\n"
