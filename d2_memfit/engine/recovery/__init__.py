# Copyright (c) the d2_memfit developers.
"""What happens when memory runs out, in training and in inference."""

from .inference import *
from .oom_record import *
from .recovery import *
