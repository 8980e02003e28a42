# Copyright (c) the d2_memfit developers.
"""Results in COCO's format, written as they arrive."""

import json
import os
from collections.abc import Iterable, Sequence
from typing import Any

from .merge import Detection

__all__ = ["CocoResultsWriter", "to_coco"]


def to_coco(detection: Detection, image_id: int, categories: Sequence[int] = ()) -> dict[str, Any]:
    """Convert a merged detection to COCO's results format.

    Args:
        categories: the dataset's category id for each of the model's; without them, the model's
            own.
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
    """Writes results to a JSON file, without keeping them in memory.

    The file appears when all results are written. Until then, and after an error, ``<path>.part``
    has the results so far.

    Args:
        path: path of the JSON file; an existing file is replaced.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._part = f"{path}.part"

    def __enter__(self) -> "CocoResultsWriter":
        self._file = open(self._part, "w", encoding="utf-8")
        self._file.write("[")
        self._separator = "\n"
        return self

    def write(self, results: Iterable[dict[str, Any]]) -> None:
        """Write results as they arrive; after an error, none of them is kept."""
        place = self._file.tell()
        separator = self._separator
        try:
            for result in results:
                self._file.write(self._separator + json.dumps(result))
                self._separator = ",\n"
        except BaseException:
            self._file.seek(place)
            self._file.truncate()
            self._separator = separator
            raise

    def __exit__(self, kind: Any, *_: Any) -> None:
        if kind is None:
            self._file.write("\n]\n")
        self._file.close()
        if kind is None:
            os.replace(self._part, self._path)
