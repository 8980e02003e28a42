# Copyright (c) the d2_memfit developers.
"""Running images, and running them again with less memory: in training, counting and inference."""

from .attempts import *
from .inference import *
from .oom_log import *
from .recovery import *
