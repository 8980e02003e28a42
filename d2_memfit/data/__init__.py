# Copyright (c) the d2_memfit developers.
"""Users' own datasets: registration by files, checks, and the settings that follow from them."""

from .annotations import (
    AnnotationFacts,
    check_boxes,
    check_crowd,
    check_polygons,
    look_at_annotations,
)
from .coco_file import CocoFile, check_coco_file
from .convert import ConvertedSplit, convert_folder
from .dataset_check import look_at_dataset, warnings_about_data
from .dataset_settings import Setting, check_classes, fit_to_data, goes_with_data
from .datasets import check_datasets, register_coco
from .images import complaints_about_images, look_at_images
from .schedule import fine_tuning_schedule
from .sizes import shorter_sides

__all__ = [
    "AnnotationFacts",
    "CocoFile",
    "ConvertedSplit",
    "Setting",
    "check_boxes",
    "check_classes",
    "check_coco_file",
    "check_crowd",
    "check_datasets",
    "check_polygons",
    "complaints_about_images",
    "convert_folder",
    "fine_tuning_schedule",
    "fit_to_data",
    "goes_with_data",
    "look_at_annotations",
    "look_at_dataset",
    "look_at_images",
    "register_coco",
    "shorter_sides",
    "warnings_about_data",
]
