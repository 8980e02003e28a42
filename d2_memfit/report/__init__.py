# Copyright (c) the d2_memfit developers.
"""Reports of runs and dry runs, as pictures and pages."""

from .page import *
from .plots import *
from .records import *
