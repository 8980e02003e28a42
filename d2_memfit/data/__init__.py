# Copyright (c) the d2_memfit developers.
"""Users' own datasets: registration by files, checks, and the settings that follow from them."""

from .annotations import *
from .coco_file import *
from .dataset_check import *
from .dataset_settings import *
from .datasets import *
from .hold_out import *
from .images import *
from .schedule import *
from .sizes import *
