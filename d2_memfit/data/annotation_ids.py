# Copyright (c) the d2_memfit developers.
"""Annotation ids with which COCO's API counts all objects."""

import io
import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, redirect_stdout
from functools import wraps
from typing import Any

from detectron2.evaluation import COCOEvaluator
from detectron2.utils.logger import log_first_n

from ..common.patching import replaced_functions

__all__ = ["unique_annotation_ids"]


def unique_annotation_ids() -> AbstractContextManager[None]:
    """While open, ``COCOEvaluator`` numbers annotations from 1 if pycocotools needs that.

    ``COCOeval.evaluateImg`` writes the id of the matched annotation, or 0 for no match. ``COCO``
    finds annotations by their ids. So an object with the id 0 would count as missed.
    """
    # Projects make and derive evaluators themselves, in build_evaluator or test.
    return replaced_functions([COCOEvaluator], {"evaluate": _numbering})


def _numbering(evaluate: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(evaluate)
    def evaluate_numbered(self: Any, *args: Any, **kwargs: Any) -> Any:
        annotations = self._coco_api.dataset.get("annotations", [])
        ids = {a["id"] for a in annotations if isinstance(a["id"], int) and a["id"] > 0}
        if len(ids) < len(annotations):
            log_first_n(
                logging.WARNING,
                f"{self._metadata.get('json_file')}: annotation ids are not different integers "
                "from 1 up, which pycocotools needs. The evaluation uses new numbers",
                key="message",
            )
            for number, annotation in enumerate(annotations, 1):
                annotation["id"] = number
            with redirect_stdout(io.StringIO()):
                self._coco_api.createIndex()
        return evaluate(self, *args, **kwargs)

    return evaluate_numbered
