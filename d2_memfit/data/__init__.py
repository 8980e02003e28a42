"""A user's own dataset: registered by its files, checked, and what a config has to say of it."""

from .coco_file import CocoFile, check_coco_file
from .datasets import add_coco_option, check_datasets, register_coco
from .fit import Setting, check_classes, fit_to_data, goes_with_data
from .schedule import fine_tuning_schedule
from .sizes import shorter_sides

__all__ = [
    "CocoFile",
    "Setting",
    "add_coco_option",
    "check_classes",
    "check_coco_file",
    "check_datasets",
    "fine_tuning_schedule",
    "fit_to_data",
    "goes_with_data",
    "register_coco",
    "shorter_sides",
]
