# Copyright (c) the d2_memfit developers.
"""What a window changes, and how it is put back."""

from .state_copy import *
