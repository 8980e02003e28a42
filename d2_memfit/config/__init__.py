# Copyright (c) the d2_memfit developers.
"""Config keys, config files and presets."""

from .cards import *
from .files import *
from .keys import *
from .load import *
