# Copyright (c) the d2_memfit developers.
"""What losses are divided by: declared by the model, an adapter or the user, and tested."""

from .adapters import *
from .communication import *
from .normalizers import *
from .trial import *
from .trial_forwards import *
from .verdict import *
