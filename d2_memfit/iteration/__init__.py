# Copyright (c) the d2_memfit developers.
from .geometry import *
