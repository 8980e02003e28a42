# Copyright (c) the d2_memfit developers.
"""Evaluation that needs less memory of the host, and counts what COCO's would miss."""

from .evaluation import build_evaluator, distinct_annotation_ids
from .in_parts import predictions_on_disk

__all__ = [
    "build_evaluator",
    "distinct_annotation_ids",
    "predictions_on_disk",
]
