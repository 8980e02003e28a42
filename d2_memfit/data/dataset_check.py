# Copyright (c) the d2_memfit developers.
"""Checks of dataset dicts for faults that training would not report."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Optional

from detectron2.config import CfgNode

from .annotations import (
    AnnotationSummary,
    Case,
    complaints_about_boxes,
    complaints_about_labels,
    look_at_annotations,
)
from .dataset_settings import classes_of_model
from .images import complaints_about_images, look_at_images

__all__ = ["look_at_dataset", "warnings_about_data"]

_MANY = 100_000  # annotations from which the check is slow enough for a message


def look_at_dataset(
    dicts: Sequence[Mapping[str, Any]], progress: Callable[[str], None]
) -> AnnotationSummary:
    """Check all dicts in one pass, and as many images as 3 s allow.

    Args:
        dicts: dataset dicts as given to Detectron2's loader.
        progress: called with a line at the start and the end of a slow check.
    """
    start = time.perf_counter()
    number = sum(len(d.get("annotations", ())) for d in dicts)
    if number >= _MANY:
        progress(f"Checking {number:,} annotations of {len(dicts):,} images ...")
    summary = look_at_annotations(dicts)
    named = [d for d in dicts if isinstance(d.get("file_name"), str)]
    files = [d["file_name"] for d in named]
    summary.images = look_at_images(files, [(d.get("width"), d.get("height")) for d in named])
    if summary.images.get("missing", Case()).number == len(files):
        summary.images = {
            "opened": Case()
        }  # the names are not files; only the mapper can read them
    if number >= _MANY:
        num_opened = summary.images["opened"].number
        progress(
            f"Checked {number:,} annotations, and {num_opened:,} of {len(files):,} images, in "
            f"{time.perf_counter() - start:.1f} s"
        )
    return summary


def warnings_about_data(
    cfg: Optional[CfgNode], summary: AnnotationSummary, class_names: Optional[Sequence[str]]
) -> list[str]:
    """Warnings, with counts, about data that trains wrongly or ends training later.

    Args:
        cfg: tells what the model learns; None if unknown.
        class_names: class names of the dataset, if known.
    """
    warnings = [text for _, text in complaints_about_boxes(summary.cases, summary.num_objects)]
    if cfg is not None:
        warnings += _warnings_about_classes(cfg, summary, class_names)
        warnings += [text for _, text in complaints_about_labels(cfg, summary)]
    return warnings + [
        text for _, text in complaints_about_images(summary.images, summary.num_images)
    ]


def _warnings_about_classes(
    cfg: CfgNode, found: AnnotationSummary, class_names: Optional[Sequence[str]]
) -> list[str]:
    warnings = []
    for number, case in found.classes.items():
        if number.isdigit():
            continue
        warnings.append(
            f"{case.number} of {found.num_objects} objects have the category_id {number}, which is "
            f"not an integer from 0 up: {case.first}"
        )
    model = classes_of_model(cfg)
    if model is None:
        return warnings
    key, num_classes = model
    outside = {c: n for c, n in found.classes.items() if c.isdigit() and int(c) >= num_classes}
    if outside:
        ids = ", ".join(sorted(outside, key=int)[:5])
        count = sum(case.number for case in outside.values())
        warnings.append(
            f"{count} of {found.num_objects} objects have a category_id outside 0 to "
            f"{num_classes - 1} ({ids}), while {key} is {num_classes}. Training takes them as "
            f"background, or stops: {next(iter(outside.values())).first}"
        )
    if class_names is not None and len(class_names) != num_classes:
        names = ", ".join(class_names[:5]) + (", ..." if len(class_names) > 5 else "")
        warnings.append(
            f"{key} is {num_classes}, but the dataset has {len(class_names)} classes ({names}). "
            "Set the key to that number"
        )
    return warnings
