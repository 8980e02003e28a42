# Copyright (c) the d2_memfit developers.
"""What losses are weighted by: decided by a test of gradients, and applied to each window."""

from .adapters import *
from .changes import *
from .communication import *
from .decide import *
from .loss_rules import *
from .pairs import *
from .published import *
from .rules import *
from .runs import *
from .sketch import *
from .wording import *
