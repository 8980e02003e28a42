# Copyright (c) the d2_memfit developers.
"""Reports of runs and dry runs, as pages."""

from .page import *
