# Copyright (c) the d2_memfit developers.
"""Plans and estimates as text, files and pictures."""

from .answers import *
from .plan_file import *
from .text import *
