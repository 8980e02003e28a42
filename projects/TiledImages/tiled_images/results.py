"""Results in COCO's format, written while they come in."""

import json
import os
from collections.abc import Iterable, Sequence
from typing import Any

from .merge import Detection

__all__ = ["CocoResultsWriter", "to_coco"]


def to_coco(detection: Detection, image_id: int, categories: Sequence[int] = ()) -> dict[str, Any]:
    """A merged detection as COCO's evaluation reads it.

    Args:
        categories: the dataset's number of each of the model's; the model's own without.
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
    """Writes results into a JSON file, of which it keeps none in memory.

    The file appears when all is written. Until then, and after an error, ``<path>.part`` has what
    there is.

    Args:
        path: of the JSON file; a file that is there is replaced.
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
        """Write them while they come; if that ends with an error, none of them stays."""
        place, separator = self._file.tell(), self._separator
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
